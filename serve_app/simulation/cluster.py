"""Made-up replicas on a made-up clock: slots and disks give way by production's rules; fetch, load and answer just take time."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from adapters.cache.policy import CacheEntry, choose_victims, used_again
from adapters.names import AdapterRef
from adapters.popularity import Popularity
from serve_app.routing.placement import Reported
from serve_app.slots.places import HALF_LIFE_USES, Slot, choose_least


@dataclass(frozen=True, slots=True)
class Times:
    """What the real things take; answers are exponential around their mean."""

    fetch_s: float = 0.35
    load_s: float = 0.25
    answer_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Size:
    """A replica's places, its disk in adapters, all of one size, and the bytes of an adapter."""

    slots: int = 32
    disk: int = 290
    adapter_bytes: int = 175_000_000


class Clock:
    """Events in the order of their times, those of one time in the order of their making."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), event))

    def run(self) -> None:
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()


@dataclass(eq=False, slots=True)
class Request:
    """One request. `tier` is where it found its adapter, `replica` where it went."""

    number: int
    adapter: int
    answer_s: float
    ended: Callable[[Request], None]
    asked_at_s: float = 0.0
    began_at_s: float = 0.0
    tier: str = ""
    replica: str = ""


@dataclass(slots=True)
class Loads:
    """What was loaded and fetched anywhere."""

    loads: int = 0
    fetches: int = 0


@dataclass(eq=False, slots=True)
class _Pending:
    tier: str
    waiting: list[Request] = field(default_factory=list)
    on_ready: list[Callable[[], None]] = field(default_factory=list)


class Replica:
    """One engine with its slots, and a disk of its own."""

    def __init__(self, name: str, rank: int, clock: Clock, size: Size, times: Times, loads: Loads) -> None:
        self.name = name
        self.rank = rank
        self.running = 0
        self._clock, self._size, self._times, self._loads = clock, size, times, loads
        self._popularity: Popularity[AdapterRef] = Popularity(HALF_LIFE_USES * size.slots)
        self._slots: dict[int, Slot] = {}
        self._pending: dict[int, _Pending] = {}
        self._queue: deque[int] = deque()
        self._used = 0
        self._disk: dict[int, CacheEntry] = {}
        self._report: Reported | None = None

    @property
    def resident(self) -> int:
        return len(self._slots)

    def ask(self, request: Request) -> None:
        self.running += 1
        self._popularity.use(ref_of(request.adapter))
        slot = self._slots.get(request.adapter)
        if slot is not None:
            self._begin(request, slot, "engine")
            return
        self._load(request.adapter).waiting.append(request)

    def warm(self, adapter: int, on_ready: Callable[[], None]) -> None:
        if adapter in self._slots:
            on_ready()
            return
        self._popularity.use(ref_of(adapter))
        self._load(adapter).on_ready.append(on_ready)

    def report(self) -> Reported:
        if self._report is None:
            engine, loading = map(name_of, self._slots), map(name_of, self._pending)
            self._report = Reported(self.rank, frozenset(engine), frozenset(loading), self._size.slots)
        return self._report

    # -- a load ------------------------------------------------------------------------------------------------------

    def _load(self, adapter: int) -> _Pending:
        pending = self._pending.get(adapter)
        if pending is None:
            self._report = None
            entry = self._disk.pop(adapter, None)
            pending = self._pending[adapter] = _Pending("remote" if entry is None else "disk")
            self._clock.after(self._times.fetch_s if entry is None else 0.0, lambda: self._fetched(adapter, entry))
        return pending

    def _fetched(self, adapter: int, entry: CacheEntry | None) -> None:
        now_s = self._clock.now_s
        if entry is None:
            self._loads.fetches += 1
            entry = CacheEntry(str(adapter), self._size.adapter_bytes, now_s, 0.0)
            over = len(self._disk) + 1 - self._size.disk
            leased = self._slots.keys() | self._pending.keys()
            spare = (one for key, one in self._disk.items() if key not in leased)
            for digest in choose_victims(spare, over * self._size.adapter_bytes) if over > 0 else ():
                del self._disk[int(digest)]
        self._disk[adapter] = CacheEntry(entry.digest, entry.size_bytes, now_s, used_again(entry.uses, entry.last_used, now_s))
        self._queue.append(adapter)
        self._place_next()

    def _place_next(self) -> None:
        while self._queue and self._take_place():
            adapter = self._queue.popleft()
            self._clock.after(self._times.load_s, lambda adapter=adapter: self._ready(adapter))

    def _take_place(self) -> bool:
        if self._used < self._size.slots:
            self._used += 1
            return True
        victim = choose_least((slot for slot in self._slots.values() if not slot.users), self._popularity)
        if victim is None:
            return False
        del self._slots[victim.int_id]
        self._report = None
        return True

    def _ready(self, adapter: int) -> None:
        self._loads.loads += 1
        self._report = None
        pending = self._pending.pop(adapter)
        slot = self._slots[adapter] = Slot(ref_of(adapter), adapter, None, self._clock.now_s, self._clock.now_s)  # type: ignore[arg-type]
        for request in pending.waiting:
            self._begin(request, slot, pending.tier)
        for ready in pending.on_ready:
            ready()
        self._place_next()

    def _begin(self, request: Request, slot: Slot, tier: str) -> None:
        slot.users += 1
        slot.last_used_s = request.began_at_s = self._clock.now_s
        request.tier = tier
        self._clock.after(request.answer_s, lambda: self._end(request, slot))

    def _end(self, request: Request, slot: Slot) -> None:
        self.running -= 1
        slot.users -= 1
        if not slot.users:
            self._place_next()
        request.ended(request)


@cache
def ref_of(adapter: int) -> AdapterRef:
    return AdapterRef("base", f"a{adapter}", 1)


@cache
def name_of(adapter: int) -> str:
    return str(ref_of(adapter))
