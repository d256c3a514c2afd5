"""Brings every document of a registry to this release's schema. Reading upgrades by itself; this writes it down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from adapters.errors import StoreConflict, StoreMissing, VersionConflict
from adapters.registry import codec, layout
from adapters.registry.heads import MAX_ATTEMPTS, jitter
from adapters.registry.registry import Registry
from adapters.store import Store


@dataclass(frozen=True, slots=True)
class UpgradeReport:
    """How many documents there are and how many were rewritten. Manifests never change."""

    schema_version: int
    heads: int
    heads_rewritten: int
    bases: int
    bases_rewritten: int
    shards_rewritten: int


async def upgrade(registry: Registry) -> UpgradeReport:
    """Rewrites heads, base contracts and index shards of an older schema. Safe to repeat, to interrupt and beside writers.

    Gateways of an older release can't read what was rewritten: upgrade them first. Raises the store's errors.
    """
    store = registry.store
    heads = [layout.head_key(*adapter) for adapter, found in (await registry.truth.adapters()).items() if found.head_etag]
    bases = [layout.contract_key(base) for base in await registry.bases()]
    # first of all the marker, so that an older release writes no more
    await _rewrite(store, layout.MARKER, _marker)
    heads_rewritten = [key for key in heads if await _rewrite(store, key, _head)]
    bases_rewritten = [key for key in bases if await _rewrite(store, key, _base)]
    await registry.sweep()  # the rows name the heads' ETags
    shards = [row.key async for row in store.list(layout.INDEX)]
    shards_rewritten = [key for key in shards if await _rewrite(store, key, _shard)]
    await _rewrite(store, layout.MARKER, _marker)  # from now on an older release refuses to publish here
    return UpgradeReport(
        schema_version=codec.SCHEMA_VERSION,
        heads=len(heads),
        heads_rewritten=len(heads_rewritten),
        bases=len(bases),
        bases_rewritten=len(bases_rewritten),
        shards_rewritten=len(shards_rewritten),
    )


async def _rewrite(store: Store, key: str, rewrite: Callable[[bytes], bytes]) -> bool:
    """Whether the document was of an older schema, and is rewritten now: as it is, with the same revision."""
    for attempt in range(MAX_ATTEMPTS):
        try:
            found = await store.get(key)
        except StoreMissing:
            return False
        if codec.schema_version_of(found.data) == codec.SCHEMA_VERSION:
            return False
        try:
            await store.replace(key, rewrite(found.data), found.etag)
            return True
        except StoreConflict:
            await jitter(attempt)
    raise VersionConflict("a document is being changed by too many at once; try again", retry_after_s=1)


def _head(data: bytes) -> bytes:
    return codec.encode_head(codec.decode_head(data))


def _base(data: bytes) -> bytes:
    return codec.encode_contract(codec.decode_contract(data))


def _marker(data: bytes) -> bytes:
    return codec.encode_marker(checked_at=codec.check_marker(data))


def _shard(data: bytes) -> bytes:
    return codec.encode_entries(codec.decode_entries(data))


def _marker(data: bytes) -> bytes:
    return codec.encode_marker(checked_at=codec.check_marker(data))
