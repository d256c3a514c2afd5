"""The node cache: verified adapter files on this node's disk, fetched once per digest and leased while in use.

`AdapterCache` decides who fetches and who waits; `adapters.cache.folder` keeps the disk, `adapters.cache.fetch` downloads,
`adapters.cache.policy` chooses what goes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

from adapters import metrics
from adapters.cache.fetch import fetch_files
from adapters.cache.folder import DIGEST_MISMATCH, CacheFolder
from adapters.cache.locks import FileLock
from adapters.cache.policy import CacheEntry
from adapters.errors import AdapterCorrupt
from adapters.metrics import NULL_METER, Meter
from adapters.settings import CacheSettings
from adapters.store import Store
from adapters.types import ADAPTER_FILES, LocalAdapter, ResolvedAdapter, content_digest

log = logging.getLogger(__name__)

DROP_AGAIN_S = 1.0

T = TypeVar("T")
_IsThere = Callable[[ResolvedAdapter], bool]


class Lease:
    """The right to use `local` until `release`; nobody evicts it before, in whichever process.

    `fetched` says that this very call led the fetch, `fetch_s` how many seconds it waited for one (0.0 if none was
    needed). As an async context manager it releases at the end.
    """

    __slots__ = ("_give_back", "fetch_s", "fetched", "local")

    def __init__(self, local: LocalAdapter, fetched: bool, fetch_s: float, give_back: Callable[[], None]) -> None:
        self.local = local
        self.fetched = fetched
        self.fetch_s = fetch_s
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """Ends the lease; a second call does nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()


@dataclass(slots=True)
class _Hold:
    """The one shared lock that all leases of a digest in this process stand on."""

    lock: FileLock
    users: int = 0


class AdapterCache:
    """The node's adapters, shared through the folder with the node's other processes. Belongs to one event loop."""

    def __init__(self, store: Store, settings: CacheSettings, meter: Meter = NULL_METER) -> None:
        self._store = store
        self._meter = meter
        self._settings = settings
        self._folder = CacheFolder(settings.dir, settings.budget_bytes)
        self._folder.begin()
        self._holds: dict[str, _Hold] = {}
        self._flights: dict[tuple[str, _IsThere], asyncio.Task[bool]] = {}
        self._sealing: set[asyncio.Future[str | None]] = set()
        self._dropping: set[asyncio.Task[None]] = set()
        # Fetches share the store's and the disk's rate. In turn, the first is in use while the last still comes; all at
        # once, each would take as long as all together, and memory for their ranges would have no limit.
        self._turn = asyncio.Semaphore(settings.fetches_at_once)
        # Our own threads: the default pool is small on small nodes, and a slow disk would hold up everybody else in it.
        workers = max(4, min(16, os.cpu_count() or 1))
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="adapter-cache")
        # One adapter after the other, and never in the way of a fetch: a disk may take seconds to sync one.
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="adapter-seal")

    async def lease(self, adapter: ResolvedAdapter) -> Lease:
        """The adapter's files on this disk, fetched if need be, and the right to use them.

        Raises AdapterCorrupt (its bytes or its digests don't agree), DiskFull, a StoreError, or InternalError for a disk
        that can't be written. A caller that is cancelled stops neither the fetch nor those who wait for it.
        """
        _check_identity(adapter)
        try:
            return await self._lease(adapter)
        except OSError as error:
            raise self._folder.explain(error, adapter) from error

    async def fetch(self, adapter: ResolvedAdapter) -> bool:
        """Brings the adapter to this disk without keeping it there; whether this call led a fetch. Raises as `lease`."""
        async with await self.lease(adapter) as lease:
            return lease.fetched

    async def verify(self, adapter: ResolvedAdapter) -> bool:
        """For files that the engine refused: hashes them, and fetches them once more if they are not what they should be.

        True if they were damaged and are whole again, False if nothing is wrong with them. Raises AdapterCorrupt if the
        store's copy is damaged too, else as `lease`. Leases stay; whoever opens the files in the meantime may find none.
        """
        _check_identity(adapter)
        try:
            await self._hold(adapter.digest)
            try:
                _, damaged = await self._join(adapter, self._folder.holds)
            finally:
                self._let_go(adapter.digest)
        except OSError as error:
            raise self._folder.explain(error, adapter) from error
        return damaged

    def has(self, digest: str) -> bool:
        """Whether the adapter is on this disk (the tier `disk`). One stat; without a lease it may be gone the next moment."""
        return self._folder.has(digest)

    def entries(self) -> list[CacheEntry]:
        """What is on this disk, in no particular order. A snapshot; about two stats an adapter."""
        return self._folder.entries()

    def used_bytes(self) -> int:
        """Bytes that count against the budget: finished adapters and what running fetches have reserved."""
        return self._folder.used_bytes()

    @property
    def evictions(self) -> int:
        """How many adapters this process has evicted to make room."""
        return self._folder.evictions

    async def sweep(self) -> int:
        """For the start: removes what dead processes left half-written and returns how many; finished ones stay.

        What a power loss may have damaged is hashed first. Also evicts down to the budget, should it have shrunk. Harmless
        while other processes fetch.
        """
        return await self._in_thread(self._folder.sweep)

    async def remove(self, digest: str) -> bool:
        """Takes the adapter off this disk. False if a lease forbids it, True if it is gone or was never there."""
        return await self._in_thread(self._folder.remove, digest)

    async def close(self) -> None:
        """Stops running fetches and the threads; waits until what was fetched is synced. Leases stay valid until they are
        released or the process ends."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        await asyncio.gather(*self._sealing, return_exceptions=True)
        for dropping in self._dropping:
            dropping.cancel()
        for threads in (self._threads, self._sealer):
            threads.shutdown(wait=False)

    # Leases

    async def _lease(self, adapter: ResolvedAdapter) -> Lease:
        # The lock comes before the look: what is found or fetched under it can't be evicted before the lease exists.
        await self._hold(adapter.digest)
        try:
            fetched, fetch_s = await self._make_local(adapter)
        except BaseException:
            self._let_go(adapter.digest)
            raise
        local = LocalAdapter(adapter.digest, self._folder.path(adapter.digest), adapter.size_bytes)
        return Lease(local, fetched, fetch_s, lambda: self._let_go(adapter.digest))

    async def _hold(self, digest: str) -> None:
        hold = self._holds.get(digest)
        if hold is None or not hold.lock.is_current():
            # Waits for nobody but an evictor, and for him no longer than a rename takes.
            lock = await FileLock.take(self._folder.lease_lock(digest), shared=True)
            hold = self._take_over(digest, lock)
        hold.users += 1
        self._folder.note_begin(hold.lock)

    def _take_over(self, digest: str, lock: FileLock) -> _Hold:
        """The hold of all who lease `digest`, on one lock that others can see."""
        hold = self._holds.setdefault(digest, _Hold(lock))
        if hold.lock is not lock:
            # Somebody here was faster, or the lock file was removed under the old lock.
            spare, hold.lock = (lock, hold.lock) if hold.lock.is_current() else (hold.lock, lock)
            spare.release()
        return hold

    def _let_go(self, digest: str) -> None:
        hold = self._holds[digest]
        hold.users -= 1
        self._folder.note_end(hold.lock)
        if not hold.users:
            del self._holds[digest]
            hold.lock.release()

    # Fetches

    async def _make_local(self, adapter: ResolvedAdapter) -> tuple[bool, float]:
        """Whether this call led a fetch, and the seconds that it waited. The caller holds the digest."""
        if self._folder.is_whole(adapter):
            return False, 0.0
        began = time.perf_counter()
        leads, downloaded = await self._join(adapter, self._folder.is_whole_after_all)
        return leads and downloaded, time.perf_counter() - began

    async def _join(self, adapter: ResolvedAdapter, is_there: _IsThere) -> tuple[bool, bool]:
        """Waits for the flight of this digest and look: whether it began here, and whether it downloaded anything.

        A flight is detached from whoever asked first, and known to all before anything is awaited.
        """
        key = (adapter.digest, is_there)
        flight = self._flights.get(key)
        leads = flight is None
        if flight is None:
            flight = self._flights[key] = asyncio.create_task(self._fetch(adapter, is_there), name=f"fetch {adapter.digest[:12]}")
            flight.add_done_callback(lambda done: self._land(key, adapter, done))
        return leads, await asyncio.shield(flight)

    def _land(self, key: tuple[str, _IsThere], adapter: ResolvedAdapter, flight: asyncio.Task[bool]) -> None:
        del self._flights[key]
        # Asking for the error also marks it as seen: all who waited may have been cancelled.
        if not flight.cancelled() and (error := flight.exception()) is not None:
            log.warning("fetch of %s failed: %s", adapter.ref, error)

    async def _fetch(self, adapter: ResolvedAdapter, is_there: _IsThere) -> bool:
        """Makes the files local. False if they are: another process of this node fetched them while this one waited."""
        lock = await FileLock.take(self._folder.fetch_lock(adapter.digest))
        try:
            if await self._in_thread(is_there, adapter):
                return False
            async with self._turn:
                await self._download_whole(adapter)
            return True
        finally:
            lock.release_and_delete()

    async def _download_whole(self, adapter: ResolvedAdapter) -> None:
        try:
            await self._download(adapter)
        except FileNotFoundError:
            log.warning("the node cache was removed during the fetch of %s", adapter.ref)
            await self._download(adapter)

    async def _download(self, adapter: ResolvedAdapter) -> None:
        try:
            reserving = self._in_thread(self._folder.reserve, adapter)
            await fetch_files(self._store, adapter, reserving, self._settings, self._in_thread, self._meter)
            await self._in_thread(self._folder.publish, adapter.digest)
        except BaseException:
            await self._in_thread(self._folder.discard, adapter.digest)
            raise
        # Nobody waits for the disk: verified files are in use already.
        seal = partial(self._folder.seal, was_hashed=all(file.tree is None for file in adapter.files))
        sealing = asyncio.get_running_loop().run_in_executor(self._sealer, seal, adapter.digest)
        self._sealing.add(sealing)
        sealing.add_done_callback(lambda sealed: self._sealed(adapter, sealed))

    def _sealed(self, adapter: ResolvedAdapter, sealing: asyncio.Future[str | None]) -> None:
        self._sealing.discard(sealing)
        if sealing.cancelled() or sealing.exception() is not None or (why := sealing.result()) is None:
            return
        log.error("%s goes from the disk: %s", adapter.ref, why)
        if why == DIGEST_MISMATCH:
            self._meter.count(metrics.CACHE_BAD_READS, reason=why)
        dropping = asyncio.create_task(self._drop(adapter.digest), name=f"drop {adapter.digest[:12]}")
        self._dropping.add(dropping)
        dropping.add_done_callback(self._dropping.discard)

    async def _drop(self, digest: str) -> None:
        """Removes the adapter as soon as no lease forbids it."""
        while not await self._in_thread(self._folder.remove, digest):  # noqa: ASYNC110 (no event: others lease it too)
            await asyncio.sleep(DROP_AGAIN_S)

    async def _in_thread(self, call: Callable[..., T], *args: object) -> T:
        """Runs a blocking call in the cache's own threads.

        When cancelled it still waits for the call to end, so that no thread writes into files that are closed already.
        """
        future = asyncio.get_running_loop().run_in_executor(self._threads, call, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise


def _check_identity(adapter: ResolvedAdapter) -> None:
    """Folder and file names come from a manifest: they must be the two we know, and the digest theirs."""
    names = sorted(file.name for file in adapter.files)
    if names != sorted(ADAPTER_FILES):
        raise AdapterCorrupt("the manifest does not name exactly the two files of an adapter", reason="bad_manifest")
    if content_digest(adapter.files) != adapter.digest:
        raise AdapterCorrupt("the digests in the manifest do not agree", reason="bad_manifest")
