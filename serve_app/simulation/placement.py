"""Where requests go: production's router beside Ray's multiplexing, on the same traces and the same made-up replicas."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from serve_app.settings import MOST_ROOM
from serve_app.simulation.clock import Clock
from serve_app.simulation.cluster import Replica, Size, Times
from serve_app.simulation.disk import Disk, Loads
from serve_app.simulation.routers import Affinity, Multiplex, Router
from serve_app.simulation.run import Outcome, Run, Traffic
from serve_app.simulation.traces import zipf

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


def run(plan: Plan, make_router: Callable[[], Router], size: Size, times: Times) -> Outcome:
    """One plan with one router."""
    rng = np.random.default_rng(SEED + 1)
    answers_s = rng.exponential(times.answer_s, plan.requests).tolist()
    gaps_s = rng.exponential(times.answer_s / (plan.busy * plan.replicas), plan.requests).tolist()
    trace = zipf(plan.adapters, plan.requests, plan.exponent, SEED)
    traffic = Traffic(trace, answers_s, gaps_s, counted_from=int(plan.requests * HEAT_UP))
    clock, loads = Clock(), Loads()
    replicas = {f"r{rank}": made_up(rank, clock, size, times, loads) for rank in range(plan.replicas)}
    return Run(traffic, [make_router() for _ in range(plan.gateways)], replicas, clock, loads).go()


def made_up(rank: int, clock: Clock, size: Size, times: Times, loads: Loads) -> Replica:
    """A replica with a disk of its own; all adapters are alike."""
    disk = Disk(size.disk * size.adapter_bytes, lambda _: size.adapter_bytes, lambda _: times.fetch_s, clock, loads)
    return Replica(f"r{rank}", rank, clock, size.slots, disk, lambda _: times.load_s, loads)


def table(requests: int, sizes: tuple[int, ...], exponents: tuple[float, ...], gateways: int) -> Iterator[str]:
    """A row for each router and size, in Markdown."""
    size, times = Size(), Times()
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|" + " --- |" * len(COLUMNS)
    for replicas in sizes:
        for exponent in exponents:
            plan = Plan(replicas, 100 * replicas, max(requests, 400 * replicas), exponent, gateways=gateways)
            for name, make in (("ours", lambda: Affinity(MOST_ROOM)), ("Ray multiplex", lambda: Multiplex(SEED))):
                yield _row(plan, name, run(plan, make, size, times), size)


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
