"""A local folder as a store: atomic renames for visibility, file locks for conditions, across threads and processes.

obstore's own local store has no conditional update. Objects are plain files under their keys; `.tmp` and `.locks` are ours,
so what a crash leaves half-written is never listed.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar
from urllib.parse import unquote, urlsplit

from adapters.errors import (
    InvalidRequest,
    StoreConflict,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreMisconfigured,
    StoreMissing,
    StoreUnreachable,
)
from adapters.metrics import NULL_METER, Meter
from adapters.registry.layout import check_key
from adapters.store import Listed, Object
from adapters.store.retrying import Caller

TEMPORARY = ".tmp"
LOCKS = ".locks"
NUM_LOCKS = 256
HASHED_BYTES = 2**20
LEFTOVER_AGE_S = 24 * 3600.0
FULL_RETRY_AFTER_S = 30.0

T = TypeVar("T")


class LocalStore:
    """A `Store` in a folder; also streams files in (`put_stream`)."""

    def __init__(self, root: Path, caller: Caller) -> None:
        self._root = root
        self._caller = caller
        self._temporary = root / TEMPORARY
        self._locks = root / LOCKS

    @classmethod
    def from_url(cls, url: str, meter: Meter = NULL_METER) -> LocalStore:
        """The store of `file:///dir`. The first write makes what is missing; a folder that is only read stays as it is.

        Raises StoreMisconfigured.
        """
        address = urlsplit(url)
        if address.scheme != "file" or address.netloc not in ("", "localhost") or not address.path.startswith("/"):
            raise StoreMisconfigured("a local store's address is `file:///dir`, with an absolute path")
        store = cls(Path(unquote(address.path)), Caller(meter))
        store._remove_leftovers()
        return store

    async def get(self, key: str) -> Object:
        return await self._call("get", self._get, key)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        return await self._call("get_range", self._get_range, key, start, length)

    async def stat(self, key: str) -> Listed:
        return await self._call("stat", self._stat, key)

    async def create(self, key: str, data: bytes) -> str:
        return await self._call("create", self._create, key, data)

    async def replace(self, key: str, data: bytes, etag: str) -> str:
        return await self._call("replace", self._replace, key, data, etag)

    async def put(self, key: str, data: bytes) -> str:
        return await self._call("put", self._put, key, data)

    async def put_stream(self, key: str, chunks: AsyncIterator[bytes]) -> str:
        """Writes the chunks as one object; an error of `chunks` passes through and nothing is visible."""
        path = self._path(key)
        return await self._caller.run("put_stream", lambda: self._put_stream(path, chunks))

    async def delete(self, key: str) -> None:
        await self._call("delete", self._delete, key)

    async def list(self, prefix: str) -> AsyncIterator[Listed]:
        for row in await self._call("list", self._list, prefix):
            yield row

    async def _put_stream(self, path: Path, chunks: AsyncIterator[bytes]) -> str:
        draft = await self._work(self._draft)
        try:
            async for chunk in chunks:
                await self._work(draft.write, chunk)
            return await self._work(self._publish_locked, draft, path)
        finally:
            _discard(draft)

    async def _call(self, method: str, function: Callable[..., T], *args: object) -> T:
        return await self._caller.run(method, lambda: self._work(function, *args))

    async def _work(self, function: Callable[..., T], *args: object) -> T:
        with _our_errors():
            return await asyncio.to_thread(function, *args)

    def _path(self, key: str) -> Path:
        if check_key(key).split("/", 1)[0] in (TEMPORARY, LOCKS):
            raise InvalidRequest(f"keys under `{TEMPORARY}` and `{LOCKS}` are the store's own")
        return self._root / key

    def _get(self, key: str) -> Object:
        with open(self._path(key), "rb") as file:
            data = file.read()
            return Object(data, _etag(os.fstat(file.fileno()), lambda: data))

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        with open(self._path(key), "rb") as file:
            file.seek(start)
            return file.read(max(0, length))

    def _stat(self, key: str) -> Listed:
        with open(self._path(key), "rb") as file:
            return _row(key, file)

    def _create(self, key: str, data: bytes) -> str:
        path = self._path(key)
        with self._locked(path):
            if path.exists():
                raise StoreConflict("a conditional write lost: the object exists")
            return self._write(path, data)

    def _replace(self, key: str, data: bytes, etag: str) -> str:
        path = self._path(key)
        with self._locked(path):
            try:
                current = self._get(key).etag
            except FileNotFoundError:
                current = None
            if current != etag:
                raise StoreConflict("a conditional write lost: the object has changed or is gone")
            return self._write(path, data)

    def _put(self, key: str, data: bytes) -> str:
        path = self._path(key)
        with self._locked(path):
            return self._write(path, data)

    def _delete(self, key: str) -> None:
        path = self._path(key)
        with self._locked(path):
            path.unlink(missing_ok=True)

    def _list(self, prefix: str) -> list[Listed]:
        # only the folder that the prefix names is walked; the rest of the prefix narrows its rows
        folder = prefix.rpartition("/")[0]
        if folder:
            check_key(folder)
        keys = (key for key in self._keys(self._root / folder) if key.startswith(prefix))
        rows = (self._row_if_there(key) for key in sorted(keys))
        return [row for row in rows if row is not None]

    def _keys(self, folder: Path) -> Iterator[str]:
        for parent, folders, files in os.walk(folder):
            if Path(parent) == self._root:
                folders[:] = [name for name in folders if name not in (TEMPORARY, LOCKS)]
            for name in files:
                yield Path(parent, name).relative_to(self._root).as_posix()

    def _row_if_there(self, key: str) -> Listed | None:
        """The row of a key, or None if it went away while the folder was walked."""
        try:
            with open(self._root / key, "rb") as file:
                return _row(key, file)
        except FileNotFoundError:
            return None

    def _write(self, path: Path, data: bytes) -> str:
        draft = self._draft()
        try:
            draft.write(data)
            return self._publish(draft, path)
        finally:
            _discard(draft)

    def _publish_locked(self, draft: IO[bytes], path: Path) -> str:
        with self._locked(path):
            return self._publish(draft, path)

    def _publish(self, draft: IO[bytes], path: Path) -> str:
        """Makes a whole, durable file visible at `path` in one step; returns its ETag. The caller holds the lock."""
        draft.flush()
        os.fsync(draft.fileno())
        _make_folders(path.parent, self._root)
        # a later write is never given an earlier or equal time, so that the ETag of equal content moves on as well
        now = max(time.time_ns(), _mtime_ns(path) + 1)
        os.utime(draft.name, ns=(now, now))
        os.replace(draft.name, path)
        _sync_folder(path.parent)
        with open(path, "rb") as file:
            return _etag(os.fstat(file.fileno()), file.read)

    def _draft(self) -> IO[bytes]:
        self._temporary.mkdir(parents=True, exist_ok=True)
        return open(self._temporary / uuid.uuid4().hex, "xb")

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        number = hashlib.sha256(os.fsencode(path)).digest()[0] % NUM_LOCKS
        self._locks.mkdir(parents=True, exist_ok=True)
        with open(self._locks / f"{number:02x}", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _remove_leftovers(self) -> None:
        """Drafts of crashed processes, once nobody can be writing them any more."""
        with suppress(OSError):
            for draft in self._temporary.iterdir():
                if time.time() - draft.stat().st_mtime > LEFTOVER_AGE_S:
                    draft.unlink(missing_ok=True)


def _discard(draft: IO[bytes]) -> None:
    """Closes a draft and removes it if it was not published."""
    draft.close()
    Path(draft.name).unlink(missing_ok=True)


def _row(key: str, file: IO[bytes]) -> Listed:
    status = os.fstat(file.fileno())
    return Listed(key, status.st_size, _etag(status, file.read), status.st_mtime)


def _etag(status: os.stat_result, read: Callable[[], bytes]) -> str:
    """Changes with each write: time, inode and size, and for small objects (everything that is compared and swapped) a hash
    of the content, since some shared file systems keep times in whole seconds."""
    content = hashlib.sha256(read()).hexdigest()[:16] if status.st_size <= HASHED_BYTES else "-"
    return f'"{content}-{status.st_mtime_ns:x}-{status.st_ino:x}-{status.st_size:x}"'


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _make_folders(folder: Path, root: Path) -> None:
    """Makes `folder` and syncs each new entry into its parent, so that a power cut keeps the whole path."""
    if folder.is_dir():
        return
    if folder != root:
        _make_folders(folder.parent, root)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise StoreMissing("the object is not in the store") from error
    except IsADirectoryError as error:
        raise StoreMissing("the object is not in the store") from error
    except PermissionError as error:
        raise StoreDenied("the folder's permissions forbid the call") from error
    except OSError as error:
        raise _by_errno(error) from error


def _by_errno(error: OSError) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull("the disk under the store's folder is full", retry_after_s=FULL_RETRY_AFTER_S)
    if error.errno == errno.EROFS:
        return StoreDenied("the store's folder is read-only")
    if error.errno in (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EEXIST):
        return StoreMisconfigured("the folder cannot hold this key")
    return StoreUnreachable(f"the store's folder failed ({errno.errorcode.get(error.errno or 0, 'unknown')})")
