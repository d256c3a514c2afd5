"""A peer, a store and a sender that do as they are told, for tests of the runner: no network, no processes, no waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loadtests import workload
from loadtests.material import Adapter, Base
from loadtests.running.run import Running, Tools
from loadtests.scenario import Pool, Scenario, StoreShape
from loadtests.sending import Sent
from loadtests.workload import Planned

TOLD: dict[str, Any] = {"when": "now"}


@dataclass(frozen=True)
class ScriptedMaterial:
    """Adapters that say their own name."""

    asked: Mapping[str, Pool]

    @property
    def base(self) -> Base:
        return Base("demo", "nowhere")

    @property
    def pools(self) -> dict[str, tuple[Adapter, ...]]:
        return {
            name: tuple(adapter(name, k, pool.ranks[k % len(pool.ranks)]) for k in range(pool.count))
            for name, pool in self.asked.items()
        }

    def fresh(self, adapter: Adapter, number: int) -> Adapter:
        return replace(adapter, name=f"{adapter.name}-f{number}")


def adapter(pool: str, index: int, rank: int = 8) -> Adapter:
    return Adapter(f"{pool}-{index}", pool, index, rank, 1000 * rank, Path("nowhere"), f"I am {pool} {index}")


@dataclass(frozen=True)
class Fetched:
    path: str
    wall_ns: int
    bytes: int
    took_s: float


class ScriptedStore:
    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.seen: list[Fetched] = []

    def shape(self, shape: StoreShape, seed: int = 1) -> None:
        self._log.append("store unshaped" if shape == StoreShape() else "store shaped")

    def fetches(self) -> tuple[Fetched, ...]:
        seen, self.seen = tuple(self.seen), []
        return seen


@dataclass
class ScriptedPeer:
    """`tiers` are those that it can set, `forgets` says whether it can set them twice; `breaks` maps a call to its failure."""

    name: str
    log: list[str]
    tiers: tuple[str, ...] = ("remote", "disk", "engine")
    forgets: bool = True
    breaks: dict[str, Exception] = field(default_factory=dict)
    loaded: float | None = None
    url: str = "http://nowhere"
    base: str = "demo"

    def can_put(self, tier: str) -> bool:
        return tier in self.tiers

    def needs_fresh(self, tier: str) -> bool:
        return not self.forgets

    def put(self, adapters: Sequence[Adapter], tier: str) -> None:
        self._do("put", f"{' '.join(one.name for one in adapters)} {tier}")

    def add(self, adapter: Adapter) -> None:
        self._do("add", adapter.name)

    def republish(self, adapter: Adapter, content: Adapter) -> None:
        self._do("republish", f"{adapter.name} {content.name}")

    def promote(self, adapter: Adapter, content: Adapter) -> None:
        self._do("promote", f"{adapter.name} {content.name}")

    def evict(self, adapter: Adapter, tier: str) -> None:
        self._do("evict", f"{adapter.name} {tier}")

    def model(self, adapter: Adapter, version: int | None = None, alias: str | None = None) -> str:
        """Without an alias the version that was published, and only one that was."""
        if alias is None and f"{self.name}: add {adapter.name}" not in self.log:
            raise KeyError(adapter.name)
        return f"demo:{adapter.name}" + (f"@{alias}" if alias else "")

    def adapter_of(self, path: str) -> str | None:
        return path.split("/")[2]

    def loads(self) -> float | None:
        return self.loaded

    def processes(self) -> dict[str, list[Any]]:
        return {"gateway": []}

    def _do(self, what: str, how: str) -> None:
        self.log.append(f"{self.name}: {what} {how}")
        if what in self.breaks:
            raise self.breaks[what]


Answer = Callable[[Planned, str], Sent]


def says_its_name(planned: Planned, model: str) -> Sent:
    pool, index = planned.pool, planned.adapter_index
    return Sent(planned.number, sent_s=planned.at_s, status=200, ttft_ms=5.0, total_ms=9.0, tokens=4, text=f"I am {pool} {index}")


class Script:
    """A run's tools. `log` tells in order what was done."""

    def __init__(self, answer: Answer = says_its_name, not_starting: tuple[str, ...] = (), **about_peers: Any) -> None:
        self.log: list[str] = []
        self.models: dict[int, str] = {}
        self.store = ScriptedStore(self.log)
        self._answer = answer
        self.not_starting = not_starting
        self.interrupted_at = ""
        self._about_peers = about_peers
        self._changed = threading.Event()

    @property
    def tools(self) -> Tools:
        return Tools(
            make=ScriptedMaterial,
            start=self._start,
            engine=lambda scenario: dict(scenario.engine),
            warm_up=lambda peer, models: self.log.append(f"{peer.name}: warm up {' '.join(models)}"),
            plan=workload.plan,
            send=self._send,
            describe=lambda engine: TOLD | {"engine": engine},
        )

    @contextmanager
    def _start(self, name: str, base: Base, engine: Mapping[str, Any], logs: Path) -> Iterator[Running]:
        self.log.append(f"{name}: start")
        if name in self.not_starting:
            raise RuntimeError(f"{name} has no legs")
        if name == self.interrupted_at:
            raise KeyboardInterrupt
        try:
            yield Running(ScriptedPeer(name, self.log, **self._about_peers), self.store)
        finally:
            self.log.append(f"{name}: end")

    def _send(self, url: str, planned: Sequence[Planned], models: Mapping[int, str], folder: Path, on_start: Any) -> list[Sent]:
        self.log.append(f"send {len(planned)}")
        self.models = dict(models)
        on_start(time.time_ns())
        self.store.seen.append(Fetched("/bucket/cold-0/weights", time.time_ns(), 8000, 0.01))
        return [self._answer(one, models[one.number]) for one in planned]


def scenario(*phases: dict[str, Any], **changed: Any) -> Scenario:
    """Two peers, pools `hot` of two and `cold` of three; one phase that asks cold ones one by one unless others are given."""
    document = {
        "name": "scripted",
        "about": "a test",
        "peers": ["stock", "loramux"],
        "pools": POOLS,
        "phases": phases or [ASK_COLD],
    }
    return Scenario.model_validate(document | changed)


POOLS = {"hot": {"count": 2}, "cold": {"count": 3, "ranks": [8, 16]}}
ASK_COLD: dict[str, Any] = {
    "name": "ask",
    "put": {"cold": "remote"},
    "loads": [{"name": "cold", "pool": "cold", "arrivals": {"kind": "burst", "count": 3}}],
}
