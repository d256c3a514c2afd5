"""The derived picture of the registry: one row per adapter, in 256 shards that any writer repairs.

A row is always computed from the truth (manifests and head) after its shard was read, and written only if the shard is still
the one that was read. The truth only grows, so a slow writer can't take a faster one back.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from adapters.errors import StoreConflict, StoreError, StoreMissing, StoreUnreachable
from adapters.names import AdapterRef
from adapters.registry import codec, layout
from adapters.registry.layout import AdapterName
from adapters.store import Store
from adapters.types import AdapterEntry, Head, Manifest, VersionEntry

MAX_ATTEMPTS = 64
READS_AT_ONCE = 16

Rows = dict[AdapterName, AdapterEntry]


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard as it was read. `etag` is None if there is none; `whole` is False if it is missing or unreadable."""

    rows: Rows
    etag: str | None
    whole: bool


@dataclass(slots=True)
class ListedAdapter:
    """What one listing of the store shows of an adapter: its versions, and the ETag of its head."""

    versions: set[int] = field(default_factory=set)
    head_etag: str | None = None

    def is_shown_by(self, row: AdapterEntry | None) -> bool:
        """Whether the index row is up to what was listed."""
        return row is not None and row.versions.keys() == self.versions and row.head_etag == self.head_etag


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep found: adapters and versions by the truth, and the adapters whose rows were wrong and are right now."""

    adapters: int
    versions: int
    repaired: tuple[str, ...]
    shards_written: int


def merge(old: AdapterEntry | None, new: AdapterEntry) -> AdapterEntry:
    """The newer of two rows: no revision falls, no version vanishes, none changes its digest."""
    if old is None:
        return new
    newest, other = (new, old) if new.revision >= old.revision else (old, new)
    versions = {**other.versions, **newest.versions}
    for number, known in old.versions.items():
        if versions[number].digest != known.digest:
            shown = newest.versions.get(number, known)
            versions[number] = replace(known, retired=shown.retired, collected=shown.collected, tags=shown.tags)
    return replace(newest, versions=dict(sorted(versions.items())))


def version_entry(manifest: Manifest) -> VersionEntry:
    return VersionEntry(
        version=manifest.ref.version,
        digest=manifest.digest,
        files=manifest.files,
        rank=manifest.rank,
        created_at=manifest.created_at,
        num_modules=manifest.num_modules,
    )


def adapter_entry(head: Head, head_etag: str | None, versions: Mapping[int, VersionEntry]) -> AdapterEntry:
    """The row of an adapter: its versions as the head shows them now."""
    shown = {
        number: replace(
            versions[number],
            retired=number in head.retired,
            collected=number in head.collected,
            tags=dict(head.tags.get(number, {})),
        )
        for number in sorted(versions)
    }
    return AdapterEntry(
        head.base,
        head.name,
        head.revision,
        dict(head.aliases),
        shown,
        dict(head.weights),
        head_etag,
        head.directives,
        dict(head.pending),
    )


class Truth:
    """Reads manifests and heads. Raises StoreError's family; AdapterCorrupt for an unreadable manifest."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reads = asyncio.Semaphore(READS_AT_ONCE)

    async def versions(self, base: str, name: str) -> list[int]:
        """The published versions, ascending; empty if there are none."""
        rows = self._store.list(layout.versions_folder(base, name))
        found = [layout.version_of_key(base, name, row.key) async for row in rows]
        return sorted(number for number in found if number is not None)

    async def manifest(self, ref: AdapterRef) -> Manifest:
        """Raises StoreMissing if the version does not exist."""
        return codec.decode_manifest((await self._store.get(layout.manifest_key(ref))).data)

    async def manifests(self, base: str, name: str, versions: Iterable[int]) -> list[Manifest]:
        """Several manifests, a few at a time."""

        async def read(version: int) -> Manifest:
            async with self._reads:
                return await self.manifest(AdapterRef(base, name, version))

        return list(await asyncio.gather(*map(read, versions)))

    async def head(self, base: str, name: str) -> tuple[Head, str | None]:
        """The head and its ETag; a fresh head and None if there is none yet."""
        try:
            found = await self._store.get(layout.head_key(base, name))
        except StoreMissing:
            return Head(base, name), None
        return codec.decode_head(found.data), found.etag

    async def adapters(self) -> dict[AdapterName, ListedAdapter]:
        """Every adapter with a version, by one listing."""
        found: dict[AdapterName, ListedAdapter] = {}
        async for row in self._store.list(layout.ADAPTERS):
            if (ref := layout.ref_of_key(row.key)) is not None:
                found.setdefault(AdapterName(ref.base, ref.name), ListedAdapter()).versions.add(ref.version)
            elif (adapter := layout.adapter_of_head_key(row.key)) is not None:
                found.setdefault(adapter, ListedAdapter()).head_etag = row.etag
        return {adapter: listed for adapter, listed in found.items() if listed.versions}

    async def entry(self, base: str, name: str, known: AdapterEntry | None = None) -> AdapterEntry | None:
        """The adapter's row, or None without a version. Versions of `known` are not read again: a manifest never changes."""
        numbers = await self.versions(base, name)
        if not numbers:
            return None
        rows = {number: known.versions[number] for number in numbers if known and number in known.versions}
        manifests = await self.manifests(base, name, [number for number in numbers if number not in rows])
        rows |= {manifest.ref.version: version_entry(manifest) for manifest in manifests}
        head, etag = await self.head(base, name)
        return adapter_entry(head, etag, rows)


class Index:
    """The shards: read, watched and written here only."""

    def __init__(self, store: Store, truth: Truth) -> None:
        self._store = store
        self._truth = truth

    async def etags(self) -> dict[int, str]:
        """The ETag of each shard, by one listing."""
        rows = [(layout.shard_of_key(row.key), row.etag) async for row in self._store.list(layout.INDEX)]
        return {shard: etag for shard, etag in rows if shard is not None}

    async def fetch(self, shard: int) -> tuple[tuple[AdapterEntry, ...], str]:
        """A shard's rows and ETag. Raises StoreMissing, StoreError for garbage."""
        found = await self._store.get(layout.shard_key(shard))
        return codec.decode_entries(found.data), found.etag

    async def read(self, shard: int) -> Shard:
        """A shard for a writer; a missing or unreadable one is empty and not whole. Raises StoreError for a newer schema."""
        try:
            found = await self._store.get(layout.shard_key(shard))
        except StoreMissing:
            return Shard({}, None, whole=False)
        try:
            entries = codec.decode_entries(found.data)
        except StoreError as error:
            if error.reason != codec.CORRUPT:
                raise
            return Shard({}, found.etag, whole=False)
        return Shard({AdapterName(entry.base, entry.name): entry for entry in entries}, found.etag, whole=True)

    async def entry(self, base: str, name: str) -> AdapterEntry | None:
        """The adapter's row as the index has it now."""
        return (await self.read(layout.shard_of(base, name))).rows.get(AdapterName(base, name))

    async def update(self, base: str, name: str, *, revision: int, version: int | None = None) -> AdapterEntry | None:
        """Brings the adapter's row up to the truth, unless it already shows `revision` and `version` or more."""
        adapter, number = AdapterName(base, name), layout.shard_of(base, name)

        async def change(found: Shard) -> Rows:
            shard = await self._made_whole(number, found)
            old = shard.rows.get(adapter)
            if old and old.revision >= revision and (version is None or version in old.versions):
                return shard.rows
            new = await self._truth.entry(base, name, old)
            return shard.rows if new is None else {**shard.rows, adapter: merge(old, new)}

        rows, _ = await self._swap(number, change)
        return rows.get(adapter)

    async def sweep(self, *, full: bool = False) -> SweepReport:
        """Brings every row up to the truth: one listing shows which rows are behind, and only those are read.

        With `full` every manifest and head is read, which proves the index instead of believing it.
        """
        listed = await self._truth.adapters()
        by_shard: dict[int, set[AdapterName]] = {shard: set() for shard in await self._shards_there()}
        for adapter in listed:
            by_shard.setdefault(layout.shard_of(*adapter), set()).add(adapter)
        repaired: list[str] = []
        written = 0
        for shard, adapters in sorted(by_shard.items()):
            before: list[Shard] = []

            async def change(found: Shard, adapters: set[AdapterName] = adapters, before: list[Shard] = before) -> Rows:
                before[:] = [found]
                # what was published after the listing is among the shard's rows, or its writer's turn comes after ours
                return await self._swept(found, adapters, listed, full or not found.whole)

            rows, wrote = await self._swap(shard, change)
            if wrote:
                written += 1
                repaired += _differences(before[0].rows, rows)
        versions = sum(len(adapter.versions) for adapter in listed.values())
        return SweepReport(len(listed), versions, tuple(sorted(repaired)), written)

    async def _shards_there(self) -> list[int]:
        """The shards that exist. What else lies among them, the shards of an older release say, is removed."""
        found = []
        async for row in self._store.list(layout.INDEX):
            shard = layout.shard_of_key(row.key)
            if shard is None:
                await self._store.delete(row.key)
            else:
                found.append(shard)
        return found

    async def _swept(
        self, found: Shard, adapters: set[AdapterName], listed: Mapping[AdapterName, ListedAdapter], full: bool
    ) -> Rows:
        """The rows of a shard: those that the listing confirms, the others by the truth."""
        behind = {
            adapter
            for adapter in adapters | found.rows.keys()
            if full or adapter not in listed or not listed[adapter].is_shown_by(found.rows.get(adapter))
        }
        fresh = await self._true_rows(behind, {} if full else found.rows)
        return {**{adapter: row for adapter, row in found.rows.items() if adapter not in behind}, **fresh}

    async def _true_rows(self, adapters: Iterable[AdapterName], known: Rows) -> Rows:
        """The rows of those adapters by the truth alone, a few at a time; manifests that `known` shows are not read again."""
        gate = asyncio.Semaphore(READS_AT_ONCE)

        async def read(adapter: AdapterName) -> AdapterEntry | None:
            async with gate:
                return await self._truth.entry(*adapter, known=known.get(adapter))

        entries = await asyncio.gather(*map(read, sorted(adapters)))
        return {AdapterName(entry.base, entry.name): entry for entry in entries if entry is not None}

    async def _made_whole(self, number: int, shard: Shard) -> Shard:
        """The shard; with rows from the truth if it was missing or unreadable, so that a writer brings back its neighbours."""
        if shard.whole:
            return shard
        mine = [adapter for adapter in await self._truth.adapters() if layout.shard_of(*adapter) == number]
        return replace(shard, rows=await self._true_rows(mine, {}))

    async def _swap(self, number: int, change: Callable[[Shard], Awaitable[Rows]]) -> tuple[Rows, bool]:
        """Changes a shard by compare-and-swap, unless it already holds what `change` makes of it. Returns the rows, and
        whether they were written. A write whose answer was lost is read again, and written a second time at most."""
        lost = False
        for attempt in range(MAX_ATTEMPTS):
            shard = await self.read(number)
            rows = await change(shard)
            if rows == shard.rows and (shard.whole or shard.etag is None):
                return rows, False
            try:
                await self._write(number, rows, shard.etag)
                return rows, True
            except StoreConflict:
                await asyncio.sleep(random.random() * min(0.01 * (attempt + 1), 0.2))
            except StoreUnreachable:
                if lost:
                    raise
                lost = True
        raise StoreConflict("the index is being written by too many at once; try again", retry_after_s=1)

    async def _write(self, number: int, rows: Rows, etag: str | None) -> None:
        data = codec.encode_entries(rows.values())
        if etag is None:
            await self._store.create(layout.shard_key(number), data)
        else:
            await self._store.replace(layout.shard_key(number), data, etag)


def _differences(before: Rows, after: Rows) -> list[str]:
    return [str(adapter) for adapter in before.keys() | after.keys() if before.get(adapter) != after.get(adapter)]
