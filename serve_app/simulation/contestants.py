"""Rules for which slot goes, each with one method: `ask(key)` says whether the key was there, and makes it so.

Every miss must be admitted: an engine cannot answer from an adapter that it did not load. Ours is production's own code.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

from adapters.names import AdapterRef
from adapters.popularity import Popularity
from serve_app.simulation.traces import Trace
from serve_app.slots.places import HALF_LIFE_USES, Slot, choose_least


class Contestant(Protocol):
    def ask(self, key: int) -> bool: ...


class Lru:
    """Least recently used."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._there: OrderedDict[int, None] = OrderedDict()

    def ask(self, key: int) -> bool:
        hit = key in self._there
        self._there[key] = None
        self._there.move_to_end(key)
        if len(self._there) > self._places:
            self._there.popitem(last=False)
        return hit


class Lfu:
    """Least often used; counts begin anew when a key comes back. Among equals the one used longest ago."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._there: dict[int, tuple[int, int]] = {}
        self._clock = itertools.count()

    def ask(self, key: int) -> bool:
        hit = key in self._there
        if not hit and len(self._there) == self._places:
            del self._there[min(self._there, key=self._there.__getitem__)]
        self._there[key] = (self._there.get(key, (0, 0))[0] + 1, next(self._clock))
        return hit


class Lru2:
    """LRU-2 (O'Neil 1993): the one whose last use but one is longest ago; remembers keys that went."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._there: set[int] = set()
        self._uses: dict[int, tuple[int, int]] = {}
        self._clock = itertools.count(1)

    def ask(self, key: int) -> bool:
        hit = key in self._there
        if not hit and len(self._there) == self._places:
            self._there.remove(min(self._there, key=self._uses.__getitem__))
        self._there.add(key)
        self._uses[key] = (self._uses.get(key, (0, 0))[1], next(self._clock))
        return hit


class Arc:
    """ARC (Megiddo 2003): a list of those used once, one of those used again, and what went from each."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._target = 0.0
        self._once, self._often = OrderedDict[int, None](), OrderedDict[int, None]()
        self._gone_once, self._gone_often = OrderedDict[int, None](), OrderedDict[int, None]()

    def ask(self, key: int) -> bool:
        if key in self._once or key in self._often:
            self._once.pop(key, None)
            self._often.pop(key, None)
            self._often[key] = None
            return True
        if key in self._gone_once:
            self._target = min(self._places, self._target + max(1, len(self._gone_often) / len(self._gone_once)))
            self._make_room(False)
            del self._gone_once[key]
            self._often[key] = None
        elif key in self._gone_often:
            self._target = max(0, self._target - max(1, len(self._gone_once) / len(self._gone_often)))
            self._make_room(True)
            del self._gone_often[key]
            self._often[key] = None
        else:
            self._make_room(False)
            self._once[key] = None
            self._trim()
        return False

    def _make_room(self, from_often: bool) -> None:
        if len(self._once) + len(self._often) < self._places:
            return
        if self._once and (not self._often or len(self._once) > self._target or (from_often and len(self._once) == self._target)):
            self._gone_once[self._once.popitem(last=False)[0]] = None
        else:
            self._gone_often[self._often.popitem(last=False)[0]] = None

    def _trim(self) -> None:
        while len(self._once) + len(self._gone_once) > self._places and self._gone_once:
            self._gone_once.popitem(last=False)
        while len(self._gone_once) + len(self._gone_often) > self._places:
            (self._gone_often or self._gone_once).popitem(last=False)


class S3Fifo:
    """S3-FIFO (Yang 2023): newcomers pass a short queue first; those that come back soon after go straight to the long one."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._short_places = max(1, places // 10)
        self._short, self._long = deque[int](), deque[int]()
        self._uses: dict[int, int] = {}
        self._gone: OrderedDict[int, None] = OrderedDict()

    def ask(self, key: int) -> bool:
        if key in self._uses:
            self._uses[key] = min(3, self._uses[key] + 1)
            return True
        while len(self._uses) >= self._places:
            self._let_one_go()
        if key in self._gone:
            del self._gone[key]
            self._long.append(key)
        else:
            self._short.append(key)
        self._uses[key] = 0
        return False

    def _let_one_go(self) -> None:
        if self._short and (len(self._short) >= self._short_places or not self._long):
            key = self._short.popleft()
            if self._uses[key] > 0:
                self._uses[key] = 0
                self._long.append(key)
                return
            self._gone[key] = None
            if len(self._gone) > self._places:
                self._gone.popitem(last=False)
        else:
            key = self._long.popleft()
            if self._uses[key] > 0:
                self._uses[key] -= 1
                self._long.append(key)
                return
        del self._uses[key]


class Lrfu:
    """Production's: `Popularity` and `choose_least`. The half-life is in uses for each place."""

    def __init__(self, places: int, half_life_uses: float = HALF_LIFE_USES) -> None:
        self._places = places
        self._popularity: Popularity[AdapterRef] = Popularity(half_life_uses * places)
        self._slots: dict[AdapterRef, Slot] = {}
        self._clock = itertools.count()

    def ask(self, key: int) -> bool:
        ref = AdapterRef("base", f"a{key}", 1)
        self._popularity.use(ref)
        slot = self._slots.get(ref)
        if slot is not None:
            slot.last_used_s = next(self._clock)
            return True
        if len(self._slots) == self._places:
            victim = choose_least(self._slots.values(), self._popularity)
            assert victim is not None
            del self._slots[victim.ref]
        now = next(self._clock)
        self._slots[ref] = Slot(ref, 0, None, now, now)  # type: ignore[arg-type]
        return False


class Optimum:
    """Belady (1966): whoever is asked for again last goes. Knows the future, so nobody does better."""

    def __init__(self, places: int, trace: Trace) -> None:
        self._places = places
        self._next = _next_uses(trace)
        self._now = -1
        self._there: dict[int, int] = {}

    def ask(self, key: int) -> bool:
        self._now += 1
        hit = key in self._there
        if not hit and len(self._there) == self._places:
            del self._there[max(self._there, key=self._there.__getitem__)]
        self._there[key] = self._next[self._now]
        return hit


def _next_uses(trace: Trace) -> list[int]:
    nexts, seen = [0] * len(trace), {}
    for index in range(len(trace) - 1, -1, -1):
        nexts[index] = seen.get(trace[index], len(trace))
        seen[trace[index]] = index
    return nexts


CONTESTANTS: dict[str, Callable[[int, Trace], Contestant]] = {
    "LRU": lambda places, trace: Lru(places),
    "LFU": lambda places, trace: Lfu(places),
    "LRU-2": lambda places, trace: Lru2(places),
    "ARC": lambda places, trace: Arc(places),
    "S3-FIFO": lambda places, trace: S3Fifo(places),
    "LRFU": lambda places, trace: Lrfu(places),
    "optimum": Optimum,
}


def misses(contestant: Contestant, trace: Trace) -> float:
    """The share of the trace's requests that found their adapter not there."""
    return sum(not contestant.ask(key) for key in trace) / len(trace)
