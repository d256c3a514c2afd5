"""A run: requests through routers to made-up replicas, and what came of it."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from serve_app.simulation.clock import Clock
from serve_app.simulation.cluster import Replica, Request
from serve_app.simulation.disk import Loads
from serve_app.simulation.routers import Router

TURN_S = 0.05  # between two tries of a request that got no replica
REPORT_LAG_S = 1.5  # as in `serve_app.routing.router`


@dataclass(frozen=True, slots=True)
class Traffic:
    """The adapter and the length of the answer of each request. They come one `gaps_s` after another; or there are `clients`, who
    each ask again once it is answered, the first one alone until number `alone_until`. Requests before `counted_from` heat
    up and are not counted."""

    trace: Sequence[int]
    answers_s: Sequence[float]
    gaps_s: Sequence[float] = ()
    clients: int = 0
    alone_until: int = 0
    counted_from: int = 0


@dataclass(slots=True)
class Outcome:
    """What came of a run, over the requests that count, which were asked within `took_s`."""

    tiers: dict[str, int] = field(default_factory=lambda: {"engine": 0, "disk": 0, "remote": 0})
    loads: int = 0
    blocked: int = 0
    fetches: int = 0
    fetched_bytes: int = 0
    took_s: float = 0.0
    replicas: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)
    cold_waits_s: list[float] = field(default_factory=list)
    decisions_us: list[float] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    busiest: list[float] = field(default_factory=list)

    def count(self, before: Loads, after: Loads) -> None:
        self.loads, self.blocked = after.loads - before.loads, after.blocked - before.blocked
        self.fetches, self.fetched_bytes = after.fetches - before.fetches, after.fetched_bytes - before.fetched_bytes


class Run:
    """Traffic through routers to replicas. Several routers take turns; each has its own view."""

    def __init__(
        self, traffic: Traffic, routers: Sequence[Router], replicas: Mapping[str, Replica], clock: Clock, loads: Loads
    ) -> None:
        self._traffic, self._routers, self._replicas = traffic, routers, replicas
        self._clock, self._loads, self._outcome = clock, loads, Outcome()
        self._news = routers[0].news
        self._before = Loads()
        self._counted_since_s = 0.0
        self._asked = 0

    def go(self) -> Outcome:
        self._deliver({name: replica.report() for name, replica in self._replicas.items()})
        self._report()
        self._next_request()
        if not self._traffic.alone_until:
            self._others_begin()
        self._clock.run()
        self._outcome.count(self._before, self._loads)
        return self._outcome

    # -- requests ----------------------------------------------------------------------------------------------------

    def _next_request(self) -> None:
        number, traffic = self._asked, self._traffic
        if number == len(traffic.trace):
            return
        if number == traffic.counted_from:
            self._before, self._counted_since_s = replace(self._loads), self._clock.now_s
        self._asked += 1
        self._route(Request(number, traffic.trace[number], traffic.answers_s[number], self._ended, self._clock.now_s))
        self._outcome.took_s = self._clock.now_s - self._counted_since_s
        if not traffic.clients and self._asked < len(traffic.trace):
            self._clock.after(traffic.gaps_s[self._asked], self._next_request)

    def _route(self, request: Request) -> None:
        began = time.thread_time()
        chosen, added = self._router(request).choose(request, self._replicas, self._clock.now_s)
        if request.number >= self._traffic.counted_from:
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
        if request.number >= self._traffic.counted_from:
            self._outcome.tiers[request.tier] += 1
            self._outcome.replicas[request.replica] += 1
            self._waited(request, request.began_at_s - request.asked_at_s)
        if self._traffic.clients:
            self._clock.after(0.0, self._next_request)
            if request.number + 1 == self._traffic.alone_until:
                self._others_begin()

    def _waited(self, request: Request, wait_s: float) -> None:
        self._outcome.waits_s.append(wait_s)
        if request.tier != "engine":
            self._outcome.cold_waits_s.append(wait_s)

    def _others_begin(self) -> None:
        for _ in range(self._traffic.clients - 1):
            self._clock.after(0.0, self._next_request)

    # -- reports -----------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        reports = {name: replica.report() for name, replica in self._replicas.items()}
        self._clock.after(self._news.late_s, lambda: self._deliver(reports))
        if self._asked >= self._traffic.counted_from:
            running = [replica.running for replica in self._replicas.values()]
            self._outcome.busiest.append(max(running) / max(1.0, statistics.fmean(running)))
        if self._asked < len(self._traffic.trace):
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
