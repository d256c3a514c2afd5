"""The download of an adapter's files into a folder: ranges in parallel, hashed in order while they are written."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from adapters.errors import AdapterCorrupt, StoreMissing
from adapters.settings import CacheSettings
from adapters.store import Store
from adapters.types import FileDigest, ResolvedAdapter


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`length` bytes of a file from `start` on."""

    file: FileDigest
    start: int
    length: int


class InThread(Protocol):
    """Runs a blocking call off the event loop. If the caller is cancelled, it returns only once the call has ended."""

    def __call__(self, call: Callable[..., Any], *args: Any) -> Awaitable[Any]: ...


def plan_ranges(files: tuple[FileDigest, ...], range_bytes: int) -> Iterator[ByteRange]:
    """The files cut into ranges of at most `range_bytes`: file by file, each from its beginning."""
    for file in files:
        for start in range(0, file.size_bytes, range_bytes):
            yield ByteRange(file, start, min(range_bytes, file.size_bytes - start))


async def fetch_files(store: Store, adapter: ResolvedAdapter, folder: Path, settings: CacheSettings, in_thread: InThread) -> None:
    """Leaves the adapter's files in `folder`, complete, verified and on the disk for good.

    One window of `fetch_concurrency` ranges runs over all files, so that the small one costs no round trip of its own.
    Raises AdapterCorrupt, the store's errors other than StoreMissing, and OSError; what lies in `folder` is void then.
    """
    sinks = {file.name: FileSink(folder / file.name, file) for file in adapter.files}
    try:

        async def read(part: ByteRange) -> bytes:
            return await _read_range(store, adapter.digest, part)

        async def write(part: ByteRange, data: bytes) -> None:
            await in_thread(sinks[part.file.name].write, data)

        await _read_in_order(plan_ranges(adapter.files, settings.range_bytes), read, write, settings.fetch_concurrency)
        for sink in sinks.values():
            await in_thread(sink.finish)
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

    def finish(self) -> None:
        """Proves what was written and syncs it to the disk. Raises AdapterCorrupt or OSError."""
        if self._hash.hexdigest() != self._expected.sha256:
            raise AdapterCorrupt(f"the stored `{self._expected.name}` is not what its manifest says", reason="digest_mismatch")
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


async def _read_range(store: Store, digest: str, part: ByteRange) -> bytes:
    name = part.file.name
    try:
        data = await store.get_range(f"blobs/{digest}/{name}", part.start, part.length)
    except StoreMissing as error:
        raise AdapterCorrupt(f"the manifest names `{name}`, but the store has no such file", reason="blob_missing") from error
    if len(data) != part.length:
        raise AdapterCorrupt(
            f"the stored `{name}` has not the size that its manifest says",
            reason="short_file",
            limit=part.file.size_bytes,
            value=part.start + len(data),
        )
    return data


async def _read_in_order(
    parts: Iterator[ByteRange],
    read: Callable[[ByteRange], Awaitable[bytes]],
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
