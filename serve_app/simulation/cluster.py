"""Made-up replicas on a made-up clock: slots give way by production's rules; fetch, load and answer just take time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from adapters.names import AdapterRef
from adapters.popularity import Popularity
from serve_app.routing.placement import Reported
from serve_app.simulation.clock import Clock
from serve_app.simulation.disk import Disk, Loads
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


@dataclass(eq=False, slots=True)
class _Pending:
    tier: str
    waiting: list[Request] = field(default_factory=list)
    on_ready: list[Callable[[], None]] = field(default_factory=list)


class Replica:
    """One engine with its slots. Others of its node may share the disk."""

    def __init__(
        self, name: str, rank: int, clock: Clock, slots: int, disk: Disk, load_s: Callable[[int], float], loads: Loads
    ) -> None:
        self.name = name
        self.rank = rank
        self.running = 0
        self._clock, self.capacity, self._disk = clock, slots, disk
        self._load_s, self._loads = load_s, loads
        self._popularity: Popularity[AdapterRef] = Popularity(HALF_LIFE_USES * slots)
        self._slots: dict[int, Slot] = {}
        self._pending: dict[int, _Pending] = {}
        self._queue: deque[int] = deque()
        self._used = 0
        self._report: Reported | None = None

    @property
    def resident(self) -> int:
        return len(self._slots)

    def restore(self, values: Mapping[int, float]) -> None:
        """What earlier traffic left: how popular adapters are here, and the most popular in their places."""
        self._popularity.restore({ref_of(adapter): value for adapter, value in values.items()})
        for adapter in heapq.nlargest(self.capacity, values, key=values.__getitem__):
            self._disk.lease(adapter, lambda: None)
            self._sit(adapter)
            self._used += 1

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
            self._report = Reported(self.rank, frozenset(engine), frozenset(loading), self.capacity)
        return self._report

    # -- a load ------------------------------------------------------------------------------------------------------

    def _load(self, adapter: int) -> _Pending:
        pending = self._pending.get(adapter)
        if pending is None:
            self._report = None
            pending = self._pending[adapter] = _Pending("disk" if self._disk.has(adapter) else "remote")
            self._disk.lease(adapter, lambda: self._there(adapter))
        return pending

    def _there(self, adapter: int) -> None:
        self._queue.append(adapter)
        self._place_next()
        self._loads.blocked += adapter in self._queue

    def _place_next(self) -> None:
        while self._queue and self._take_place():
            adapter = self._queue.popleft()
            self._clock.after(self._load_s(adapter), lambda adapter=adapter: self._ready(adapter))

    def _take_place(self) -> bool:
        if self._used < self.capacity:
            self._used += 1
            return True
        victim = choose_least((slot for slot in self._slots.values() if not slot.users), self._popularity)
        if victim is None:
            return False
        del self._slots[victim.int_id]
        self._disk.release(victim.int_id)
        self._report = None
        return True

    def _ready(self, adapter: int) -> None:
        self._loads.loads += 1
        self._report = None
        pending = self._pending.pop(adapter)
        slot = self._sit(adapter)
        for request in pending.waiting:
            self._begin(request, slot, pending.tier)
        for ready in pending.on_ready:
            ready()
        self._place_next()

    def _sit(self, adapter: int) -> Slot:
        now_s = self._clock.now_s
        slot = self._slots[adapter] = Slot(ref_of(adapter), adapter, None, now_s, now_s)  # type: ignore[arg-type]
        return slot

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
