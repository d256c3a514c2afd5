"""Where requests go: production's router beside Ray's multiplexing, on the same traces and the same made-up replicas."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from serve_app.settings import MOST_ROOM
from serve_app.simulation.cluster import Clock, Loads, Replica, Request, Size, Times
from serve_app.simulation.routers import Affinity, Multiplex, Router
from serve_app.simulation.traces import zipf

TURN_S = 0.05  # between two tries of a request that got no replica
REPORT_LAG_S = 1.5  # as in `serve_app.routing.router`
SEED = 1
HEAT_UP = 0.4  # the share of a trace that is not counted: at first everything is cold

COLUMNS = (
    "replicas / adapters",
    "trace",
    "router",
    "tier `engine`",
    "loads for 100 requests",
    "fetched for 100 requests",
    "wait for the adapter, p50 / p99",
    "copies, mean / most",
    "busiest replica over the mean",
    "a decision, mean / p99",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """A run: so many replicas and adapters, so many requests of Zipf, `busy` of them at once on each replica on average. Gateways
    take turns; each has a router of its own, which knows of the others' requests what replicas say."""

    replicas: int
    adapters: int
    requests: int
    exponent: float
    busy: float = 12.0
    gateways: int = 1


@dataclass(slots=True)
class Outcome:
    """What came of a run, over the requests that count."""

    tiers: dict[str, int] = field(default_factory=lambda: {"engine": 0, "disk": 0, "remote": 0})
    loads: int = 0
    fetches: int = 0
    waits_s: list[float] = field(default_factory=list)
    decisions_us: list[float] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    busiest: list[float] = field(default_factory=list)


class Run:
    """One plan with one router."""

    def __init__(self, plan: Plan, make_router: Callable[[], Router], size: Size, times: Times) -> None:
        self._plan, self._times = plan, times
        self._routers = [make_router() for _ in range(plan.gateways)]
        self._news = self._routers[0].news
        self._clock, self._loads, self._outcome = Clock(), Loads(), Outcome()
        self._size = size
        self._replicas = {
            f"r{rank}": Replica(f"r{rank}", rank, self._clock, size, times, self._loads) for rank in range(plan.replicas)
        }
        self._trace = zipf(plan.adapters, plan.requests, plan.exponent, SEED)
        rng = np.random.default_rng(SEED + 1)
        self._answers_s = rng.exponential(times.answer_s, plan.requests).tolist()
        self._gaps_s = rng.exponential(times.answer_s / (plan.busy * plan.replicas), plan.requests).tolist()
        self._counted_from = int(plan.requests * HEAT_UP)
        self._asked = 0

    def go(self) -> Outcome:
        self._deliver({name: replica.report() for name, replica in self._replicas.items()})
        self._report()
        self._next_request()
        self._clock.run()
        self._outcome.loads = self._loads.loads - self._outcome.loads
        self._outcome.fetches = self._loads.fetches - self._outcome.fetches
        return self._outcome

    # -- requests ----------------------------------------------------------------------------------------------------

    def _next_request(self) -> None:
        number = self._asked
        if number == self._counted_from:
            self._outcome.loads, self._outcome.fetches = self._loads.loads, self._loads.fetches
        self._asked += 1
        request = Request(number, self._trace[number], self._answers_s[number], self._ended, self._clock.now_s)
        self._route(request)
        if self._asked < self._plan.requests:
            self._clock.after(self._gaps_s[self._asked], self._next_request)

    def _route(self, request: Request) -> None:
        began = time.thread_time()
        chosen, added = self._router(request).choose(request, self._replicas, self._clock.now_s)
        if request.number >= self._counted_from:
            self._outcome.decisions_us.append((time.thread_time() - began) * 1e6)
        if chosen is None:
            self._clock.after(TURN_S, lambda: self._route(request))
            return
        request.replica = chosen
        self._replicas[chosen].ask(request)
        if added is not None:
            self._add(request, added)

    def _router(self, request: Request) -> Router:
        return self._routers[request.number % len(self._routers)]

    def _add(self, request: Request, replica: str) -> None:
        flight = f"add {request.number}"
        router = self._router(request)
        router.adding(flight, request.adapter, replica)
        self._replicas[replica].warm(request.adapter, lambda: self._clock.after(REPORT_LAG_S, lambda: router.added(flight)))

    def _ended(self, request: Request) -> None:
        self._router(request).ended(request)
        if request.number >= self._counted_from:
            self._outcome.tiers[request.tier] += 1
            self._outcome.waits_s.append(request.began_at_s - request.asked_at_s)

    # -- reports -----------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        reports = {name: replica.report() for name, replica in self._replicas.items()}
        self._clock.after(self._news.late_s, lambda: self._deliver(reports))
        if self._asked >= self._counted_from:
            running = [replica.running for replica in self._replicas.values()]
            self._outcome.busiest.append(max(running) / max(1.0, statistics.fmean(running)))
        if self._asked < self._plan.requests:
            self._clock.after(self._news.every_s, self._report)
        else:
            self._count_copies(reports)

    def _deliver(self, reports) -> None:
        for router in self._routers:
            router.update(reports)

    def _count_copies(self, reports) -> None:
        copies: dict[str, int] = {}
        for report in reports.values():
            for ref in report.engine:
                copies[ref] = copies.get(ref, 0) + 1
        self._outcome.copies = sorted(copies.values(), reverse=True)


def table(requests: int, sizes: tuple[int, ...], exponents: tuple[float, ...], gateways: int) -> Iterator[str]:
    """A row for each router and size, in Markdown."""
    size, times = Size(), Times()
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|" + " --- |" * len(COLUMNS)
    for replicas in sizes:
        for exponent in exponents:
            plan = Plan(replicas, 100 * replicas, max(requests, 400 * replicas), exponent, gateways=gateways)
            for name, make in (("ours", lambda: Affinity(MOST_ROOM)), ("Ray multiplex", lambda: Multiplex(SEED))):
                yield _row(plan, name, Run(plan, make, size, times).go(), size)


def _row(plan: Plan, name: str, outcome: Outcome, size: Size) -> str:
    counted = sum(outcome.tiers.values())
    fetched_gb = 100 * outcome.fetches / counted * size.adapter_bytes / 1e9
    cells = (
        f"{plan.replicas:,} / {plan.adapters:,}",
        f"Zipf {plan.exponent}",
        name,
        f"{100 * outcome.tiers['engine'] / counted:.1f} %",
        f"{100 * outcome.loads / counted:.1f}",
        f"{fetched_gb:.1f} GB",
        f"{_quantile(outcome.waits_s, 0.5):.2f} / {_quantile(outcome.waits_s, 0.99):.2f} s",
        f"{statistics.fmean(outcome.copies):.2f} / {outcome.copies[0]}",
        f"{statistics.fmean(outcome.busiest):.2f}",
        f"{statistics.fmean(outcome.decisions_us):.0f} / {_quantile(outcome.decisions_us, 0.99):.0f} us",
    )
    return f"| {' | '.join(cells)} |"


def _quantile(values: list[float], share: float) -> float:
    return float(np.quantile(values, share))
