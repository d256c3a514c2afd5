"""Follower: fulfils the wishes that `wishes.choose` left. Loads, holds, lets go, tries again, and accounts for each.

What it brings runs apart from the loop that follows: a few fetches and one load into the engine at a time, the most urgent
first, so that they take little from the requests; a promotion waits behind none of them. What fails is told and tried again
later, and disturbs nobody else's wish.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from adapters.cache import AdapterCache, Lease
from adapters.errors import AdapterRefused, InternalError, LoraMuxError
from adapters.names import AdapterRef
from adapters.types import ResolvedAdapter, WarmTier
from serve_app.residency.wishes import TOO_MANY_PINS, Wanted, Wish
from serve_app.slots.engine_slots import EngineSlots

log = logging.getLogger(__name__)

State = Literal["ready", "loading", "failed"]
Key = tuple[AdapterRef, WarmTier]

Lane = Literal["promote", "load", "fetch"]
# A cache fetches four at once (`cache.fetches_at_once`): two are left to requests.
AT_ONCE: dict[Lane, float] = {"promote": math.inf, "load": 1, "fetch": 2}
FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class Account:
    """How a wish stands. `reason` is a code: of the last trouble, or of what there was no room for."""

    wish: Wish
    state: State
    reason: str | None


@dataclass(frozen=True, slots=True)
class _Trouble:
    """The last failure of a wish. `final` is one that another try would hardly mend."""

    key: str
    reason: str
    final: bool
    tries: int
    again_at_s: float


class Follower:
    """Owns the holds that the wishes ask for and the leases of what stays on the disk. Belongs to the replica's event loop.

    `warm(adapter, urgent)` brings an adapter into the engine and raises what keeps it out.
    `linger_s`: how long the slot of a promotion stays held after the move, until the requests that follow the alias have come.
    """

    def __init__(
        self,
        slots: EngineSlots,
        cache: AdapterCache,
        warm: Callable[[ResolvedAdapter, bool], Awaitable[None]],
        *,
        linger_s: float,
        on_change: Callable[[], None] = lambda: None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slots = slots
        self._cache = cache
        self._warm = warm
        self._linger_s = linger_s
        self._on_change = on_change
        self._clock_s = clock_s
        self._wanted: Wanted = {}
        self._done: dict[Key, str] = {}  # the key of the wish that was fulfilled
        self._troubles: dict[Key, _Trouble] = {}
        self._tasks: dict[Key, tuple[Lane, asyncio.Task[None]]] = {}
        self._leases: dict[AdapterRef, Lease] = {}
        self._lingering: dict[AdapterRef, float] = {}

    def follow(self, wanted: Wanted) -> None:
        """Takes over these wishes and begins what is due. Call it again when something changed, and every now and then."""
        before, self._wanted = self._wanted, wanted
        self._forget_gone()
        self._let_go(before)
        self._hold()
        for wish in wanted.values():
            self._begin(wish)

    def accounts(self) -> dict[AdapterRef, Account]:
        """One account for each adapter that is wished for: the engine's where both tiers are."""
        accounts: dict[AdapterRef, Account] = {}
        for (ref, tier), wish in self._wanted.items():
            if tier == "engine" or ref not in accounts:
                accounts[ref] = self._account(wish)
        return accounts

    def is_held(self, ref: AdapterRef, tier: WarmTier) -> bool:
        """Whether a wish keeps the adapter from leaving `tier`; what is held in the engine is held on the disk too."""
        return ref in self._slots.held() or (tier == "disk" and ref in self._leases)

    def is_idle(self) -> bool:
        """Whether nothing is under way: each wish is fulfilled or waits for its next try."""
        return not self._tasks

    async def close(self) -> None:
        """Stops what is under way and gives the leases back; loads that have begun in the engine end by themselves."""
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for lease in self._leases.values():
            lease.release()
        self._leases.clear()

    # Holding

    def _hold(self) -> None:
        wished = {wish.ref for wish in self._wanted.values() if wish.tier == "engine" and wish.held}
        self._end_lingering(len(wished))
        for ref in wished - self._slots.held():
            try:
                self._slots.hold(ref)
            except LoraMuxError as error:
                log.warning("%s can't be held: %s", ref, error)

    def _let_go(self, before: Wanted) -> None:
        now_s = self._clock_s()
        for wish in before.values():
            if wish.cause == "promote" and wish.held and not self._wishes_held(wish.ref, "engine"):
                self._lingering.setdefault(wish.ref, now_s + self._linger_s)
        self._lingering = {
            ref: until_s for ref, until_s in self._lingering.items() if until_s > now_s and not self._wishes_held(ref, "engine")
        }
        for ref in self._slots.held():
            if not self._wishes_held(ref, "engine") and ref not in self._lingering:
                self._slots.unhold(ref)
        for ref in [ref for ref in self._leases if not self._wishes_held(ref, "disk")]:
            self._leases.pop(ref).release()

    def _end_lingering(self, wished: int) -> None:
        """What lingers gives way to what is wished for, those first that would end first."""
        room = max(0, self._slots.capacity - 1 - wished)
        by_end = sorted(self._lingering, key=lambda ref: self._lingering[ref])
        for ref in by_end[: max(0, len(by_end) - room)]:
            del self._lingering[ref]
            self._slots.unhold(ref)

    def _wishes_held(self, ref: AdapterRef, tier: WarmTier) -> bool:
        wish = self._wanted.get((ref, tier))
        return wish is not None and wish.held

    # Bringing

    def _begin(self, wish: Wish) -> None:
        key = wish.ref, wish.tier
        if self._is_there(wish):
            self._fulfilled(wish)
        if key in self._tasks or self._is_fulfilled(wish) or not self._is_due(wish):
            return
        lane = self._lane(wish)
        if sum(busy == lane for busy, _ in self._tasks.values()) < AT_ONCE[lane]:
            task = asyncio.ensure_future(self._bring(wish, lane))
            self._tasks[key] = lane, task
            task.add_done_callback(lambda _: self._ended(key))

    def _lane(self, wish: Wish) -> Lane:
        """What is not on the disk is fetched first, in its own lane: a slow store keeps no other wish from the engine."""
        if wish.cause == "promote":
            return "promote"
        return "load" if wish.tier == "engine" and self._cache.has(wish.adapter.digest) else "fetch"

    def _is_there(self, wish: Wish) -> bool:
        if wish.tier == "engine":
            return wish.ref in self._slots.resident()
        return wish.ref in self._leases and self._cache.has(wish.adapter.digest)

    def _is_fulfilled(self, wish: Wish) -> bool:
        return self._is_there(wish) or (not wish.held and self._done.get((wish.ref, wish.tier)) == wish.key)

    def _is_due(self, wish: Wish) -> bool:
        trouble = self._troubles.get((wish.ref, wish.tier))
        return trouble is None or trouble.key != wish.key or trouble.again_at_s <= self._clock_s()

    async def _bring(self, wish: Wish, lane: Lane) -> None:
        try:
            if lane == "fetch":
                await self._fetch(wish)
            else:
                await self._warm(wish.adapter, lane == "promote")
        except LoraMuxError as error:
            self._failed(wish, error)
        except Exception:
            log.exception("%s could not be brought to the tier %s", wish.ref, wish.tier)
            self._failed(wish, InternalError("a wish could not be fulfilled"))
        else:
            if lane != "fetch" or wish.tier == "disk":
                self._fulfilled(wish)

    async def _fetch(self, wish: Wish) -> None:
        lease = await self._cache.lease(wish.adapter)
        if not self._wishes_held(wish.ref, "disk"):
            lease.release()
            return
        before = self._leases.get(wish.ref)
        self._leases[wish.ref] = lease
        if before is not None:  # its files were taken away under it
            before.release()

    def _fulfilled(self, wish: Wish) -> None:
        key = wish.ref, wish.tier
        self._done[key] = wish.key
        self._troubles.pop(key, None)

    def _failed(self, wish: Wish, error: LoraMuxError) -> None:
        key = wish.ref, wish.tier
        last = self._troubles.get(key)
        tries = 1 + (last.tries if last is not None and last.key == wish.key else 0)
        again_at_s = self._clock_s() + min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** (tries - 1))
        reason = error.reason or error.code
        self._troubles[key] = _Trouble(wish.key, reason, isinstance(error, AdapterRefused), tries, again_at_s)
        log.log(
            logging.WARNING if tries == 1 else logging.DEBUG, "%s is wished for (%s) but failed: %s", wish.ref, wish.cause, error
        )

    def _ended(self, key: Key) -> None:
        del self._tasks[key]
        self._on_change()

    # Accounting

    def _account(self, wish: Wish) -> Account:
        if self._is_fulfilled(wish):
            return Account(wish, "failed" if wish.short == TOO_MANY_PINS else "ready", wish.short)
        trouble = self._troubles.get((wish.ref, wish.tier))
        if trouble is None or trouble.key != wish.key:
            return Account(wish, "loading", wish.short)
        return Account(wish, "failed" if trouble.final else "loading", trouble.reason)

    def _forget_gone(self) -> None:
        self._done = {key: done for key, done in self._done.items() if key in self._wanted}
        self._troubles = {key: trouble for key, trouble in self._troubles.items() if key in self._wanted}
