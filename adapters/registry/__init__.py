"""The registry: adapters, versions and aliases over any store, and the picture of it that gateways keep in memory."""

from adapters.registry.registry import Published, Registry

__all__ = ["Published", "Registry"]
