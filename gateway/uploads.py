"""Uploads under way: a folder each, locked while it is in use, gone afterwards; what a crash left is removed at the start."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from adapters.errors import DiskFull, Overloaded
from gateway.settings import GatewaySettings

logger = logging.getLogger("loramux.gateway")

_LOCK = ".lock"
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES}


class Uploads:
    """The places for uploads of this process. Processes of one node may share the folder."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.folder = settings.upload_dir or Path(tempfile.gettempdir(), f"loramux-uploads-{os.getuid()}")
        self._most = settings.max_uploads
        self.under_way = 0

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[Path]:
        """An empty folder for one upload. Raises Overloaded if there is no place, DiskFull if the disk takes no more."""
        if self.under_way >= self._most:
            text = f"{self.under_way} uploads are under way; at most {self._most} are taken at once"
            raise Overloaded(text, reason="too_many_uploads", limit=self._most, value=self.under_way, retry_after_s=5)
        self.under_way += 1
        try:
            with disk_trouble(), self._locked() as folder:
                yield folder
        finally:
            self.under_way -= 1

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Path]:
        """The lock is there before the folder, so that no sweep takes a folder which is in use for a leftover."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = uuid.uuid4().hex
        lock = self.folder / f"{name}{_LOCK}"
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            folder = self.folder / name
            try:
                folder.mkdir(mode=0o700)
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                lock.unlink(missing_ok=True)

    def sweep(self) -> int:
        """Removes what uploads of dead processes left; returns how many."""
        if not self.folder.is_dir():
            return 0
        names = {path.name.removesuffix(_LOCK) for path in self.folder.iterdir() if len(path.name.removesuffix(_LOCK)) == 32}
        removed = sum(self._sweep(name) for name in names)
        if removed:
            logger.info("%d uploads of an earlier run were removed", removed)
        return removed

    def _sweep(self, name: str) -> bool:
        lock, folder = self.folder / f"{name}{_LOCK}", self.folder / name
        try:
            held = lock.open("r+") if lock.exists() else None
        except OSError:
            return False
        with held or contextlib.nullcontext():
            if held is not None:
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    return False
                if not folder.exists():  # perhaps one that begins just now; an empty lock file harms nobody
                    return False
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)
        return True


@contextlib.contextmanager
def disk_trouble() -> Iterator[None]:
    """The disk's errors as ours."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        logger.warning("an upload met the disk's error: %s", os.strerror(error.errno))
        raise DiskFull("the gateway's disk takes no more of this upload", reason="upload_dir_full", retry_after_s=30) from error


class SpooledFile:
    """A file that grows as it arrives; written in pieces of about a megabyte, off the loop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size_bytes = 0
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        path.touch()

    async def add(self, data: bytes) -> None:
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        self.size_bytes += len(data)
        if self._waiting_bytes >= 2**20:
            await self.flush()

    async def flush(self) -> None:
        """Everything that was added lies in the file."""
        pieces, self._waiting, self._waiting_bytes = self._waiting, [], 0
        await asyncio.to_thread(_append, self.path, pieces)


def _append(path: Path, pieces: list[bytes]) -> None:
    with path.open("ab") as file:
        file.writelines(pieces)
