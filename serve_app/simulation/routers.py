"""Two ways to choose a replica: production's `Placement`, and the rule of Ray Serve's multiplexing, told again."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from serve_app.routing.placement import Placement, Reported
from serve_app.simulation.cluster import Replica, Request, name_of

MOST_RUNNING = 256  # `bases[].max_ongoing_requests`
PATIENCE_S = 1.0  # Ray's router looks so long for a replica that holds the model, or up to twice that


@dataclass(frozen=True, slots=True)
class News:
    """How often replicas report, and how long a report is on its way."""

    every_s: float
    late_s: float


class Router(Protocol):
    """Chooses from what it was told last. `choose` gives the replica, or None to be asked again in a moment, and the replica
    that should load the adapter too."""

    news: News

    def update(self, reports: Mapping[str, Reported]) -> None: ...

    def choose(self, request: Request, replicas: Mapping[str, Replica], now_s: float) -> tuple[str | None, str | None]: ...

    def ended(self, request: Request) -> None: ...

    def adding(self, flight: str, adapter: int, replica: str) -> None: ...

    def added(self, flight: str) -> None: ...


class Affinity:
    """Production's own."""

    news = News(every_s=0.5, late_s=0.2)

    def __init__(self, room: int) -> None:
        self._placement = Placement(room)

    def update(self, reports: Mapping[str, Reported]) -> None:
        self._placement.update(reports)

    def choose(self, request: Request, replicas: Mapping[str, Replica], now_s: float) -> tuple[str | None, str | None]:
        ref, flight = name_of(request.adapter), str(request.number)
        choice = self._placement.choose(ref, lambda name: replicas[name].running)
        self._placement.begin(flight, ref, choice.replica)
        return choice.replica, choice.add

    def ended(self, request: Request) -> None:
        self._placement.end(str(request.number))

    def adding(self, flight: str, adapter: int, replica: str) -> None:
        self._placement.begin(flight, name_of(adapter), replica)

    def added(self, flight: str) -> None:
        self._placement.end(flight)


class Multiplex:
    """Ray Serve 2.60: the less busy of two replicas that hold the model, else of two of those with the fewest models. While
    nobody is known to hold it, the first request goes to the fewest, and others look for a holder for a second or two. What is
    being loaded counts as held."""

    news = News(every_s=0.1, late_s=0.1)

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._reports: dict[str, Reported] = {}
        self._models: dict[str, frozenset[str]] = {}
        self._holders: dict[str, set[str]] = {}
        self._fewest: list[str] = []
        self._sent_to_fewest: set[str] = set()

    def update(self, reports: Mapping[str, Reported]) -> None:
        for name, report in reports.items():
            if self._reports.get(name) is not report:
                self._note(name, report.engine | report.loading)
        self._reports = dict(reports)
        fewest = min(map(len, self._models.values()))
        self._fewest = [name for name, models in self._models.items() if len(models) == fewest]

    def _note(self, name: str, models: frozenset[str]) -> None:
        before = self._models.get(name, frozenset())
        for ref in before - models:
            self._holders[ref].discard(name)
        for ref in models - before:
            self._holders.setdefault(ref, set()).add(name)
        self._models[name] = models

    def choose(self, request: Request, replicas: Mapping[str, Replica], now_s: float) -> tuple[str | None, str | None]:
        ref = name_of(request.adapter)
        holders = sorted(self._holders.get(ref, ()))
        if holders:
            self._sent_to_fewest.discard(ref)
            chosen = self._less_busy(holders, replicas)
            if replicas[chosen].running < MOST_RUNNING:
                return chosen, None
        elif ref in self._sent_to_fewest and now_s - request.asked_at_s < self._random.uniform(PATIENCE_S, 2 * PATIENCE_S):
            return None, None
        self._sent_to_fewest.add(ref)
        return self._less_busy(self._fewest, replicas), None

    def _less_busy(self, names: list[str], replicas: Mapping[str, Replica]) -> str:
        return min(self._random.sample(names, min(2, len(names))), key=lambda name: replicas[name].running)

    def ended(self, request: Request) -> None:
        pass

    def adding(self, flight: str, adapter: int, replica: str) -> None:
        pass

    def added(self, flight: str) -> None:
        pass
