"""More busy adapters than places: production's EngineSlots with a made-up engine, on a clock that jumps. Prints Markdown."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from adapters.cache import Lease
from adapters.names import AdapterRef
from adapters.types import LocalAdapter, ResolvedAdapter
from serve_app.simulation.cluster import ref_of
from serve_app.simulation.jumping_clock import JumpingLoop
from serve_app.simulation.traces import zipf
from serve_app.slots.engine_slots import EngineSlots

SLOTS = 8
CLIENTS = 64  # each asks again as soon as it has its answer
ANSWER_S = 2.0
STAGE_S = 0.2
ADD_S = 0.05
NEVER_S = 1e9
RULES = {"the rule": {}, "no time slice": {"slice_s": 0.0}, "never closed": {"drain_after_s": NEVER_S}}
SEED = 1


class MadeUpEngine:
    """Staging and adding take time; adding one after the other, as in the real one."""

    def __init__(self) -> None:
        self.loads = 0
        self._adding = asyncio.Lock()

    async def stage(self, ref: AdapterRef, int_id: int, files: LocalAdapter) -> None:
        await asyncio.sleep(STAGE_S)

    async def add(self, ref: AdapterRef, int_id: int, files: LocalAdapter) -> int:
        async with self._adding:
            await asyncio.sleep(ADD_S)
        self.loads += 1
        return 0

    async def remove(self, ref: AdapterRef, int_id: int) -> None:
        await asyncio.sleep(0)


class FullDisk:
    """A node cache that has everything."""

    def has(self, digest: str) -> bool:
        return True

    async def lease(self, adapter: ResolvedAdapter) -> Lease:
        return Lease(LocalAdapter(adapter.digest, Path("/"), 0), False, 0.0, lambda: None)


@dataclass(slots=True)
class Outcome:
    """Waits for the adapter in seconds, in the order of the answers; loads; seconds in all."""

    waits_s: list[float] = field(default_factory=list)
    loads: int = 0
    took_s: float = 0.0


def run(adapters: int, exponent: float, requests: int, **rule: float) -> Outcome:
    """`CLIENTS` clients ask for `adapters` adapters of one engine; `rule` goes to its EngineSlots."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(_run(zipf(adapters, requests, exponent, SEED), rule))


async def _run(trace: list[int], rule: dict[str, float]) -> Outcome:
    clock_s = asyncio.get_running_loop().time
    engine = MadeUpEngine()
    slots = EngineSlots(engine, FullDisk(), SLOTS, wait_s=NEVER_S, clock_s=clock_s, **rule)  # type: ignore[arg-type]
    outcome, rng, rest = Outcome(), random.Random(SEED), iter(trace)

    async def client() -> None:
        for adapter in rest:
            asked_at_s = clock_s()
            use = await slots.use(ResolvedAdapter(ref_of(adapter), str(adapter), (), rank=8))
            outcome.waits_s.append(clock_s() - asked_at_s)
            await asyncio.sleep(rng.expovariate(1 / ANSWER_S))
            use.release()

    async with asyncio.TaskGroup() as clients:
        for _ in range(CLIENTS):
            clients.create_task(client())
    outcome.loads, outcome.took_s = engine.loads, clock_s()
    return outcome


def table(requests: int) -> Iterator[str]:
    """A row for each number of adapters, with production's rule and two others."""
    yield "| adapters | trace | slots close for others | answers a second | loads for 100 requests | wait, p50 / p99 / longest |"
    yield "|" + " --- |" * 6
    for exponent in (0.9, 0.0):
        for factor in (1, 2, 4):
            for name, rule in RULES.items():
                outcome = run(factor * SLOTS, exponent, requests, **rule)
                p50, p99, longest = np.quantile(outcome.waits_s, [0.5, 0.99, 1])
                yield (
                    f"| {factor} x the {SLOTS} slots | {f'Zipf {exponent}' if exponent else 'uniform'} | {name}"
                    f" | {requests / outcome.took_s:.1f} | {100 * outcome.loads / requests:.1f}"
                    f" | {p50:.1f} / {p99:.1f} / {longest:.1f} s |"
                )
