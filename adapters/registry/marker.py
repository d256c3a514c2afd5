"""`registry.json` at the registry's root: this is a registry, and its store keeps the promises that one needs.

The first publication asks the store (`adapters.store.conditional`) and writes the marker; later ones find it.
"""

from __future__ import annotations

import asyncio

from adapters.errors import StoreConflict, StoreMisconfigured, StoreMissing
from adapters.registry import codec, layout
from adapters.registry.moments import now
from adapters.store import Store
from adapters.store.conditional import ConditionalWrites, probe

IGNORED = "conditional_writes_ignored"


class Marker:
    """The marker of one registry. A yes is kept for the life of the process."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._writable = False
        self._asking = asyncio.Lock()

    async def ensure(self) -> None:
        """Returns if this registry may be written. One read for each process, and a probe for each new registry.

        Raises StoreMisconfigured with reason `conditional_writes_ignored`, StoreError with reason `schema_too_new` or
        `metadata_corrupt`, and the store's errors.
        """
        if self._writable:
            return
        async with self._asking:
            if not self._writable and not await self._is_there():
                await self._create()
            self._writable = True

    async def _is_there(self) -> bool:
        try:
            found = await self._store.get(layout.MARKER)
        except StoreMissing:
            return False
        codec.check_marker(found.data)
        return True

    async def _create(self) -> None:
        check_honoured(await probe(self._store))
        try:
            await self._store.create(layout.MARKER, codec.encode_marker(checked_at=now()))
        except StoreConflict:  # somebody else was first
            await self._is_there()


def check_honoured(found: ConditionalWrites) -> None:
    """Raises StoreMisconfigured if the store breaks a promise that a registry lives by."""
    if not found.honoured:
        raise StoreMisconfigured(
            "this store does not keep what a registry needs: " + ", ".join(name.replace("_", " ") for name in found.broken),
            reason=IGNORED,
            hint="use a store with conditional writes (AWS S3, MinIO, SeaweedFS, Ceph, a local folder); "
            "without them two publishers can overwrite each other",
        )
