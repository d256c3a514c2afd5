"""The node cache on the disk: what lies where, who may have room, what goes. Everything here blocks; `adapters.cache` waits.

    <dir>/<digest>/                two files, verified; a folder under this name is always whole. Read-only files are sealed:
                                   synced to the disk. Others are trusted only in the boot that wrote them. A file with another
                                   modification time than verified ones get was written to, and is hashed before it is used
    <dir>/.boot/<boot id>          empty; in this boot nothing older that is unsealed lies under its digest
    <dir>/.tmp/<digest>/           a fetch in progress, its files at full size from the start: this is its reservation
    <dir>/.tmp/<digest>.evicted/   on its way out
    <dir>/.locks/<digest>          shared: a lease; exclusive: an eviction. Its modification time: when last used. Its access
                                   time, which nothing else sets since nobody reads it: the uses, as seconds after 1970
    <dir>/.locks/<digest>.fetch    exclusive: a fetch, by whichever process of the node
    <dir>/.locks/<digest>.sync     exclusive: its files are being synced and sealed, or deleted
    <dir>/.locks/budget            exclusive: while room is counted, made and claimed

All processes of a node see the same budget because the disk itself holds the books. Reservations die with their process:
its fetch lock falls, and whoever counts next removes the folder.

Syncing takes as long as writing, so nobody waits for it: files are used once they are verified, and sealed in the background.
After a power loss the unsealed may hold anything. The first process of a new boot moves them to where unfinished fetches lie;
`sweep` hashes what it finds there and takes back what is right.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from adapters.cache import sealing, touched
from adapters.cache.locks import FileLock
from adapters.cache.policy import CacheEntry, choose_victims, used_again
from adapters.cache.sealing import boot_id, names, read_digests
from adapters.errors import DiskFull, InternalError, LoraMuxError
from adapters.types import ResolvedAdapter, content_digest

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5.0
MOST_USES = 1e6
DIGEST_MISMATCH = "digest_mismatch"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_EVICTED = ".evicted"
_FETCH = ".fetch"
_SYNC = ".sync"
_BUDGET = "budget"


class CacheFolder:
    """The folder of one node, shared with the node's other processes. Methods may be called from several threads."""

    def __init__(self, root: Path, budget_bytes: int) -> None:
        self.root = root.absolute()
        self.budget_bytes = budget_bytes
        self.evictions = 0
        self._tmp = self.root / ".tmp"
        self._locks = self.root / ".locks"
        self._boots = self.root / ".boot"
        self._boot = boot_id()
        self._sizes: dict[str, int] = {}  # of finished folders, which never change size; replaced whole, never edited

    # What is there

    def path(self, digest: str) -> Path:
        return self.root / digest

    def lease_lock(self, digest: str) -> Path:
        return self._locks / digest

    def fetch_lock(self, digest: str) -> Path:
        return self._locks / f"{digest}{_FETCH}"

    def has(self, digest: str) -> bool:
        return _DIGEST.fullmatch(digest) is not None and self.path(digest).is_dir()

    def is_whole(self, adapter: ResolvedAdapter) -> bool:
        """Whether all files are there at full size, and nobody wrote to them since they were verified. One stat each."""
        return self._is_sized(adapter, touched.is_untouched)

    def is_whole_after_all(self, adapter: ResolvedAdapter) -> bool:
        """As `is_whole`, or else what was written to holds what it should: hashed, it counts as verified again."""
        if self.is_whole(adapter):
            return True
        if not self._is_sized(adapter) or not self.holds(adapter):
            return False
        with suppress(FileNotFoundError, NotADirectoryError):
            touched.mark(self._files(adapter))
        return True

    def _is_sized(self, adapter: ResolvedAdapter, and_is: Callable[[os.stat_result], bool] = lambda _: True) -> bool:
        try:
            found = [path.stat() for path in self._files(adapter)]
        except (FileNotFoundError, NotADirectoryError):
            return False
        return all(stat.st_size == file.size_bytes and and_is(stat) for stat, file in zip(found, adapter.files, strict=True))

    def _files(self, adapter: ResolvedAdapter) -> list[Path]:
        return [self.path(adapter.digest) / file.name for file in adapter.files]

    def holds(self, adapter: ResolvedAdapter) -> bool:
        """Whether all files are there and hash to what the manifest says. Reads every byte."""
        return read_digests(self.path(adapter.digest)) == tuple(sorted(adapter.files, key=lambda file: file.name))

    def entries(self) -> list[CacheEntry]:
        """The finished adapters, in no particular order."""
        return [CacheEntry(digest, size, *self._usage(digest)) for digest, size in self._finished().items()]

    def used_bytes(self) -> int:
        """Bytes of finished adapters and of what fetches have reserved."""
        # Fetches first: one that finishes in between is then seen twice, which the union forgives, rather than never.
        reserved = {name: _size_of(self._tmp / name) for name in names(self._tmp)}
        return sum({**reserved, **self._finished()}.values())

    def _finished(self) -> dict[str, int]:
        known = self._sizes
        self._sizes = {digest: known.get(digest) or _size_of(self.path(digest)) for digest in self._digests(self.root)}
        return self._sizes

    def _digests(self, folder: Path) -> list[str]:
        return [name for name in names(folder) if _DIGEST.fullmatch(name)]

    def _usage(self, digest: str) -> tuple[float, float]:
        """When it was last used, and how often."""
        with suppress(FileNotFoundError):
            found = self.lease_lock(digest).stat()
            return found.st_mtime, _as_uses(found.st_atime)
        with suppress(FileNotFoundError):
            return self.path(digest).stat().st_mtime, 1.0
        return 0.0, 1.0

    def note_begin(self, lease: FileLock) -> None:
        """Counts one more use."""
        now = time.time()
        accessed, modified = lease.times()
        # Another process may count at the same moment; one of the two uses is lost then, and no order hangs on it.
        lease.set_times(min(MOST_USES, used_again(_as_uses(accessed), modified, now)), now)

    def note_end(self, lease: FileLock) -> None:
        """Moves the time of the last use on."""
        now = time.time()
        accessed, modified = lease.times()
        lease.set_times(used_again(_as_uses(accessed), modified, now) - 1, now)

    # A fetch: the caller holds the fetch lock from before `reserve` until after `publish` or `discard`

    def reserve(self, adapter: ResolvedAdapter) -> Path:
        """A folder with the adapter's files at full size, still to be filled. Raises DiskFull or OSError; then `discard`."""
        with self._budget():
            self._begin_boot()
            self._drop_dead()
            self.discard(adapter.digest)
            self._drop_damaged(adapter.digest)
            self._make_room(adapter.size_bytes)
            return self._claim(adapter)

    def publish(self, digest: str) -> None:
        """Makes the verified files visible; `seal` is due then."""
        touched.mark((self._tmp / digest).iterdir())
        os.rename(self._tmp / digest, self.path(digest))

    def discard(self, digest: str) -> None:
        """Removes what a fetch has written so far, and with it the reservation."""
        _delete(self._tmp / digest)

    def _claim(self, adapter: ResolvedAdapter) -> Path:
        folder = self._tmp / adapter.digest
        folder.mkdir()
        for file in adapter.files:
            with (folder / file.name).open("xb") as opened:
                if file.size_bytes:
                    os.posix_fallocate(opened.fileno(), 0, file.size_bytes)
        return folder

    # After a fetch

    def seal(self, digest: str, *, was_hashed: bool = False) -> str | None:
        """Syncs the adapter to the disk and marks it as synced; nothing to do if it went away meanwhile.

        Hashes its files first unless they `was_hashed` whole: a fetch by parts did not. Returns why the adapter must go, or
        None: `digest_mismatch`, or the error's name of a disk that fails, for what a later reading gives is unknown then.
        """
        if sealing.is_sealed(self.path(digest)):
            return None
        # What is deleted while it is open still takes room, so whoever deletes it waits for this lock.
        lock = FileLock.take_blocking(self._sync_lock(digest))
        try:
            return self._seal(digest, was_hashed)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, "EIO")
        finally:
            lock.release_and_delete()

    def _seal(self, digest: str, was_hashed: bool) -> str | None:
        if not was_hashed and content_digest(read_digests(self.path(digest))) != digest and self.has(digest):
            return DIGEST_MISMATCH
        sealing.seal(self.path(digest))
        return None

    def _sync_lock(self, digest: str) -> Path:
        return self._locks / f"{digest}{_SYNC}"

    # Room

    def _make_room(self, size_bytes: int) -> None:
        """Evicts until `size_bytes` more fit, or raises DiskFull and evicts nothing. The budget lock is held."""
        over_budget = self.used_bytes() + size_bytes - self.budget_bytes
        # The disk may be smaller than the budget, or shared: without this, a full one would refuse every fetch for good.
        over_disk = size_bytes - _free_bytes(self.root)
        need = max(over_budget, over_disk)
        if need > 0 and not self._evict(need):
            raise self._full(size_bytes, disk=over_disk > over_budget)

    def _evict(self, need_bytes: int) -> bool:
        locks: dict[str, FileLock] = {}
        try:
            victims = self._lock_victims(need_bytes, locks)
            for digest in victims:
                self._hide(digest)
                locks.pop(digest).release_and_delete()
        finally:
            for lock in locks.values():
                lock.release()
        # Outside the locks: deleting takes long enough to be felt by a lease of the same adapter.
        for digest in victims:
            self._delete_hidden(digest)
        self.evictions += len(victims)
        return bool(victims)

    def _lock_victims(self, need_bytes: int, locks: dict[str, FileLock]) -> list[str]:
        """Chooses, and locks what it chose, until none of the chosen is leased. Empty if the unleased don't suffice."""
        candidates = self.entries()
        while victims := choose_victims(candidates, need_bytes):
            leased = {digest for digest in victims if not self._try_lock(digest, locks)}
            if not leased:
                return victims
            candidates = [entry for entry in candidates if entry.digest not in leased]
        return []

    def _try_lock(self, digest: str, locks: dict[str, FileLock]) -> bool:
        if digest not in locks and (lock := FileLock.try_take(self.lease_lock(digest))) is not None:
            locks[digest] = lock
        return digest in locks

    def remove(self, digest: str) -> bool:
        """Removes a finished adapter; False if it is leased, True if it is gone now, whoever removed it."""
        if not self.has(digest):
            return True
        with self._budget():
            lock = FileLock.try_take(self.lease_lock(digest))
            if lock is None:
                return False
            try:
                self._hide(digest)
            finally:
                lock.release_and_delete()
            self._delete_hidden(digest)
        return True

    def _hidden(self, digest: str) -> Path:
        return self._tmp / f"{digest}{_EVICTED}"

    def _hide(self, digest: str) -> None:
        # One rename, so that nobody ever sees half an adapter.
        with suppress(FileNotFoundError):
            os.rename(self.path(digest), self._hidden(digest))

    def _delete_hidden(self, digest: str) -> None:
        lock = FileLock.take_blocking(self._sync_lock(digest))
        try:
            _delete(self._hidden(digest))
        finally:
            lock.release_and_delete()

    # Order

    def sweep(self) -> int:
        """Takes back what is whole of what dead processes and a power loss left, clears the rest away, then evicts down to
        the budget. Returns the half-written folders removed. What nobody sealed is sealed."""
        self.begin()
        self._take_back()
        with self._budget():
            dropped = self._drop_dead()
            self._drop_idle_locks()
            with suppress(DiskFull):
                self._make_room(0)
        for digest in self._digests(self.root):
            if (why := self.seal(digest)) is not None:
                log.error("adapter %s goes from the disk: %s", digest[:12], why)
                self.remove(digest)
        return dropped

    def _take_back(self) -> None:
        for digest in self._digests(self._tmp):
            lock = FileLock.try_take(self.fetch_lock(digest))
            if lock is None:
                continue
            try:
                if not self.has(digest) and content_digest(read_digests(self._tmp / digest)) == digest:
                    self.publish(digest)
            finally:
                lock.release_and_delete()

    def _drop_dead(self) -> int:
        """Removes fetches whose process is gone and unfinished evictions. The budget lock is held."""
        dropped = 0
        for folder in [self._tmp / name for name in names(self._tmp)]:
            if folder.name.endswith(_EVICTED):
                _delete(folder)  # evictions happen under the budget lock, so whoever began this one is dead
            elif (lock := FileLock.try_take(self.fetch_lock(folder.name))) is not None:
                _delete(folder)
                lock.release_and_delete()
                dropped += 1
        return dropped

    def _drop_damaged(self, digest: str) -> None:
        """Whoever fetches has found the finished folder missing or damaged; a damaged one would stand in the way."""
        if self.has(digest):
            self._hide(digest)
            self._delete_hidden(digest)

    def _drop_idle_locks(self) -> None:
        for path in list(self._locks.iterdir()):
            if path.name == _BUDGET or self.has(path.name):
                continue
            if (lock := FileLock.try_take(path)) is not None:
                lock.release_and_delete()

    @contextmanager
    def _budget(self) -> Iterator[None]:
        lock = FileLock.take_blocking(self._locks / _BUDGET)
        try:
            yield
        finally:
            lock.release()

    # Boots

    def begin(self) -> None:
        """For who is going to use what is there: takes what an earlier boot left unsealed out of sight. Looking alone, as
        commands do, needs no begin and changes nothing."""
        if not self._is_begun():
            with self._budget():
                self._begin_boot()

    def _is_begun(self) -> bool:
        return self._tmp.is_dir() and (self._boots / self._boot).exists()

    def _begin_boot(self) -> None:
        """Also makes the folders where somebody removed them. The budget lock is held, so nothing of this boot is there yet,
        unless it is leased."""
        if self._is_begun():
            return
        for folder in (self._tmp, self._boots):
            folder.mkdir(parents=True, exist_ok=True)
        for digest in self._digests(self.root):
            if not sealing.is_sealed(self.path(digest)) and (lock := FileLock.try_take(self.lease_lock(digest))) is not None:
                self.discard(digest)
                os.rename(self.path(digest), self._tmp / digest)
                lock.release()
        for earlier in names(self._boots):
            (self._boots / earlier).unlink(missing_ok=True)
        (self._boots / self._boot).touch()

    # Errors

    def explain(self, error: OSError, adapter: ResolvedAdapter) -> LoraMuxError:
        """What a failed write means to a client: never a path."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return self._full(adapter.size_bytes, disk=True)
        reason = errno.errorcode.get(error.errno or 0, "io_error").lower()
        return InternalError("the node cache can't be written", reason=reason)

    def _full(self, size_bytes: int, *, disk: bool) -> DiskFull:
        if disk:
            why = f"the disk under the node cache is full; {size_bytes} bytes were asked for"
        elif size_bytes > self.budget_bytes:
            why = f"an adapter of {size_bytes} bytes is larger than the whole cache, {self.budget_bytes} bytes"
        else:
            why = f"the node cache has no room for {size_bytes} bytes: all of its {self.budget_bytes} are in use"
        # What is larger than the cache stays so; everything else may fit once a lease has ended.
        retry_after_s = RETRY_AFTER_S if size_bytes <= self.budget_bytes else None
        return DiskFull(why, limit=self.budget_bytes, value=size_bytes, retry_after_s=retry_after_s)


def _as_uses(accessed: float) -> float:
    """A lock file that was just made has the time of that as its access time, and no uses."""
    return accessed if accessed <= MOST_USES else 0.0


def _size_of(folder: Path) -> int:
    """Bytes of the files in `folder`; 0 if it went away meanwhile."""
    total = 0
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as files:
        for file in files:
            total += file.stat().st_size
    return total


def _free_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _delete(folder: Path) -> None:
    with suppress(FileNotFoundError, NotADirectoryError):
        shutil.rmtree(folder)
