"""How a version's two files come into the store: under their digest, hashed on the way, never half visible."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from adapters.errors import AdapterCorrupt
from adapters.registry import layout
from adapters.store import Store
from adapters.types import CONFIG_FILE, WEIGHTS_FILE, FileDigest, PreparedAdapter, content_digest

CHUNK_BYTES = 2**20
NOTICE = "collecting-"
GRACE_S = 24 * 3600.0  # how old files without a version must be before they are deleted
NOTICE_LIFE_S = 180.0  # whoever deletes files is done with them this long after the notice

Progress = Callable[[int, int], None]


@runtime_checkable
class StreamsUp(Protocol):
    """A store that takes an object in chunks; others get it in one piece."""

    async def put_stream(self, key: str, chunks: AsyncIterator[bytes]) -> str:
        """Writes the chunks as one object. An error of `chunks` passes through and leaves nothing visible."""
        ...


class Upload:
    """One upload of an adapter's files. `progress(done, total)` counts bytes, those already there included."""

    def __init__(self, store: Store, prepared: PreparedAdapter, progress: Progress | None = None) -> None:
        self._store = store
        self._prepared = prepared
        self._progress = progress or (lambda done, total: None)
        self._total = sum(file.size_bytes for file in prepared.files)
        self._done = 0

    async def run(self) -> None:
        """Uploads what is not there in the right size. Raises AdapterCorrupt if the bytes are not what `files` says."""
        check_files(self._prepared)
        there = {row.key: row.size_bytes async for row in self._store.list(layout.blob_folder(self._prepared.digest))}
        for file in self._prepared.files:
            key = layout.blob_key(self._prepared.digest, file.name)
            if there.get(key) == file.size_bytes:
                self._count(file.size_bytes)
            else:
                await self._put(key, file)

    async def _put(self, key: str, file: FileDigest) -> None:
        chunks = self._checked(file)
        if isinstance(self._store, StreamsUp) and file.size_bytes > CHUNK_BYTES:
            await self._store.put_stream(key, chunks)
        else:
            await self._store.put(key, b"".join([chunk async for chunk in chunks]))

    async def _checked(self, file: FileDigest) -> AsyncIterator[bytes]:
        """The file's bytes. A difference is found before the last chunk is handed out, so that no wrong object is finished."""
        digest, size, held = hashlib.sha256(), 0, b""
        async for chunk in _chunks(self._source(file)):
            digest.update(chunk)
            size += len(chunk)
            if held:
                yield held
            held = chunk
            self._count(len(chunk))
        if size != file.size_bytes or digest.hexdigest() != file.sha256:
            raise AdapterCorrupt(f"{file.name} changed while it was published", reason="digest_differs")
        yield held

    def _source(self, file: FileDigest) -> bytes | Path:
        return self._prepared.config if file.name == CONFIG_FILE else self._prepared.weights

    def _count(self, size: int) -> None:
        self._done += size
        self._progress(self._done, self._total)


def notice_key(digest: str, collector: str) -> str:
    """The notice that `collector` is about to delete the files of `digest`."""
    return f"{layout.blob_folder(digest)}{NOTICE}{collector}.json"


def is_notice(key: str) -> bool:
    return key.rpartition("/")[2].startswith(NOTICE)


def check_files(prepared: PreparedAdapter) -> None:
    """Raises AdapterCorrupt unless there are exactly the two files and the digest is theirs."""
    names = sorted(file.name for file in prepared.files)
    if names != [CONFIG_FILE, WEIGHTS_FILE] or prepared.digest != content_digest(prepared.files):
        raise AdapterCorrupt("the adapter's digest is not that of its two files", reason="digest_differs")


async def _chunks(source: bytes | Path) -> AsyncIterator[bytes]:
    if isinstance(source, bytes):
        for start in range(0, len(source), CHUNK_BYTES):
            yield source[start : start + CHUNK_BYTES]
        return
    try:
        with await asyncio.to_thread(open, source, "rb") as file:
            while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise AdapterCorrupt("the weights can't be read any more", reason="unreadable") from error
