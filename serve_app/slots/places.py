"""Places: the table of an engine's slots. Who sits where, who may be evicted, who waits for a place. Knows no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from adapters.cache import Lease
from adapters.errors import Overloaded
from adapters.names import AdapterRef
from adapters.popularity import Popularity
from serve_app.slots.line import Line

HALF_LIFE_USES = 8  # for each place; README.md of this package says how it was chosen


@dataclass(eq=False, slots=True)
class Slot:
    """A registered adapter. `closing`: it takes no new users while others wait for its place."""

    ref: AdapterRef
    int_id: int
    lease: Lease
    since_s: float
    last_used_s: float
    users: int = 0
    closing: bool = False


class Claim(Protocol):
    """A load that wants a place for `ref`; `urgent` when a request asked for it."""

    urgent: bool

    @property
    def ref(self) -> AdapterRef: ...


def choose_least(slots: Iterable[Slot], popularity: Popularity[AdapterRef]) -> Slot | None:
    """The slot that is worth least; among equals the one used longest ago; None of none."""
    return min(slots, key=lambda slot: (popularity.value(slot.ref), slot.last_used_s), default=None)


class Places:
    """`capacity` places. `unload` takes a slot that left the table out of the engine.

    A claim that has waited for `drain_after_s` closes a slot, but none that has been there for less than `slice_s`.
    """

    def __init__(
        self,
        capacity: int,
        unload: Callable[[Slot], Awaitable[None]],
        *,
        drain_after_s: float,
        slice_s: float,
        clock_s: Callable[[], float],
    ) -> None:
        self.capacity = capacity
        self.popularity: Popularity[AdapterRef] = Popularity(HALF_LIFE_USES * capacity)
        self.held: set[AdapterRef] = set()
        self._unload = unload
        self._drain_after_s = drain_after_s
        self._slice_s = slice_s
        self._clock_s = clock_s
        self._slots: dict[AdapterRef, Slot] = {}
        self._used = 0
        self._line: Line[Claim] = Line(self._try_take)
        self._evictions: set[asyncio.Task[None]] = set()

    def slots(self) -> Iterable[Slot]:
        return self._slots.values()

    def get(self, ref: AdapterRef) -> Slot | None:
        return self._slots.get(ref)

    def open(self, ref: AdapterRef) -> Slot | None:
        """The ref's slot if it takes users. One that was closed for others opens again as soon as no other waits."""
        slot = self._slots.get(ref)
        if slot is None:
            return None
        slot.closing = slot.closing and self._line.has_urgent()
        return None if slot.closing else slot

    # -- taking and giving -------------------------------------------------------------------------------------------

    async def take(self, claim: Claim, waited_s: float = 0.0) -> Slot | None:
        """Takes a place, for which the caller then calls `put` or `give`. Returns the ref's own slot, open again and no place
        taken, if it was closed for others and is still there when its turn comes. Cancelling leaves the line."""
        impatience = asyncio.ensure_future(self._close_more_and_more(claim, waited_s))
        try:
            await self._line.take(claim)
        finally:
            impatience.cancel()
        return self._slots.get(claim.ref)

    def put(self, slot: Slot) -> None:
        """The slot sits in a place that was taken for it."""
        self._slots[slot.ref] = slot

    def give(self) -> None:
        """A place that was taken is free."""
        self._used -= 1
        self._line.wake()

    def wake(self) -> None:
        """A slot became idle, or a claim became urgent."""
        self._line.wake()

    async def evict(self, ref: AdapterRef) -> bool:
        """Frees the ref's place; False when it has none, is in use or held."""
        slot = self._slots.get(ref)
        if slot is None or slot.users or ref in self.held:
            return False
        eviction = self._start_eviction(slot)
        eviction.add_done_callback(lambda _: self.give())
        await asyncio.shield(eviction)
        return True

    # -- holding -----------------------------------------------------------------------------------------------------

    def hold(self, ref: AdapterRef) -> None:
        """Raises Overloaded (`too_many_pins`) when no place would be left for anybody else."""
        if ref not in self.held and len(self.held) >= self.capacity - 1:
            raise Overloaded(
                f"{len(self.held)} adapters are held already; the engine has {self.capacity} places and one of them stays free",
                reason="too_many_pins",
                limit=self.capacity - 1,
                value=len(self.held) + 1,
            )
        self.held.add(ref)
        if ref in self._slots:
            self._slots[ref].closing = False

    def unhold(self, ref: AdapterRef) -> None:
        self.held.discard(ref)
        self._line.wake()

    # -- who goes ----------------------------------------------------------------------------------------------------

    async def _try_take(self, claim: Claim) -> bool:
        own = self._slots.get(claim.ref)
        if own is not None:
            own.closing = False
            return True
        if self._used < self.capacity:
            self._used += 1
            return True
        victim = choose_least((slot for slot in self._free_to_go() if not slot.users), self.popularity)
        if victim is None:
            return False
        eviction = self._start_eviction(victim)
        try:
            await asyncio.shield(eviction)
        except BaseException:
            eviction.add_done_callback(lambda _: self.give())  # also when the claim was given up meanwhile
            raise
        return True

    def _start_eviction(self, slot: Slot) -> asyncio.Task[None]:
        """Takes the slot out of the table first, so that nobody can start to use it while the engine forgets it."""
        del self._slots[slot.ref]
        task = asyncio.ensure_future(self._unload(slot))
        self._evictions.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, eviction: asyncio.Task[None]) -> None:
        self._evictions.discard(eviction)
        if not eviction.cancelled():
            eviction.exception()  # marks it as seen; whoever waits for the eviction gets it anyway

    async def _close_more_and_more(self, claim: Claim, waited_s: float) -> None:
        """Each time that an urgent claim has waited twice as long, one slot more is closed to new users: answers may be long, so
        the first that was closed need not be the first to come free."""
        pause_s, next_s = max(0.0, self._drain_after_s - waited_s), self._drain_after_s
        while True:
            await asyncio.sleep(pause_s)
            pause_s = next_s
            if claim.urgent and self._close_one():
                next_s *= 2

    def _close_one(self) -> bool:
        before_s = self._clock_s() - self._slice_s
        slot = choose_least(
            (slot for slot in self._free_to_go() if not slot.closing and slot.since_s <= before_s), self.popularity
        )
        if slot is None:
            return False
        slot.closing = True
        return True

    def _free_to_go(self) -> Iterable[Slot]:
        return (slot for slot in self._slots.values() if slot.ref not in self.held)
