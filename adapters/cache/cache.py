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
from typing import Self, TypeVar

from adapters.cache.fetch import fetch_files
from adapters.cache.folder import CacheFolder
from adapters.cache.locks import FileLock
from adapters.cache.policy import CacheEntry
from adapters.errors import AdapterCorrupt
from adapters.metrics import NULL_METER, Meter
from adapters.settings import CacheSettings
from adapters.store import Store
from adapters.types import ADAPTER_FILES, LocalAdapter, ResolvedAdapter, content_digest

log = logging.getLogger(__name__)

T = TypeVar("T")


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
        self._holds: dict[str, _Hold] = {}
        self._flights: dict[str, asyncio.Task[bool]] = {}
        # Our own threads: the default pool is small on small nodes, and a slow disk would hold up everybody else in it.
        workers = max(4, min(16, os.cpu_count() or 1))
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="adapter-cache")

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

        Also evicts down to the budget, should it have shrunk. Harmless while other processes fetch.
        """
        return await self._in_thread(self._folder.sweep)

    async def remove(self, digest: str) -> bool:
        """Takes the adapter off this disk. False if a lease forbids it, True if it is gone or was never there."""
        return await self._in_thread(self._folder.remove, digest)

    async def close(self) -> None:
        """Stops running fetches and the threads. Leases stay valid until they are released or the process ends."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        self._threads.shutdown(wait=False)

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
        if hold is None:
            # Waits for nobody but an evictor, and for him no longer than a rename takes.
            lock = await FileLock.take(self._folder.lease_lock(digest), shared=True)
            hold = self._holds.setdefault(digest, _Hold(lock))
            if hold.lock is not lock:
                lock.release()
        hold.users += 1
        hold.lock.touch()

    def _let_go(self, digest: str) -> None:
        hold = self._holds[digest]
        hold.users -= 1
        hold.lock.touch()
        if not hold.users:
            del self._holds[digest]
            hold.lock.release()

    # Fetches

    async def _make_local(self, adapter: ResolvedAdapter) -> tuple[bool, float]:
        """Whether this call led a fetch, and the seconds that it waited. The caller holds the digest."""
        if self._folder.is_whole(adapter):
            return False, 0.0
        began = time.perf_counter()
        flight = self._flights.get(adapter.digest)
        leads = flight is None
        if flight is None:
            flight = self._start(adapter)
        downloaded = await asyncio.shield(flight)
        return leads and downloaded, time.perf_counter() - began

    def _start(self, adapter: ResolvedAdapter) -> asyncio.Task[bool]:
        """A fetch of its own, detached from whoever asked first; known to all before anything is awaited."""
        flight = asyncio.create_task(self._fetch(adapter), name=f"fetch {adapter.digest[:12]}")
        self._flights[adapter.digest] = flight
        flight.add_done_callback(lambda done: self._land(adapter, done))
        return flight

    def _land(self, adapter: ResolvedAdapter, flight: asyncio.Task[bool]) -> None:
        del self._flights[adapter.digest]
        # Asking for the error also marks it as seen: all who waited may have been cancelled.
        if not flight.cancelled() and (error := flight.exception()) is not None:
            log.warning("fetch of %s failed: %s", adapter.ref, error)

    async def _fetch(self, adapter: ResolvedAdapter) -> bool:
        """Makes the files local. False if another process of this node did, while this one waited for its lock."""
        lock = await FileLock.take(self._folder.fetch_lock(adapter.digest))
        try:
            if self._folder.is_whole(adapter):
                return False
            await self._download(adapter)
            return True
        finally:
            lock.release_and_delete()

    async def _download(self, adapter: ResolvedAdapter) -> None:
        try:
            folder = await self._in_thread(self._folder.reserve, adapter)
            await fetch_files(self._store, adapter, folder, self._settings, self._in_thread, self._meter)
            await self._in_thread(self._folder.publish, adapter.digest)
        except BaseException:
            await self._in_thread(self._folder.discard, adapter.digest)
            raise

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
