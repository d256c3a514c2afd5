"""How many: a question about slots, replicas and disk, and what production's decisions make of each combination, as JSON.

Traffic is made up, or replayed where the question holds it. Before made-up traffic nothing is cold that traffic of the same kind
would have warmed: popularity, places and disks begin as they would be after a long time of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from adapters.cache.policy import HALF_LIFE_S, CacheEntry
from serve_app.routing.placement import ranks_of
from serve_app.settings import MOST_ROOM
from serve_app.simulation.clock import Clock
from serve_app.simulation.cluster import Replica, name_of
from serve_app.simulation.disk import Disk, Loads
from serve_app.simulation.routers import Affinity
from serve_app.simulation.run import Outcome, Run, Traffic
from serve_app.simulation.traces import drawn, shares
from serve_app.slots.places import HALF_LIFE_USES

MOST_ADAPTERS = 100_000
MOST_CASES = 500
NORMAL_P95 = statistics.NormalDist().inv_cdf(0.95)

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Value(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Hot(Value):
    """TTFT of adapters that are in the engine, in ms."""

    p50: Positive
    p95: Positive


class Question(Value):
    """Sizes in bytes, one for each adapter. Every combination of `slots` (of each replica), `replicas` and `disk_bytes` (of each
    node; null: all adapters fit) is a case.

    Traffic: `requests` are counted, at `rate_per_s`; the k-th busiest adapter gets a share of 1 / k ** `alpha`, or each adapter
    its `weights`. Or it is replayed: `trace` has the adapters by number, asked for by `clients` that each wait for their answer,
    after each adapter was asked for once in order. Answers take `answer_s` on average, exponentially spread, or exactly that
    where they are replayed.
    """

    sizes_bytes: Annotated[tuple[Count, ...], Field(min_length=1, max_length=MOST_ADAPTERS)]
    slots: Annotated[tuple[Count, ...], Field(min_length=1)]
    replicas: Annotated[tuple[Annotated[int, Field(ge=1, le=1000)], ...], Field(min_length=1)]
    disk_bytes: Annotated[tuple[Count | None, ...], Field(min_length=1)] = (None,)
    replicas_per_node: Count = 1
    room: Count = MOST_ROOM
    rate_per_s: Positive = 10.0
    alpha: Annotated[float, Field(ge=0, le=5)] = 1.0
    weights: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] | None = None
    answer_s: Positive = 2.0
    requests: Annotated[int, Field(ge=100, le=1_000_000)] = 20_000
    trace: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    clients: Annotated[int, Field(ge=1, le=10_000)] = 1
    fetch_s: Annotated[float, Field(ge=0)] = 0.0
    fetch_bytes_per_s: Positive = 500e6
    load_s: Annotated[float, Field(ge=0)] = 0.0
    load_bytes_per_s: Positive = 700e6
    hot_ttft_ms: Hot | None = None
    seed: int = 1

    @model_validator(mode="after")
    def _fits(self) -> Question:
        adapters, cases = len(self.sizes_bytes), len(self.slots) * len(self.replicas) * len(self.disk_bytes)
        if cases > MOST_CASES:
            raise ValueError(f"{cases} combinations of slots, replicas and disks; {MOST_CASES} at most")
        if self.weights is not None and (len(self.weights) != adapters or not sum(self.weights)):
            raise ValueError(f"{len(self.weights)} weights for {adapters} adapters: one for each, and not all 0")
        if self.trace is not None and max(self.trace, default=0) >= adapters:
            raise ValueError(f"the trace asks for adapter number {max(self.trace)}; there are {adapters}, from number 0")
        if self.hot_ttft_ms is not None and self.hot_ttft_ms.p95 < self.hot_ttft_ms.p50:
            raise ValueError(f"hot_ttft_ms: p95 ({self.hot_ttft_ms.p95:g}) is under p50 ({self.hot_ttft_ms.p50:g})")
        self._check_disks()
        return self

    def _check_disks(self) -> None:
        """Registered adapters keep their files, so a disk holds them and one that comes, or loads fail."""
        held = max(self.slots) * min(self.replicas_per_node, max(self.replicas)) + 1
        least_bytes = sum(sorted(self.sizes_bytes, reverse=True)[:held])
        for disk_bytes in self.disk_bytes:
            if disk_bytes is not None and disk_bytes < least_bytes:
                raise ValueError(
                    f"disk_bytes {disk_bytes}: adapters in {max(self.slots)} slots keep {least_bytes} bytes on their node's disk"
                )


class Shares(Value):
    """Where requests found their adapters; 1.0 in all."""

    engine: float
    disk: float
    remote: float


class Quantiles(Value):
    p50: float
    p95: float
    p99: float


class Case(Value):
    """What to expect. `cold_share`: requests that found their adapter elsewhere than in the engine, also those that joined a load
    under way; `hit_rate`: the share that began no load. `blocked_share`: of loads, those that found all places in use by running
    answers; where it is much, waits are longer than production's, which closes places to new answers then. `busiest_share`: of
    requests, those that went to the busiest replica. `ttft_ms` where the hot TTFT is given."""

    slots: int
    replicas: int
    disk_bytes: int | None
    tiers: Shares
    cold_share: float
    hit_rate: float
    loads_per_s: float
    fetches_per_s: float
    fetched_bytes_per_s: float
    blocked_share: float
    replica_shares: tuple[float, ...]
    busiest_share: float
    wait_s: Quantiles
    cold_wait_s: Quantiles | None
    ttft_ms: Quantiles | None


class Expected(Value):
    schema_version: int = 1
    requests: int
    cases: tuple[Case, ...]


def expect(question: Question) -> Expected:
    """Seconds: some 30 microseconds of one core for each request of each case, and more with many replicas."""
    cases = tuple(
        _case(question, slots, replicas, disk_bytes)
        for replicas in question.replicas
        for slots in question.slots
        for disk_bytes in question.disk_bytes
    )
    return Expected(requests=question.requests if question.trace is None else len(question.trace), cases=cases)


def table(expected: Expected) -> Iterator[str]:
    """A row for each case, in Markdown."""
    yield "| replicas | slots | disk of a node | tier `engine` / `disk` / `remote` | loads/s | fetched/s | wait, p95 |"
    yield "|" + " --- |" * 7
    for case in expected.cases:
        tiers = " / ".join(f"{100 * share:.1f} %" for share in (case.tiers.engine, case.tiers.disk, case.tiers.remote))
        disk = "all" if case.disk_bytes is None else f"{case.disk_bytes / 2**30:.1f} GiB"
        yield (
            f"| {case.replicas} | {case.slots} | {disk} | {tiers} | {case.loads_per_s:.2f}"
            f" | {case.fetched_bytes_per_s / 1e6:.1f} MB | {case.wait_s.p95:.2f} s |"
        )


# -- one case ----------------------------------------------------------------------------------------------------------


def _case(question: Question, slots: int, replicas: int, disk_bytes: int | None) -> Case:
    clock, loads = Clock(), Loads()
    sizes = question.sizes_bytes
    disks = [
        Disk(
            sum(sizes) if disk_bytes is None else disk_bytes,
            sizes.__getitem__,
            lambda adapter: question.fetch_s + sizes[adapter] / question.fetch_bytes_per_s,
            clock,
            loads,
        )
        for _ in range(math.ceil(replicas / question.replicas_per_node))
    ]
    made = [
        Replica(
            f"r{rank}",
            rank,
            clock,
            slots,
            disks[rank // question.replicas_per_node],
            lambda adapter: question.load_s + sizes[adapter] / question.load_bytes_per_s,
            loads,
        )
        for rank in range(replicas)
    ]
    if question.trace is None:
        traffic = _made_up(question, slots * replicas)
        _warm(question, made, disks)
    else:
        traffic = _replayed(question, question.trace)
    outcome = Run(traffic, [Affinity(question.room)], {one.name: one for one in made}, clock, loads).go()
    return _told(question, slots, replicas, disk_bytes, outcome)


def _popularity(question: Question) -> np.ndarray:
    """Each adapter's share of the requests. Which adapter is the k-th busiest is drawn: sizes say nothing of it."""
    if question.weights is not None:
        return np.asarray(question.weights) / sum(question.weights)
    count = len(question.sizes_bytes)
    return shares(count, question.alpha)[np.random.default_rng(question.seed).permutation(count)]


def _made_up(question: Question, places: int) -> Traffic:
    """Heats up for as many requests as popularity's half-life, or a quarter of those that count."""
    heat_up = max(question.requests // 4, min(HALF_LIFE_USES * places, question.requests))
    requests = question.requests + heat_up
    rng = np.random.default_rng(question.seed + 1)
    popularity = _popularity(question)
    return Traffic(
        drawn(rng, popularity, requests, np.arange(len(popularity))),
        rng.exponential(question.answer_s, requests).tolist(),
        rng.exponential(1 / question.rate_per_s, requests).tolist(),
        counted_from=heat_up,
    )


def _replayed(question: Question, trace: Sequence[int]) -> Traffic:
    """One client asks for each adapter once before; that is not counted."""
    warming = list(range(len(question.sizes_bytes)))
    return Traffic(
        warming + list(trace),
        [question.answer_s] * (len(warming) + len(trace)),
        clients=question.clients,
        counted_from=len(warming),
        alone_until=len(warming),
    )


def _warm(question: Question, replicas: Sequence[Replica], disks: Sequence[Disk]) -> None:
    """Uses of an adapter that is asked for at random are a shot noise: after a long time their decayed number is close to a gamma
    variable of the same mean, half of which is its variance; the last use was an exponential time ago."""
    rng = np.random.default_rng(question.seed + 2)
    popularity = _popularity(question)
    owners = [ranks_of(name_of(adapter), range(len(replicas)))[0] for adapter in range(len(popularity))]
    on_disk = _decayed(rng, popularity * question.rate_per_s * HALF_LIFE_S / math.log(2))
    ago_s = rng.exponential(1 / np.maximum(popularity * question.rate_per_s, 1e-12))
    for node, disk in enumerate(disks):
        mine = (one for one, rank in enumerate(owners) if rank // question.replicas_per_node == node and popularity[one])
        disk.restore(CacheEntry(str(one), question.sizes_bytes[one], -ago_s[one], 1 + on_disk[one]) for one in mine)
    for replica in replicas:
        own = np.asarray([rank == replica.rank for rank in owners]) * popularity
        if own.sum():
            uses = _decayed(rng, own / own.sum() * HALF_LIFE_USES * replica.capacity / math.log(2))
            replica.restore({int(one): float(uses[one]) for one in np.flatnonzero(uses)})


def _decayed(rng: np.random.Generator, means: np.ndarray) -> np.ndarray:
    return rng.gamma(2 * means, 0.5)


# -- telling -----------------------------------------------------------------------------------------------------------


def _told(question: Question, slots: int, replicas: int, disk_bytes: int | None, outcome: Outcome) -> Case:
    count = sum(outcome.tiers.values())
    tiers = Shares(**{tier: number / count for tier, number in outcome.tiers.items()})
    parts = sorted((outcome.replicas[f"r{rank}"] / count for rank in range(replicas)), reverse=True)
    per_s: Callable[[float], float] = lambda number: number / outcome.took_s if outcome.took_s else 0.0  # noqa: E731
    return Case(
        slots=slots,
        replicas=replicas,
        disk_bytes=disk_bytes,
        tiers=tiers,
        cold_share=tiers.disk + tiers.remote,
        hit_rate=1 - outcome.loads / count,
        loads_per_s=per_s(outcome.loads),
        fetches_per_s=per_s(outcome.fetches),
        fetched_bytes_per_s=per_s(outcome.fetched_bytes),
        blocked_share=outcome.blocked / outcome.loads if outcome.loads else 0.0,
        replica_shares=tuple(parts),
        busiest_share=parts[0],
        wait_s=_quantiles(outcome.waits_s),
        cold_wait_s=_quantiles(outcome.cold_waits_s) if outcome.cold_waits_s else None,
        ttft_ms=_ttft(question, outcome),
    )


def _ttft(question: Question, outcome: Outcome) -> Quantiles | None:
    """Each request's wait and a hot TTFT, drawn from the lognormal of the two that are given."""
    hot = question.hot_ttft_ms
    if hot is None:
        return None
    rng = np.random.default_rng(question.seed + 3)
    spread = math.log(hot.p95 / hot.p50) / NORMAL_P95
    drawn_ms = rng.lognormal(math.log(hot.p50), spread, len(outcome.waits_s))
    return _quantiles(1e3 * np.asarray(outcome.waits_s) + drawn_ms)


def _quantiles(values: Sequence[float] | np.ndarray) -> Quantiles:
    return Quantiles(**dict(zip(("p50", "p95", "p99"), map(float, np.quantile(values, (0.5, 0.95, 0.99))), strict=True)))


def faults(errors: Sequence[dict]) -> Iterator[str]:
    """Pydantic's errors as lines: where, what, and the value."""
    for error in errors:
        where = ".".join(map(str, error["loc"]))
        value = error["input"] if isinstance(error["input"], int | float | str) else ""
        yield f"{where}: {error['msg']}{f' (is {value})' if where and value != '' else ''}"
