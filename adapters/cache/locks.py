"""File locks of the node cache: shared or exclusive, between processes and also between two takers in one process."""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path
from typing import Self

FIRST_POLL_S = 0.002
LONGEST_POLL_S = 0.01


class FileLock:
    """A held flock. The kernel drops it when the process dies, so a killed replica never leaves one behind.

    An exclusive holder may delete the lock file: every taker checks, once it has the lock, that the file it locked is
    still the one under that path, and tries again otherwise.
    """

    __slots__ = ("_fd", "_path")

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    def try_take(cls, path: Path, *, shared: bool = False) -> Self | None:
        """The lock, or None if somebody holds it in a way that excludes ours. Does not wait."""
        return cls._take(path, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)

    @classmethod
    def take_blocking(cls, path: Path) -> Self:
        """The exclusive lock, whenever it comes free. Blocks the thread, so never call it on an event loop."""
        lock = cls._take(path, fcntl.LOCK_EX)
        assert lock is not None, "a blocking flock returns only with the lock"
        return lock

    @classmethod
    async def take(cls, path: Path, *, shared: bool = False) -> Self:
        """The lock, whenever it comes free. Polls: a thread that waits in flock could not be cancelled."""
        pause = FIRST_POLL_S
        while (lock := cls.try_take(path, shared=shared)) is None:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_S)
        return lock

    @classmethod
    def _take(cls, path: Path, operation: int) -> Self | None:
        while True:
            fd = _open(path)
            try:
                fcntl.flock(fd, operation)
                lock = cls(path, fd)
                if lock.is_current():
                    return lock
            except BlockingIOError:
                os.close(fd)
                return None
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def is_current(self) -> bool:
        """Whether the lock's file is still the one under its path. If not, others can't see that it is held."""
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False
        mine = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def times(self) -> tuple[float, float]:
        """When the lock's file was accessed and modified, in Unix seconds."""
        found = os.fstat(self._fd)
        return found.st_atime, found.st_mtime

    def set_times(self, accessed: float, modified: float) -> None:
        os.utime(self._fd, (accessed, modified))

    def release(self) -> None:
        """Gives the lock back; the file stays. A second call does nothing."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        # Unlocking before closing matters: a forked child may hold a copy of the descriptor, and with it the lock.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def release_and_delete(self) -> None:
        """Gives an exclusive lock back and removes its file."""
        # A file that somebody else removed may have a successor by now, and that may be held.
        if self._fd >= 0 and self.is_current():
            self._path.unlink(missing_ok=True)
        self.release()


def _open(path: Path) -> int:
    """The lock file's descriptor; its folder is made if somebody removed it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)
