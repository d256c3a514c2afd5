"""Which replica answers a request: what a router knows, and the choice made from it. No I/O, no clock, nothing of Ray.

Load is counted in requests at once. A replica is full from `room` of them on; a difference of up to `lean`, a quarter of that,
between two replicas that hold a ref is let be. The gap between the two numbers is the hysteresis: a ref gets one more owner when
all that hold it are full, and the last one is left alone, and ages out, when the ref's demand has shrunk to `lean`.

Several routers agree without talking, since each orders the replicas of a ref by the same hash of ref and rank.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from adapters.types import Directive

SAMPLE = 8  # replicas looked at for a request that any could answer: enough to balance, at the same cost for a thousand
REPORTS = 2  # a load that was begun is in one of the next reports, or failed
OUT_OF_REACH = math.inf
MASK = 2**64 - 1

Load = Callable[[str], float]
"""A replica's requests at once, this router's and others'; OUT_OF_REACH for one that does not answer."""


@dataclass(frozen=True, slots=True)
class Reported:
    """What a replica said of itself: its rank (None: not yet), the refs in its engine, those on their way into it, and how many
    it has places for (None: not said)."""

    rank: int | None = None
    engine: frozenset[str] = frozenset()
    loading: frozenset[str] = frozenset()
    slots: int | None = None

    @classmethod
    def of(cls, stats: Mapping[str, Any] | None) -> Reported:
        """From routing stats; whatever is missing counts as nothing."""
        stats = stats or {}
        engine, loading = frozenset(stats.get("engine") or ()), frozenset(stats.get("loading") or ())
        return cls(stats.get("rank"), engine, loading, stats.get("slots"))

    def shows(self, ref: str) -> bool:
        return ref in self.engine or ref in self.loading


@dataclass(frozen=True, slots=True)
class Flight:
    """A request that was given to a replica and has not ended. `ref` is None for the base's own."""

    ref: str | None
    replica: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes, and the replica that the ref is to come to beside it, as one more owner."""

    replica: str
    add: str | None = None


def ranks_of(ref: str, ranks: Iterable[int]) -> list[int]:
    """The ranks in the order in which they own the ref (rendezvous hashing): without one of them, the others keep theirs."""
    seed = _seed(ref)
    return sorted(ranks, key=lambda rank: (_weight(seed, _seed_of_rank(rank)), rank), reverse=True)


def assigned(directive: Directive, ref: str, rank: int, world_size: int) -> bool:
    """Whether the replica of this rank is one of the directive's, of `world_size` replicas: the ref's first owners are.

    Where there are more replicas than that, as far as this one knows, at least as many as the directive asks for find that they
    are meant.
    """
    if directive.replicas is None:
        return True
    ranks = range(max(world_size, rank + 1))
    return rank in ranks_of(ref, ranks)[: directive.replicas]


class Placement:
    """One router's view of one base's replicas: what they reported, and this router's own flights. Not thread-safe.

    `room` is the number of requests at once from which a replica counts as full.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.lean = room // 4
        self._replicas: dict[str, Reported] = {}
        self._ids: list[str] = []
        self._owners: dict[str, tuple[bool, int]] = {}  # whether its rank is known, and the seed that it owns refs by
        self._holders: dict[str, set[str]] = {}
        self._loaders: dict[str, set[str]] = {}
        self._flights: dict[str, Flight] = {}
        self._flying: dict[str, Counter[str]] = {}  # by ref, then by replica
        self._own: Counter[str] = Counter()  # by replica
        self._brought: dict[str, dict[str, int]] = {}  # by replica: refs sent there to be loaded, and how many reports ago
        self._turn = 0

    # -- what is known -----------------------------------------------------------------------------------------------

    def update(self, reports: Mapping[str, Reported]) -> None:
        """These are the live replicas now, and their last reports."""
        for replica in self._replicas.keys() - reports.keys():
            self.forget(replica)
        for replica, report in reports.items():
            before = self._replicas.get(replica)
            if before != report:
                self._index(replica, before or Reported(), report)
                self._replicas[replica] = report
                self._brought[replica] = {
                    ref: age + 1
                    for ref, age in self._brought.get(replica, {}).items()
                    if age + 1 < REPORTS and not report.shows(ref)
                }
                rank = report.rank
                self._owners[replica] = (False, _seed(replica)) if rank is None else (True, _seed_of_rank(rank))
        self._ids = list(self._replicas)

    def forget(self, replica: str) -> None:
        """The replica is gone."""
        before = self._replicas.pop(replica, None)
        if before is not None:
            self._index(replica, before, Reported())
            del self._owners[replica], self._brought[replica]
            self._ids = list(self._replicas)

    def holders(self, ref: str) -> set[str]:
        """The replicas that reported the ref in their engines."""
        return set(self._holders.get(ref, ()))

    def begin(self, request_id: str, ref: str | None, replica: str) -> None:
        """A request is given to a replica; given anew, it leaves the one before."""
        self.end(request_id)
        self._flights[request_id] = Flight(ref, replica)
        self._own[replica] += 1
        if ref is not None:
            self._flying.setdefault(ref, Counter())[replica] += 1

    def end(self, request_id: str, replica: str | None = None) -> None:
        """The request ended at `replica` (None: wherever it is), or is given to nobody after all. Harmless where it isn't."""
        flight = self._flights.get(request_id)
        if flight is None or replica not in (None, flight.replica):
            return
        del self._flights[request_id]
        _take(self._own, flight.replica)
        if flight.ref is not None:
            flying = self._flying[flight.ref]
            _take(flying, flight.replica)
            if not flying:
                del self._flying[flight.ref]

    @property
    def flights(self) -> Mapping[str, Flight]:
        """This router's requests that have not ended, by id."""
        return self._flights

    def own(self, replica: str) -> int:
        """How many of this router's requests are there, or on their way."""
        return self._own[replica]

    # -- the choice --------------------------------------------------------------------------------------------------

    def choose(self, ref: str | None, load: Load) -> Choice:
        """The replica for a request. Raises LookupError without replicas.

        A holder with room; without holders the ref's first owner with room and a free place, else with room, and whoever comes
        while it is loaded there follows, room or not; else the least loaded. Full holders keep the request, and the ref's next
        owner with room to spare is added.
        """
        if not self._replicas:
            raise LookupError("no replicas")
        loads = _Loads(load)
        if ref is None:
            return Choice(self._least(self._sample(), loads))
        holders = self._in_reach(self._holders.get(ref, ()), loads)
        coming = self._in_reach(self._coming(ref).difference(holders), loads)
        if not holders:
            return Choice(self._first_load(ref, coming, loads))
        leaning = self._leaning(ref, holders, loads)
        if leaning is not None:
            return Choice(leaning)
        return Choice(self._least(holders, loads), add=None if coming else self._added(ref, holders, loads))

    def owners(self, ref: str) -> list[str]:
        """All replicas in the order in which they own the ref. One that has not told its rank comes after those that have."""
        return sorted(self._ids, key=self._standing(ref), reverse=True)

    def _first_load(self, ref: str, coming: list[str], loads: _Loads) -> str:
        if coming:
            return self._first_owner(ref, coming)
        roomy = [replica for replica in self._ids if loads[replica] < self.room]
        if not roomy:
            return self._least(self._ids, loads)
        return self._bring(ref, roomy)

    def _leaning(self, ref: str, holders: list[str], loads: _Loads) -> str | None:
        """The first owner among the holders with room, unless another is clearly less busy."""
        roomy = [replica for replica in holders if loads[replica] < self.room]
        if not roomy:
            return None
        most = min(loads[replica] for replica in roomy) + self.lean
        return self._first_owner(ref, [replica for replica in roomy if loads[replica] <= most])

    def _added(self, ref: str, holders: list[str], loads: _Loads) -> str | None:
        spare = [one for one in self._ids if one not in holders and loads[one] + self.lean < self.room]
        return self._bring(ref, spare) if spare else None

    def _bring(self, ref: str, replicas: list[str]) -> str:
        """The ref's first owner among them that has a free place, else its first owner, which gives up another ref for it."""
        replica = self._first_owner(ref, [one for one in replicas if self._has_place(one)] or replicas)
        self._brought[replica][ref] = 0
        return replica

    def _has_place(self, replica: str) -> bool:
        report = self._replicas[replica]
        if report.slots is None:
            return True
        taken = len(report.engine | report.loading) + len(self._brought[replica])
        return taken < report.slots

    def _least(self, replicas: Iterable[str], loads: _Loads) -> str:
        return min(replicas, key=lambda replica: loads[replica])

    def _sample(self) -> list[str]:
        """Some replicas, others each time, so that equals share."""
        count = len(self._ids)
        step = max(1, count // SAMPLE)
        self._turn = (self._turn + 1) % count
        return [self._ids[(self._turn + step * index) % count] for index in range(min(SAMPLE, count))]

    def _coming(self, ref: str) -> set[str]:
        """Where the ref is on its way, as the replicas say and as this router's own requests make it."""
        return self._loaders.get(ref, set()) | self._flying.get(ref, Counter()).keys()

    def _in_reach(self, replicas: Iterable[str], loads: _Loads) -> list[str]:
        return [replica for replica in replicas if replica in self._replicas and loads[replica] < OUT_OF_REACH]

    def _first_owner(self, ref: str, replicas: Iterable[str]) -> str:
        return max(replicas, key=self._standing(ref))

    def _standing(self, ref: str) -> Callable[[str], tuple[bool, int, str]]:
        seed, owners = _seed(ref), self._owners

        def standing(replica: str) -> tuple[bool, int, str]:
            has_rank, owner = owners[replica]
            return has_rank, _weight(seed, owner), replica

        return standing

    def _index(self, replica: str, before: Reported, now: Reported) -> None:
        _move(self._holders, replica, before.engine, now.engine)
        _move(self._loaders, replica, before.loading, now.loading)


class _Loads(dict[str, float]):
    """Loads within one choice: each replica's is asked for once."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self._load = load

    def __missing__(self, replica: str) -> float:
        self[replica] = load = self._load(replica)
        return load


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


@functools.cache
def _seed_of_rank(rank: int) -> int:
    return _seed(f"rank {rank}")


def _weight(ref_seed: int, owner_seed: int) -> int:
    """Two seeds mixed into 64 bits of which each depends on all: a thousand of these a choice, so no digest of its own."""
    mixed = (ref_seed ^ owner_seed) * 0x9E3779B97F4A7C15 & MASK
    mixed = (mixed ^ mixed >> 32) * 0xBF58476D1CE4E5B9 & MASK
    return mixed ^ mixed >> 29


def _take(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    if counts[key] <= 0:
        del counts[key]


def _move(index: dict[str, set[str]], replica: str, before: frozenset[str], now: frozenset[str]) -> None:
    for ref in now - before:
        index.setdefault(ref, set()).add(replica)
    for ref in before - now:
        index[ref].discard(replica)
        if not index[ref]:
            del index[ref]
