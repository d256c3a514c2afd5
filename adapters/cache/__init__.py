"""The node cache: verified adapter files on a node's disk, fetched once per digest and leased while in use."""

from adapters.cache.cache import AdapterCache, Lease

__all__ = ["AdapterCache", "Lease"]
