"""How a version's two files come into the store: under their digest, hashed on the way, never half visible.

Files that no version names are deleted some day (`adapters.registry.collection`). An upload is done when one look shows them
whole, young and without a notice of deletion: then they stay for half the grace at least, which is time enough to name them.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from adapters.errors import AdapterCorrupt, VersionConflict
from adapters.registry import layout
from adapters.store import Listed, Store
from adapters.types import CONFIG_FILE, WEIGHTS_FILE, FileDigest, PreparedAdapter, content_digest

CHUNK_BYTES = 2**20
NOTICE = "collecting-"
GRACE_S = 24 * 3600.0  # how old files without a version must be before they are deleted
MAX_ROUNDS = 8
NOTICE_LOOK_S = 0.5
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
        self._sent: set[str] = set()

    async def run(self, is_named: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Uploads what is not there in the right size, and what is so old that it may be deleted soon unless `is_named` says that
        a version holds it. Waits for whoever is deleting these files.

        Raises AdapterCorrupt if the bytes are not what `files` says, VersionConflict if the files don't stay there.
        """
        check_files(self._prepared)
        notices = Notices(self._store)
        for _ in range(MAX_ROUNDS):
            rows = await notices.gone(layout.blob_folder(self._prepared.digest))
            wanted = await self._wanted({row.key: row for row in rows}, is_named)
            if not wanted:
                self._count(self._total - self._done)
                return
            for file in wanted:
                await self._put(layout.blob_key(self._prepared.digest, file.name), file)
                self._sent.add(file.name)
        raise VersionConflict("the files of this adapter don't stay in the store; try again", retry_after_s=1)

    async def _wanted(self, there: Mapping[str, Listed], is_named: Callable[[], Awaitable[bool]] | None) -> list[FileDigest]:
        rows = {file: there.get(layout.blob_key(self._prepared.digest, file.name)) for file in self._prepared.files}
        wanted = [file for file, row in rows.items() if row is None or row.size_bytes != file.size_bytes]
        old = [
            file
            for file, row in rows.items()
            if row is not None and file not in wanted and file.name not in self._sent and is_old(row)
        ]
        if old and not (is_named is not None and await is_named()):
            wanted += old
        return wanted

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
        self._done = min(self._done + size, self._total)  # what was sent twice counts once
        self._progress(self._done, self._total)


class Notices:
    """Waits until nobody is deleting. A notice that does not change for `NOTICE_LIFE_S` is one of a process that died."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._since_s: dict[tuple[str, str], float] = {}

    async def gone(self, folder: str) -> list[Listed]:
        """The rows of `folder` by a look that shows no notice. Removes notices of the dead."""
        while True:
            rows = [row async for row in self._store.list(folder)]
            notices = [row for row in rows if is_notice(row.key)]
            if not notices:
                return rows
            for row in notices:
                # by our own clock, since the store's may be another
                if time.monotonic() - self._since_s.setdefault((row.key, row.etag), time.monotonic()) >= NOTICE_LIFE_S:
                    await self._store.delete(row.key)
            await asyncio.sleep(NOTICE_LOOK_S)


def is_old(row: Listed) -> bool:
    """Whether a file that no version names may be deleted soon."""
    return time.time() - row.modified_s > GRACE_S / 2


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
