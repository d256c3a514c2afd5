"""The download of an adapter's files into a folder: ranges read and written in parallel, and hashed beside that."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from adapters import metrics
from adapters.cache.hashing import Check, Data, check_of
from adapters.errors import AdapterCorrupt, StoreMissing
from adapters.metrics import NULL_METER, Meter
from adapters.settings import CacheSettings
from adapters.store import Store
from adapters.tree_digest import TREE_PART_BYTES
from adapters.types import FileDigest, ResolvedAdapter

log = logging.getLogger(__name__)

READS_OF_A_FILE = 2
READS_OF_A_RANGE = 2


class InThread(Protocol):
    """Runs a blocking call off the event loop. If the caller is cancelled, it returns only once the call has ended."""

    def __call__(self, call: Callable[..., Any], *args: Any) -> Awaitable[Any]: ...


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`length` bytes of a file from `start` on."""

    file: FileDigest
    start: int
    length: int


def plan_ranges(files: tuple[FileDigest, ...], range_bytes: int) -> Iterator[ByteRange]:
    """The files cut into ranges of at most `range_bytes`: file by file, each from its beginning. Files that are checked by parts
    are cut into whole parts, and into one part where `range_bytes` is less."""
    for file in files:
        whole_parts = max(TREE_PART_BYTES, range_bytes - range_bytes % TREE_PART_BYTES)
        step = range_bytes if file.tree is None else whole_parts
        for start in range(0, file.size_bytes, step):
            yield ByteRange(file, start, min(step, file.size_bytes - start))


async def fetch_files(
    store: Store,
    adapter: ResolvedAdapter,
    reserving: Awaitable[Path],
    settings: CacheSettings,
    in_thread: InThread,
    meter: Meter = NULL_METER,
) -> None:
    """Leaves the adapter's files in the folder that `reserving` gives, complete and verified; syncing them is the caller's part.

    Making room may take as long as writing, so reading begins beside it. One window of `fetch_concurrency` ranges runs over all
    files, so that the small one costs no round trip of its own. A file whose digest differs is read once more, since wires and
    proxies damage bytes too. The store has its own retries; an error of its own ends the fetch. Raises AdapterCorrupt, the
    store's errors other than StoreMissing, OSError, and what `reserving` raises; what lies in the folder is void then.
    """
    folder = asyncio.ensure_future(reserving)
    try:
        fetch = _Fetch(store, adapter.digest, folder, settings, in_thread, meter)
        await _fetch_twice(fetch, adapter, meter)
    finally:
        # It ends before the caller cleans up after it.
        await asyncio.gather(folder, return_exceptions=True)


async def _fetch_twice(fetch: _Fetch, adapter: ResolvedAdapter, meter: Meter) -> None:
    left = adapter.files
    for _ in range(READS_OF_A_FILE):
        left = await fetch.read(left)
        if not left:
            return
        log.warning("`%s` of %s came with another digest than its manifest says", left[0].name, adapter.ref)
        meter.count(metrics.CACHE_BAD_READS, len(left), reason="digest_mismatch")
    raise AdapterCorrupt(f"the stored `{left[0].name}` is not what its manifest says", reason="digest_mismatch")


class FileSink:
    """A file that is written in any order once it is open. `write` blocks."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._fd: int | None = None

    def open(self, folder: Path) -> None:
        """The file exists in `folder`, at full size: reserving room made it. Raises OSError."""
        self._fd = os.open(folder / self._name, os.O_WRONLY | os.O_CLOEXEC)

    def write(self, start: int, data: Data) -> None:
        """Puts `data` where it belongs. Raises OSError."""
        assert self._fd is not None, "opened before"
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, start)
            view, start = view[written:], start + written

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


class _Fetch:
    """The reading of one adapter's files into one folder, which may still be on its way."""

    def __init__(
        self,
        store: Store,
        digest: str,
        folder: asyncio.Future[Path],
        settings: CacheSettings,
        in_thread: InThread,
        meter: Meter,
    ) -> None:
        self._store = store
        self._digest = digest
        self._folder = folder
        self._settings = settings
        self._in_thread = in_thread
        self._meter = meter

    async def read(self, files: tuple[FileDigest, ...]) -> tuple[FileDigest, ...]:
        """Reads `files` into the folder; gives those whose digest differs."""
        sinks = {file.name: FileSink(file.name) for file in files}
        checks = {file.name: check_of(file) for file in files}
        try:
            await self._read_all(plan_ranges(files, self._settings.range_bytes), sinks, checks)
            return tuple(file for file in files if not checks[file.name].is_right())
        finally:
            for used in (*sinks.values(), *checks.values()):
                used.close()

    async def _read_all(self, parts: Iterator[ByteRange], sinks: dict[str, FileSink], checks: dict[str, Check]) -> None:
        """Reads, hashes and writes parts in whatever order they come, at most `fetch_concurrency` at once.

        A part counts until it is hashed and written, so no more than that many are in memory at any time.
        """
        room = asyncio.Semaphore(self._settings.fetch_concurrency)

        async def open_all() -> None:
            folder = await asyncio.shield(self._folder)
            for sink in sinks.values():
                sink.open(folder)

        async def bring(part: ByteRange) -> None:
            data = await self._read_range(part)
            hashing = tasks.create_task(checks[part.file.name].take(part.start, data))
            await opened
            await self._in_thread(sinks[part.file.name].write, part.start, data)
            await hashing
            room.release()

        try:
            async with asyncio.TaskGroup() as tasks:
                opened = tasks.create_task(open_all())
                for part in parts:
                    await room.acquire()
                    tasks.create_task(bring(part))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _read_range(self, part: ByteRange) -> Data:
        """The range's bytes; one that comes too short is read once more. Raises AdapterCorrupt."""
        for _ in range(READS_OF_A_RANGE):
            data = await self._get_range(part)
            if len(data) == part.length:
                return data
            self._meter.count(metrics.CACHE_BAD_READS, reason="short_file")
        raise AdapterCorrupt(
            f"the stored `{part.file.name}` has not the size that its manifest says",
            reason="short_file",
            limit=part.file.size_bytes,
            value=part.start + len(data),
        )

    async def _get_range(self, part: ByteRange) -> Data:
        name = part.file.name
        try:
            return await self._store.get_range(f"blobs/{self._digest}/{name}", part.start, part.length)
        except StoreMissing as error:
            raise AdapterCorrupt(f"the manifest names `{name}`, but the store has no such file", reason="blob_missing") from error
