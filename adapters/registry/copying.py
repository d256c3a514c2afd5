"""A registry copied into another store: a backup, and the way back.

The target is whole at every moment: bases first, then for each adapter its files, its manifests and last its head; the index is
rebuilt at the end. A copy that was interrupted goes on where it stopped. The source may be written meanwhile: each adapter is
copied as of one moment, that at which its head was read; what is published later comes with the next copy.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

from adapters.errors import StoreConflict, StoreMissing, VersionConflict
from adapters.names import AdapterRef
from adapters.registry import codec, layout
from adapters.registry.at_once import each
from adapters.registry.index import ListedAdapter, SweepReport
from adapters.registry.layout import AdapterName
from adapters.registry.registry import Registry
from adapters.registry.uploads import CHUNK_BYTES, Notices, StreamsUp, is_old
from adapters.store import Listed, Object, Store
from adapters.types import FileDigest, Head, Manifest

Progress = Callable[[int, int], None]

ADAPTERS_AT_ONCE = 8
READ_BYTES = 8 * 2**20
MAX_LOOKS = 8


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy did. `heads_newer` are adapters whose head in the target is newer and was left; `damaged` are versions whose
    files are missing or wrong in the source, whose adapters were not brought up to date."""

    adapters: int
    versions: int
    versions_copied: int
    files_copied: int
    bytes_copied: int
    heads_copied: int
    heads_newer: tuple[str, ...]
    bases_copied: int
    damaged: tuple[AdapterRef, ...]
    index: SweepReport


async def copy(source: Store, target: Store, progress: Progress | None = None, *, verify: bool = False) -> CopyReport:
    """Copies the registry in `source` into `target`; what is there already stays. `progress` is told adapters done and in all.

    Manifests and heads go byte for byte; files are hashed while they are copied, with `verify` also those that are there already.
    Neither the index nor `registry.json` is copied. Raises VersionConflict with reason `different_history`, before anything is
    written, if a version is something else in the target or a head went another way there; and the stores' errors.
    """
    return await _Copy(source, target, progress or (lambda done, total: None), verify).run()


class _Damaged(Exception):
    """A file of a version is missing or wrong in the source."""


@dataclass(slots=True)
class _Counts:
    versions_copied: int = 0
    files_copied: int = 0
    bytes_copied: int = 0
    heads_copied: int = 0
    bases_copied: int = 0
    heads_newer: list[str] = field(default_factory=list)
    damaged: list[AdapterRef] = field(default_factory=list)


class _Copy:
    def __init__(self, source: Store, target: Store, progress: Progress, verify: bool) -> None:
        self._source, self._target = source, target
        self._from, self._to = Registry(source), Registry(target)
        self._progress = progress
        self._verify = verify
        self._counts = _Counts()
        self._checked: set[str] = set()  # digests whose files in the target are known to be whole
        self._known: dict[AdapterRef, Manifest] = {}  # versions that both have
        self._sizes_there: dict[str, int] = {}
        self._one_at_a_time: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def run(self) -> CopyReport:
        listed = await self._from.truth.adapters()
        there = await self._to.truth.adapters()
        self._sizes_there = {row.key: row.size_bytes for row in await _rows(self._target, layout.BLOBS)}
        shared = sorted(listed.keys() & there.keys())
        await each(shared, lambda adapter: self._refuse_other_history(adapter, listed[adapter], there[adapter]), ADAPTERS_AT_ONCE)
        await self._copy_notes(layout.BASES)
        done = 0

        async def adapter_and_tell(adapter: AdapterName) -> None:
            nonlocal done
            await self._adapter(adapter)
            done += 1
            self._progress(done, len(listed))

        await each(sorted(listed), adapter_and_tell, ADAPTERS_AT_ONCE)
        await self._copy_notes(layout.ADOPTED)
        return self._report(listed.values(), await self._to.sweep())

    def _report(self, listed: Iterable[ListedAdapter], index: SweepReport) -> CopyReport:
        counts, adapters = self._counts, list(listed)
        return CopyReport(
            adapters=len(adapters),
            versions=sum(len(adapter.versions) for adapter in adapters),
            versions_copied=counts.versions_copied,
            files_copied=counts.files_copied,
            bytes_copied=counts.bytes_copied,
            heads_copied=counts.heads_copied,
            heads_newer=tuple(sorted(counts.heads_newer)),
            bases_copied=counts.bases_copied,
            damaged=tuple(sorted(counts.damaged)),
            index=index,
        )

    async def _refuse_other_history(self, adapter: AdapterName, ours: ListedAdapter, theirs: ListedAdapter) -> None:
        both = sorted(ours.versions & theirs.versions)
        here, there = await self._from.truth.manifests(*adapter, both), await self._to.truth.manifests(*adapter, both)
        for mine, other in zip(here, there, strict=True):
            if mine.digest != other.digest:
                raise _other_history(str(mine.ref))
        self._known |= {manifest.ref: manifest for manifest in here}
        head, _ = await self._from.truth.head(*adapter)
        other_head, _ = await self._to.truth.head(*adapter)
        if not (_comes_from(head, other_head) or _comes_from(other_head, head)):
            raise _other_history(str(adapter))

    # One adapter

    async def _adapter(self, adapter: AdapterName) -> None:
        """Copies an adapter as of the moment at which its head is read; reads it again if versions were collected meanwhile."""
        for _ in range(MAX_LOOKS):
            found = await _read(self._source, layout.head_key(*adapter))
            head = codec.decode_head(found.data) if found else Head(*adapter)
            try:
                await self._versions(adapter, head)
            except _Damaged as damage:
                now, _ = await self._from.truth.head(*adapter)
                if now.revision != head.revision:
                    continue
                self._counts.damaged.append(damage.args[0])
                return
            if found:
                await self._head(head, found.data)
            return
        raise VersionConflict(f"`{adapter}` changes too often to be copied; try again", retry_after_s=1)

    async def _versions(self, adapter: AdapterName, head: Head) -> None:
        there = set(await self._to.versions(*adapter))
        other, _ = await self._to.truth.head(*adapter)
        collected = (head if _comes_from(head, other) else other).collected
        # listed after the head was read: whatever the head names is among them
        for version in await self._from.versions(*adapter):
            ref = AdapterRef(*adapter, version)
            data = b"" if ref in self._known else (await self._source.get(layout.manifest_key(ref))).data
            manifest = self._known.get(ref) or codec.decode_manifest(data)
            if version not in collected:
                async with self._one_at_a_time[manifest.digest]:
                    await self._files_once(manifest, is_named=version in there and version not in other.collected)
            if ref not in self._known:
                await self._manifest(manifest, data)

    async def _manifest(self, manifest: Manifest, data: bytes) -> None:
        try:
            await self._target.create(layout.manifest_key(manifest.ref), data)
        except StoreConflict:
            if (await self._to.truth.manifest(manifest.ref)).digest != manifest.digest:
                raise _other_history(str(manifest.ref)) from None
        else:
            self._counts.versions_copied += 1

    async def _files_once(self, manifest: Manifest, *, is_named: bool) -> None:
        if manifest.digest not in self._checked and not (is_named and self._is_whole(manifest)):
            await self._files(manifest, is_named=is_named)
            self._checked.add(manifest.digest)

    def _is_whole(self, manifest: Manifest) -> bool:
        """Whether the listing at the start settles it: files that a version of the target holds stay there."""
        if self._verify:
            return False
        sizes = {layout.blob_key(manifest.digest, file.name): file.size_bytes for file in manifest.files}
        return all(self._sizes_there.get(key) == size for key, size in sizes.items())

    async def _files(self, manifest: Manifest, *, is_named: bool) -> None:
        """Copies what is not there, until one look at the target shows all, as an upload does."""
        notices, sent = Notices(self._target), set[str]()
        for _ in range(MAX_LOOKS):
            rows = {row.key: row for row in await notices.gone(layout.blob_folder(manifest.digest))}
            keys = {layout.blob_key(manifest.digest, file.name): file for file in manifest.files}
            wanted = [
                key for key, file in keys.items() if not await self._is_there(key, file, rows.get(key), key in sent, is_named)
            ]
            if not wanted:
                return
            for key in wanted:
                await self._file(key, keys[key], manifest.ref)
                sent.add(key)
                self._counts.files_copied += 1
                self._counts.bytes_copied += keys[key].size_bytes
        raise VersionConflict("the files of a version don't stay in the target; try again", retry_after_s=1)

    async def _is_there(self, key: str, file: FileDigest, row: Listed | None, was_sent: bool, is_named: bool) -> bool:
        if row is None or row.size_bytes != file.size_bytes:
            return False
        if was_sent:
            return True
        if is_old(row) and not is_named:
            return False
        return not self._verify or await _sha256(self._target, key, file.size_bytes) == file.sha256

    async def _file(self, key: str, file: FileDigest, ref: AdapterRef) -> None:
        chunks = _checked_chunks(self._source, key, file, ref)
        if isinstance(self._target, StreamsUp) and file.size_bytes > CHUNK_BYTES:
            await self._target.put_stream(key, chunks)
        else:
            await self._target.put(key, b"".join([chunk async for chunk in chunks]))

    async def _head(self, head: Head, data: bytes) -> None:
        """Writes the head unless the target's is as new; a conflict means that it moved, so that is looked at again."""
        key = layout.head_key(head.base, head.name)
        for _ in range(MAX_LOOKS):
            there = await _read(self._target, key)
            other = codec.decode_head(there.data) if there else None
            if other is not None and not _comes_from(head, other):
                if not _comes_from(other, head):
                    raise _other_history(f"{head.base}:{head.name}")
                self._counts.heads_newer.append(f"{head.base}:{head.name}")
                return
            if other is not None and other.revision == head.revision:
                return
            try:
                await (self._target.replace(key, data, there.etag) if there else self._target.create(key, data))
            except StoreConflict:
                continue
            self._counts.heads_copied += 1
            return
        raise VersionConflict(f"`{head.name}` changes too often in the target; try again", retry_after_s=1)

    # Documents without a history

    async def _copy_notes(self, folder: str) -> None:
        """The documents under `folder` that the target lacks, or has from an earlier time."""
        there = {row.key: row for row in await _rows(self._target, folder)}
        for row in await _rows(self._source, folder):
            other = there.get(row.key)
            if other is not None and other.modified_s >= row.modified_s:
                continue
            data = (await self._source.get(row.key)).data
            if await self._overwrite(row.key, data) and folder == layout.BASES:
                self._counts.bases_copied += 1

    async def _overwrite(self, key: str, data: bytes) -> bool:
        """Whether it was written. A conflict means that somebody just wrote something newer."""
        there = await _read(self._target, key)
        if there is not None and there.data == data:
            return False
        try:
            await (self._target.replace(key, data, there.etag) if there else self._target.create(key, data))
        except StoreConflict:
            return False
        return True


def _comes_from(newer: Head, older: Head) -> bool:
    """Whether `newer` is `older`, or was made from it by later writes; one without moves and directives has nothing to lose."""
    if older.revision == 0 or older.change_id in newer.recent_changes:
        return True
    if newer.revision <= older.revision:
        return False
    was_long_ago = newer.revision - older.revision >= len(newer.recent_changes)
    if not older.history:
        return was_long_ago or not (older.directives or older.pending)
    return was_long_ago and older.history[-1] in newer.history


def _other_history(what: str) -> VersionConflict:
    return VersionConflict(
        f"`{what}` is something else in the target",
        reason="different_history",
        value=what,
        hint="copy into an empty place, or retire one of the two registries",
    )


async def _rows(store: Store, prefix: str) -> list[Listed]:
    return [row async for row in store.list(prefix)]


async def _read(store: Store, key: str) -> Object | None:
    try:
        return await store.get(key)
    except StoreMissing:
        return None


async def _chunks(store: Store, key: str, size_bytes: int) -> AsyncIterator[bytes]:
    for start in range(0, size_bytes, READ_BYTES):
        yield await store.get_range(key, start, min(READ_BYTES, size_bytes - start))


async def _checked_chunks(store: Store, key: str, file: FileDigest, ref: AdapterRef) -> AsyncIterator[bytes]:
    """The file's bytes. A difference is found before the last chunk is handed out, so that no wrong object is finished."""
    digest, held = hashlib.sha256(), b""
    try:
        async for chunk in _chunks(store, key, file.size_bytes):
            digest.update(chunk)
            if held:
                yield held
            held = chunk
    except StoreMissing:
        raise _Damaged(ref) from None
    if digest.hexdigest() != file.sha256:
        raise _Damaged(ref)
    yield held


async def _sha256(store: Store, key: str, size_bytes: int) -> str:
    digest = hashlib.sha256()
    async for chunk in _chunks(store, key, size_bytes):
        digest.update(chunk)
    return digest.hexdigest()
