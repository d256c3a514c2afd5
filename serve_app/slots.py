"""EngineSlots: which adapters sit in the engine, under which integer, and who uses them.

The engine itself is forgetful (README.md of this package lists what it really does), so one owner keeps the table:

- the registered set never exceeds the engine's own capacity, and a place is freed before the next load takes it;
- a slot in use is never evicted, and its files stay leased as long as it is registered;
- an integer id is never used twice, and a failed load is removed from the engine whatever it left behind;
- the first load of a content counts what the engine filled: an engine drops what it doesn't know without a word;
- requests for one cold adapter share one fetch and one load, which run apart from the requests that wait for them;
- a loader that found every place in use is not starved: after `drain_after_s` the longest-held slot takes no new users.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from adapters.cache import AdapterCache, Lease
from adapters.errors import AdapterIncompatible, AdapterLoading, LoraMuxError, Overloaded
from adapters.names import AdapterRef
from adapters.types import LocalAdapter, ResolvedAdapter
from gateway.backend import Load, Tier

FIRST_INT_ID = 1_000  # the engine's own warm-up takes the small ones


class AdapterEngine(Protocol):
    """The engine's side of a slot. `landed` counts the base's modules that a loaded adapter fills, as Hugging Face names them;
    `remove` forgives an id that the engine does not know."""

    async def add(self, ref: AdapterRef, int_id: int, files: LocalAdapter) -> None: ...

    async def landed(self, int_id: int) -> int: ...

    async def remove(self, ref: AdapterRef, int_id: int) -> None: ...


@dataclass(eq=False, slots=True)
class Slot:
    """A registered adapter. Only EngineSlots changes it."""

    ref: AdapterRef
    int_id: int
    lease: Lease
    loaded_at_s: float
    last_used_s: float
    users: int = 0


@dataclass(eq=False, slots=True)
class _Pending:
    """A load under way. `waiters` become the slot's users at the moment it is ready, so nothing can slip between."""

    tier: Tier
    waiters: int = 0
    timings_ms: dict[str, float] = field(default_factory=dict)
    task: asyncio.Task[Slot] | None = None


@dataclass(frozen=True, slots=True)
class SlotUse:
    """A request's hold on a slot. Release it exactly once."""

    slot: Slot
    tier: Tier
    load: Load
    timings_ms: dict[str, float]
    release: Callable[[], None]


@dataclass(eq=False, slots=True)
class _PlaceWaiter:
    since_s: float
    turn: asyncio.Future[None]


def choose_victim(slots: Iterable[Slot]) -> Slot | None:
    """The idle slot that was used longest ago; None when all are in use."""
    return min((slot for slot in slots if slot.users == 0), key=lambda slot: slot.last_used_s, default=None)


def choose_drain(slots: Iterable[Slot]) -> Slot | None:
    """The slot that has been held longest: the fair one to give way when every place is in use."""
    return min(slots, key=lambda slot: slot.loaded_at_s, default=None)


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
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._capacity = capacity
        self._wait_s = wait_s
        self._drain_after_s = drain_after_s
        self._clock_s = clock_s
        self._int_ids = itertools.count(FIRST_INT_ID)
        self._slots: dict[AdapterRef, Slot] = {}
        self._leaving: set[Slot] = set()
        self._pending: dict[AdapterRef, _Pending] = {}
        self._used_places = 0
        self._queue: deque[_PlaceWaiter] = deque()
        self._cleanups: set[asyncio.Task[None]] = set()
        self._landed: set[str] = set()  # digests that are known to land whole; content never changes

    async def use(self, adapter: ResolvedAdapter, *, wait: bool = True) -> SlotUse:
        """A hold on the adapter's slot, loading it first if need be.

        Raises AdapterLoading when it is cold and `wait` is False (the load goes on), Overloaded when no place comes free
        in time, and whatever the fetch or the engine's load raised. Cancelling one call disturbs no other.
        """
        slot = self._slots.get(adapter.ref)
        if slot is not None and not self._must_drain(slot):
            return self._hold(slot, "engine", "none", {})
        pending = self._pending.get(adapter.ref)
        leads = pending is None
        if pending is None:
            pending = self._start_load(adapter)
        if not wait:
            raise AdapterLoading(f"`{adapter.ref}` is being loaded", retry_after_s=1)
        slot = await self._join(pending)
        return SlotUse(
            slot, pending.tier, "leader" if leads else "follower", dict(pending.timings_ms), _once(lambda: self._release(slot))
        )

    def resident(self) -> dict[AdapterRef, int]:
        """The registered refs and how many requests use each now."""
        return {slot.ref: slot.users for slot in (*self._leaving, *self._slots.values())}

    def int_ids(self) -> set[int]:
        """The engine ids that the table believes registered; equal to the engine's own list when nothing is under way."""
        return {slot.int_id for slot in (*self._slots.values(), *self._leaving)}

    async def evict(self, ref: AdapterRef) -> bool:
        """Frees the adapter's slot if nobody uses it; says whether it did."""
        slot = self._slots.get(ref)
        if slot is None or slot.users:
            return False
        await self._unload(slot)
        self._give_place()
        return True

    # -- holding -----------------------------------------------------------------------------------------------------

    def _hold(self, slot: Slot, tier: Tier, load: Load, timings_ms: dict[str, float]) -> SlotUse:
        slot.users += 1
        slot.last_used_s = self._clock_s()
        return SlotUse(slot, tier, load, timings_ms, _once(lambda: self._release(slot)))

    def _release(self, slot: Slot) -> None:
        slot.users -= 1
        slot.last_used_s = self._clock_s()
        if slot.users == 0:
            if slot in self._leaving:
                self._in_background(self._finish_leaving(slot))
            else:
                self._wake_next()

    def _must_drain(self, slot: Slot) -> bool:
        """Moves the slot among the leaving when a loader has starved long enough and this slot is the one to give way."""
        if not self._queue or self._clock_s() - self._queue[0].since_s < self._drain_after_s:
            return False
        if choose_drain(self._slots.values()) is not slot or len(self._leaving) >= len(self._queue):
            return False
        del self._slots[slot.ref]
        self._leaving.add(slot)
        if slot.users == 0:
            self._in_background(self._finish_leaving(slot))
        return True

    async def _finish_leaving(self, slot: Slot) -> None:
        await self._unload(slot)
        self._give_place()

    # -- loading -----------------------------------------------------------------------------------------------------

    def _start_load(self, adapter: ResolvedAdapter) -> _Pending:
        pending = _Pending(tier="disk" if self._cache.has(adapter.digest) else "remote")
        self._pending[adapter.ref] = pending
        pending.task = asyncio.ensure_future(self._load(adapter, pending))
        pending.task.add_done_callback(_retrieve)
        return pending

    async def _join(self, pending: _Pending) -> Slot:
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

    async def _load(self, adapter: ResolvedAdapter, pending: _Pending) -> Slot:
        try:
            lease = await self._timed(pending, "fetch", self._cache.lease(adapter))
            try:
                slot = await self._register(adapter, pending, lease)
            except BaseException:
                lease.release()
                raise
            slot.users = pending.waiters
            self._slots[adapter.ref] = slot
            if slot.users == 0:
                self._wake_next()
            return slot
        finally:
            del self._pending[adapter.ref]

    async def _register(self, adapter: ResolvedAdapter, pending: _Pending, lease: Lease) -> Slot:
        await self._timed(pending, "queue", self._take_place())
        int_id = next(self._int_ids)
        try:
            await self._timed(pending, "load", self._add(adapter, int_id, lease.local))
        except BaseException:
            # A failed activation leaves a ghost that a second add of the same id would report as loaded.
            await self._forget(adapter.ref, int_id)
            self._give_place()
            raise
        now_s = self._clock_s()
        return Slot(adapter.ref, int_id, lease, loaded_at_s=now_s, last_used_s=now_s)

    async def _add(self, adapter: ResolvedAdapter, int_id: int, files: LocalAdapter) -> None:
        await self._engine.add(adapter.ref, int_id, files)
        if adapter.num_modules and adapter.digest not in self._landed:  # 0: its manifest is older than the count
            check_landed(adapter, await self._engine.landed(int_id))
            self._landed.add(adapter.digest)

    async def _forget(self, ref: AdapterRef, int_id: int) -> None:
        with contextlib.suppress(LoraMuxError):  # the engine is dead; the error that brought us here says so
            await self._engine.remove(ref, int_id)

    async def _timed(self, pending: _Pending, stage: str, work):
        start_s = self._clock_s()
        try:
            return await work
        finally:
            pending.timings_ms[stage] = (self._clock_s() - start_s) * 1e3

    # -- places ------------------------------------------------------------------------------------------------------

    async def _take_place(self) -> None:
        if self._queue or not await self._try_take():
            await self._wait_for_place()

    async def _try_take(self) -> bool:
        if self._used_places < self._capacity:
            self._used_places += 1
            return True
        victim = choose_victim(self._slots.values())
        if victim is None:
            return False
        try:
            await self._unload(victim)
        except BaseException:
            self._give_place()
            raise
        return True

    async def _wait_for_place(self) -> None:
        waiter = _PlaceWaiter(self._clock_s(), asyncio.get_running_loop().create_future())
        self._queue.append(waiter)
        try:
            async with asyncio.timeout(self._wait_s):
                while True:
                    await waiter.turn
                    if await self._try_take():
                        return
                    waiter.turn = asyncio.get_running_loop().create_future()
        except TimeoutError:
            raise Overloaded(
                f"all {self._capacity} adapter places of the engine stayed in use for {self._wait_s:g} s",
                limit=self._capacity,
                value=self._used_places,
                retry_after_s=2,
            ) from None
        finally:
            self._queue.remove(waiter)
            self._wake_next()

    def _give_place(self) -> None:
        self._used_places -= 1
        self._wake_next()

    def _wake_next(self) -> None:
        if self._queue and not self._queue[0].turn.done():
            self._queue[0].turn.set_result(None)

    async def _unload(self, slot: Slot) -> None:
        """Takes the slot out of the table first, so that nobody can start to use it while the engine forgets it."""
        self._slots.pop(slot.ref, None) if self._slots.get(slot.ref) is slot else None
        try:
            await self._engine.remove(slot.ref, slot.int_id)
        finally:
            self._leaving.discard(slot)
            slot.lease.release()

    def _in_background(self, work) -> None:
        task = asyncio.ensure_future(work)
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)
        task.add_done_callback(_retrieve)


def _once(release: Callable[[], None]) -> Callable[[], None]:
    done = False

    def run() -> None:
        nonlocal done
        if not done:
            done = True
            release()

    return run


def _retrieve(task: asyncio.Task) -> None:
    """Marks a detached task's error as seen; whoever waits for the task gets it anyway."""
    if not task.cancelled():
        task.exception()
