"""EngineSlots: which adapters sit in the engine, under which integer, and who uses them.

The engine itself is forgetful (README.md of this package lists what it really does), so one owner keeps the table:

- the registered set never exceeds the engine's own capacity, and a place is freed before the next load takes it;
- a slot in use is never evicted, one that is held neither; its files stay leased as long as it is registered;
- an integer id is never used twice, and a failed load is removed from the engine whatever it left behind;
- each load counts what the engine filled: an engine drops what it doesn't know without a word;
- requests for one cold adapter share one fetch and one load, which run apart from the requests that wait for them;
- the idle slot that was used least, recent uses counting more, gives way; loads that nobody waits for let others go first;
- a load that found every place in use is not starved: each time its patience ends, one slot more takes no new users. No slot
  is closed in its first seconds, or adapters that are all busy would do nothing but push each other out.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from adapters.cache import AdapterCache, Lease
from adapters.errors import AdapterIncompatible, AdapterLoading, LoraMuxError, Overloaded
from adapters.metrics import LOAD_SECONDS, LOADS, NULL_METER, RELOADS, SLOT_EVICTIONS, Meter
from adapters.names import AdapterRef
from adapters.popularity import Popularity
from adapters.types import LocalAdapter, ResolvedAdapter
from gateway.backend import Load, Tier
from serve_app.slots.line import Line
from serve_app.slots.load_times import LoadTimes
from serve_app.slots.pending import Pending
from serve_app.slots.places import Places, Slot
from serve_app.slots.thrash import ThrashWatch
from serve_app.slots.untold import Untold

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_INT_ID = 1_000  # the engine's own warm-up takes the small ones


class AdapterEngine(Protocol):
    """The engine's side of a slot.

    `stage` reads the files to where adding is quick, apart from running answers; it takes no place. `add` says how many of the
    base's modules the adapter fills, as Hugging Face names them. `remove` forgets what was staged or added, and forgives an id
    that the engine does not know.
    """

    async def stage(self, ref: AdapterRef, int_id: int, files: LocalAdapter) -> None: ...

    async def add(self, ref: AdapterRef, int_id: int, files: LocalAdapter) -> int: ...

    async def remove(self, ref: AdapterRef, int_id: int) -> None: ...


@dataclass(frozen=True, slots=True)
class SlotUse:
    """A request's hold on a slot. Release it exactly once."""

    slot: Slot
    tier: Tier
    load: Load
    timings_ms: dict[str, float]
    release: Callable[[], None]


def check_landed(adapter: ResolvedAdapter, landed: int) -> None:
    """Raises AdapterIncompatible (`not_all_applied`) unless the engine filled as many modules as the manifest counts."""
    if landed != adapter.num_modules:
        raise AdapterIncompatible(
            f"the engine applied {landed} of the {adapter.num_modules} modules of `{adapter.ref}`",
            reason="not_all_applied",
            limit=adapter.num_modules,
            value=landed,
            hint="publish it again: the contract of its base says which modules the engine takes",
        )


class EngineSlots:
    """The places of one engine. Not thread-safe: it lives on the replica's event loop."""

    def __init__(
        self,
        engine: AdapterEngine,
        cache: AdapterCache,
        capacity: int,
        *,
        wait_s: float = 60,
        drain_after_s: float = 1,
        slice_s: float = 8,
        meter: Meter = NULL_METER,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._wait_s = wait_s
        self._meter = meter
        self._clock_s = clock_s
        self._int_ids = itertools.count(FIRST_INT_ID)
        self._pending: dict[AdapterRef, Pending] = {}
        self._places = Places(capacity, self._unload, drain_after_s=drain_after_s, slice_s=slice_s, clock_s=clock_s)
        # What is staged lies in memory beside the engine's own: half as many as it has places, at most.
        self._free_desks = self._all_desks = max(2, capacity // 2)
        self._desks: Line[Pending] = Line(self._try_desk)
        self._background: set[asyncio.Task[Any]] = set()
        self._times = LoadTimes()
        self._thrash = ThrashWatch()
        self._untold = Untold(clock_s)

    @property
    def capacity(self) -> int:
        return self._places.capacity

    @property
    def popularity(self) -> Popularity[AdapterRef]:
        """How often each ref was used here, also refs that went; for the memory of the next run."""
        return self._places.popularity

    async def use(self, adapter: ResolvedAdapter, *, wait: bool = True) -> SlotUse:
        """A hold on the adapter's slot, loading it first if need be.

        Raises AdapterLoading when it is cold and `wait` is False (the load goes on; should it fail, the next call that does not
        wait is told), Overloaded when no place comes free in time, and whatever the fetch or the engine's load raised. Cancelling
        one call disturbs no other.
        """
        self.popularity.use(adapter.ref)
        slot = self._places.open(adapter.ref)
        if slot is not None:
            slot.users += 1
            slot.last_used_s = self._clock_s()
            return SlotUse(slot, "engine", "none", {}, _once(lambda: self._release(slot)))
        leads = adapter.ref not in self._pending
        if leads and not wait and (error := self._untold.take(adapter.ref)) is not None:
            raise error
        pending = self._pending_for(adapter)
        self._hurry(pending)
        if not wait:
            raise AdapterLoading(f"`{adapter.ref}` is being loaded", retry_after_s=self._retry_after_s(pending))
        slot = await self._join(pending)
        return SlotUse(
            slot, pending.tier, "leader" if leads else "follower", dict(pending.timings_ms), _once(lambda: self._release(slot))
        )

    async def warm(self, adapter: ResolvedAdapter, *, urgent: bool = False) -> None:
        """Brings the adapter into the engine without a user. It counts as one use, or the next load would take its place again.

        Loads that requests wait for go first, unless it is `urgent`: then it queues, and closes slots, as they do. Raises what
        `use` raises. Cancelling the call does not stop the load.
        """
        if self._places.get(adapter.ref) is not None:
            return
        self.popularity.use(adapter.ref)
        pending = self._pending_for(adapter)
        if urgent:
            self._hurry(pending)
        assert pending.task is not None
        await asyncio.shield(pending.task)

    def hold(self, ref: AdapterRef) -> None:
        """From now on the ref's slot, there already or still to come, is neither evicted nor closed to new users.

        Raises Overloaded (`too_many_pins`, limit and value in slots) when that would leave no place for anybody else.
        """
        self._places.hold(ref)

    def unhold(self, ref: AdapterRef) -> None:
        """Ends a hold; the slot competes like any other again. Without a hold nothing happens."""
        self._places.unhold(ref)

    async def evict(self, ref: AdapterRef) -> bool:
        """Frees the adapter's slot; False when it has none, is in use or held."""
        evicted = await self._places.evict(ref)
        if evicted:
            self._thrash.forgive(ref)
        return evicted

    def resident(self) -> dict[AdapterRef, int]:
        """The registered refs and how many requests use each now."""
        return {slot.ref: slot.users for slot in self._places.slots()}

    def loading(self) -> set[AdapterRef]:
        """The refs that are on their way into the engine."""
        return set(self._pending)

    def held(self) -> set[AdapterRef]:
        """The refs that are held, whether they are in the engine or not."""
        return set(self._places.held)

    def int_ids(self) -> set[int]:
        """The engine ids that the table believes registered; equal to the engine's own list when nothing is under way."""
        return {slot.int_id for slot in self._places.slots()}

    def estimate_s(self, adapter: ResolvedAdapter) -> float:
        """Seconds that a load of this adapter would take now, were a place free; by what loads took so far."""
        return self._times.estimate_s(self._tier(adapter), adapter.size_bytes)

    # -- loading -----------------------------------------------------------------------------------------------------

    def _release(self, slot: Slot) -> None:
        slot.users -= 1
        slot.last_used_s = self._clock_s()
        if slot.users == 0:
            self._places.wake()

    def _pending_for(self, adapter: ResolvedAdapter) -> Pending:
        pending = self._pending.get(adapter.ref)
        if pending is None:
            pending = self._pending[adapter.ref] = Pending(adapter, self._tier(adapter), self._wait_s, self._clock_s)
            pending.task = self._in_background(self._load(pending))
        return pending

    def _tier(self, adapter: ResolvedAdapter) -> Tier:
        return "disk" if self._cache.has(adapter.digest) else "remote"

    def _hurry(self, pending: Pending) -> None:
        if not pending.urgent:
            pending.hurry()
            self._desks.wake()
            self._places.wake()

    def _retry_after_s(self, pending: Pending) -> int:
        return max(1, math.ceil(self._times.estimate_s(pending.tier, pending.adapter.size_bytes) - pending.age_s))

    async def _join(self, pending: Pending) -> Slot:
        assert pending.task is not None
        pending.waiters += 1
        try:
            return await asyncio.shield(pending.task)
        except asyncio.CancelledError:
            if pending.task.done() and not pending.task.cancelled() and pending.task.exception() is None:
                self._release(pending.task.result())
            else:
                pending.waiters -= 1
            raise

    async def _load(self, pending: Pending) -> Slot:
        result = "given_up"
        try:
            slot = await self._settle(pending, await self._fetch(pending))
            result = "ok"
            self._untold.take(pending.ref)
            return slot
        except LoraMuxError as error:
            result = error.code
            if not pending.waiters:
                self._untold.keep(pending.ref, error)
            raise
        finally:
            del self._pending[pending.ref]
            self._measure(pending, result)

    def _measure(self, pending: Pending, result: str) -> None:
        if pending.tier != "engine":  # else its slot was there all the time, closed for others
            self._meter.count(LOADS, tier=pending.tier, result=result)
        for stage, took_ms in pending.timings_ms.items():
            self._meter.observe(LOAD_SECONDS, took_ms / 1e3, stage=stage)

    async def _fetch(self, pending: Pending) -> Lease:
        lease = await pending.timed("fetch", self._cache.lease(pending.adapter))
        if lease.fetched:
            self._times.fetched(lease.fetch_s, pending.adapter.size_bytes)
        return lease

    async def _settle(self, pending: Pending, lease: Lease) -> Slot:
        """The adapter in its place, with all who wait as its users."""
        try:
            await self._queue(pending, self._desks.take(pending))
            try:
                slot = await self._register(pending, lease)
            finally:
                self._free_desks += 1
                self._desks.wake()
        except BaseException:
            lease.release()
            raise
        slot.users += pending.waiters
        if slot.users == 0:
            self._places.wake()
        return slot

    async def _register(self, pending: Pending, lease: Lease) -> Slot:
        int_id, placed = next(self._int_ids), False
        try:
            await pending.timed("stage", self._engine.stage(pending.ref, int_id, lease.local))
            reopened = await self._queue(pending, self._places.take(pending, pending.queued_s))
            if reopened is not None:
                pending.tier = "engine"
                self._in_background(self._forget(pending.ref, int_id))
                lease.release()
                return reopened
            placed = True
            await self._add(pending, int_id, lease.local)
        except BaseException:
            # A failed activation leaves a ghost that a second add of the same id would report as loaded.
            await self._forget(pending.ref, int_id)
            if placed:
                self._places.give()
            raise
        now_s = self._clock_s()
        slot = Slot(pending.ref, int_id, lease, since_s=now_s, last_used_s=now_s)
        self._places.put(slot)
        return slot

    async def _add(self, pending: Pending, int_id: int, files: LocalAdapter) -> None:
        adapter = pending.adapter
        landed = await pending.timed("load", self._engine.add(adapter.ref, int_id, files))
        if adapter.num_modules:  # 0: its manifest is older than the count
            check_landed(adapter, landed)
        self._times.loaded((pending.timings_ms["stage"] + pending.timings_ms["load"]) / 1e3, adapter.size_bytes)
        self._watch_thrash(adapter.ref)

    async def _queue(self, pending: Pending, waiting: Coroutine[Any, Any, T]) -> T:
        try:
            return await pending.queue(waiting)
        except TimeoutError:
            raise Overloaded(
                f"all {self.capacity} adapter places of the engine stayed in use for {self._wait_s:g} s",
                limit=self.capacity,
                value=self.capacity,
                retry_after_s=2,
            ) from None

    async def _try_desk(self, pending: Pending) -> bool:
        # Half of them are kept for loads that requests wait for.
        if self._free_desks <= (0 if pending.urgent else self._all_desks // 2):
            return False
        self._free_desks -= 1
        return True

    # -- the engine --------------------------------------------------------------------------------------------------

    async def _unload(self, slot: Slot) -> None:
        try:
            await self._engine.remove(slot.ref, slot.int_id)
        finally:
            slot.lease.release()
            self._meter.count(SLOT_EVICTIONS)
            self._thrash.evicted(slot.ref, self._clock_s())

    async def _forget(self, ref: AdapterRef, int_id: int) -> None:
        with contextlib.suppress(LoraMuxError):  # the engine is dead; the error that brought us here says so
            await self._engine.remove(ref, int_id)

    def _watch_thrash(self, ref: AdapterRef) -> None:
        now_s = self._clock_s()
        if self._thrash.loaded(ref, now_s):
            self._meter.count(RELOADS)
        if (alarm := self._thrash.alarm(now_s)) is not None:
            log.warning(
                "thrash: %d of %d loads in the last %g s brought back what had just been evicted; the engine's %d places are too"
                " few for what is busy: raise max_cpu_loras and max_loras of this base, or its replicas",
                *alarm,
                self._thrash.window_s,
                self.capacity,
            )

    def _in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(_retrieve)
        return task


def _once(release: Callable[[], None]) -> Callable[[], None]:
    done = False

    def run() -> None:
        nonlocal done
        if not done:
            done = True
            release()

    return run


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Marks a detached task's error as seen; whoever waits for the task gets it anyway."""
    if not task.cancelled():
        task.exception()
