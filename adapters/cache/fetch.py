"""The download of an adapter's files into a folder: ranges in parallel, hashed in order while they are written."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from adapters import metrics
from adapters.errors import AdapterCorrupt, StoreMissing
from adapters.metrics import NULL_METER, Meter
from adapters.settings import CacheSettings
from adapters.store import Store
from adapters.types import FileDigest, ResolvedAdapter

log = logging.getLogger(__name__)

READS_OF_A_FILE = 2
READS_OF_A_RANGE = 2


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`length` bytes of a file from `start` on."""

    file: FileDigest
    start: int
    length: int


ReadRange = Callable[[ByteRange], Awaitable[bytes]]


class InThread(Protocol):
    """Runs a blocking call off the event loop. If the caller is cancelled, it returns only once the call has ended."""

    def __call__(self, call: Callable[..., Any], *args: Any) -> Awaitable[Any]: ...


def plan_ranges(files: tuple[FileDigest, ...], range_bytes: int) -> Iterator[ByteRange]:
    """The files cut into ranges of at most `range_bytes`: file by file, each from its beginning."""
    for file in files:
        for start in range(0, file.size_bytes, range_bytes):
            yield ByteRange(file, start, min(range_bytes, file.size_bytes - start))


async def fetch_files(
    store: Store, adapter: ResolvedAdapter, folder: Path, settings: CacheSettings, in_thread: InThread, meter: Meter = NULL_METER
) -> None:
    """Leaves the adapter's files in `folder`, complete, verified and on the disk for good.

    One window of `fetch_concurrency` ranges runs over all files, so that the small one costs no round trip of its own. A file
    whose digest differs is read once more, since wires and proxies damage bytes too. The store has its own retries; an error of
    its own ends the fetch. Raises AdapterCorrupt, the store's errors other than StoreMissing, and OSError; what lies in
    `folder` is void then.
    """

    async def read(part: ByteRange) -> bytes:
        return await _read_range(store, adapter.digest, part, meter)

    left = adapter.files
    for _ in range(READS_OF_A_FILE):
        left = await _fetch(left, folder, read, settings, in_thread)
        if not left:
            return
        log.warning("`%s` of %s came with another digest than its manifest says", left[0].name, adapter.ref)
        meter.count(metrics.CACHE_BAD_READS, len(left), reason="digest_mismatch")
    raise AdapterCorrupt(f"the stored `{left[0].name}` is not what its manifest says", reason="digest_mismatch")


async def _fetch(
    files: tuple[FileDigest, ...], folder: Path, read: ReadRange, settings: CacheSettings, in_thread: InThread
) -> tuple[FileDigest, ...]:
    """Reads `files` into the folder; gives those whose digest differs."""
    sinks = {file.name: FileSink(folder / file.name, file) for file in files}
    try:

        async def write(part: ByteRange, data: bytes) -> None:
            await in_thread(sinks[part.file.name].write, data)

        await _read_in_order(plan_ranges(files, settings.range_bytes), read, write, settings.fetch_concurrency)
        return tuple([file for file in files if not await in_thread(sinks[file.name].finish)])
    finally:
        for sink in sinks.values():
            sink.close()


class FileSink:
    """A file of known size and digest that is written from its beginning to its end. Every method but `close` blocks."""

    def __init__(self, path: Path, expected: FileDigest) -> None:
        self._expected = expected
        self._hash = hashlib.sha256()
        # The file exists at full size: reserving room made it. Unbuffered, since the chunks are large already.
        self._file: BinaryIO = path.open("r+b", buffering=0)

    def write(self, data: bytes) -> None:
        """Appends and hashes `data`. Raises OSError."""
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._hash.update(data)

    def finish(self) -> bool:
        """Whether the digest is right; then the file is synced to the disk. Raises OSError."""
        if self._hash.hexdigest() != self._expected.sha256:
            return False
        os.fsync(self._file.fileno())
        return True

    def close(self) -> None:
        self._file.close()


async def _read_range(store: Store, digest: str, part: ByteRange, meter: Meter) -> bytes:
    """The range's bytes; one that comes too short is read once more. Raises AdapterCorrupt."""
    for _ in range(READS_OF_A_RANGE):
        data = await _get_range(store, digest, part)
        if len(data) == part.length:
            return data
        meter.count(metrics.CACHE_BAD_READS, reason="short_file")
    raise AdapterCorrupt(
        f"the stored `{part.file.name}` has not the size that its manifest says",
        reason="short_file",
        limit=part.file.size_bytes,
        value=part.start + len(data),
    )


async def _get_range(store: Store, digest: str, part: ByteRange) -> bytes:
    name = part.file.name
    try:
        return await store.get_range(f"blobs/{digest}/{name}", part.start, part.length)
    except StoreMissing as error:
        raise AdapterCorrupt(f"the manifest names `{name}`, but the store has no such file", reason="blob_missing") from error


async def _read_in_order(
    parts: Iterator[ByteRange],
    read: ReadRange,
    write: Callable[[ByteRange, bytes], Awaitable[None]],
    concurrency: int,
) -> None:
    """Reads at most `concurrency` parts at once and writes them in the order of `parts`.

    A part stays in the window until it is written, so no more than `concurrency` parts are in memory at any time.
    """

    def begin(part: ByteRange) -> tuple[ByteRange, asyncio.Future[bytes]]:
        return part, asyncio.ensure_future(read(part))

    window = deque(begin(part) for part in islice(parts, concurrency))
    try:
        while window:
            part, reading = window[0]
            await write(part, await reading)
            window.popleft()
            del reading  # it holds the bytes, and the next read may begin before the loop comes round
            window.extend(begin(part) for part in islice(parts, 1))
    finally:
        await _cancel_all([reading for _, reading in window])


async def _cancel_all(tasks: list[asyncio.Future[bytes]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
