"""LoraMux and stock Ray Serve LLM over the same store, adapters and settings, and what each makes of the same traces."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtests.client import Answer, client, closed_loop
from loadtests.figures import Figure, median, percentile
from loadtests.material import FEW_SLOTS, DemoMaterial
from loadtests.product import BASE, configure, up, wait_for_models, wait_for_replicas
from loadtests.servers import s3_server
from loadtests.shaping import Store, shaped
from loadtests.stock import stock, upload_all
from loadtests.traces import Trace

OURS = "loramux"
ERRORS_SHOWN = 5


class Fetches:
    """How often weights were fetched from the store, whose address for servers is `endpoint`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._count = 0
        self.endpoint = store.endpoint

    def of(self) -> int:
        """Since the beginning."""
        self._count += len(self._store.fetches())
        return self._count


@dataclass(frozen=True)
class Peer:
    """A running server. `fetches` counts at the store; `loads` counts what it has loaded so far, where its answers don't say it
    themselves; `forget` makes it give up an adapter that it fetched before anybody asked, where it does such a thing."""

    name: str
    url: str
    material: DemoMaterial
    fetches: Fetches
    loads: Callable[[], float] | None = None
    forget: Callable[[str], None] = lambda name: None


@dataclass(frozen=True)
class Case:
    """What one server made of one trace. Latencies in ms, of good answers; `errors` counts the failures by what was said."""

    server: str
    times_slots: int
    popularity: str
    requests: int
    failures: int
    wrong_answers: int
    answers_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    ttft_max_ms: float
    loads: float
    fetches: int
    tiers: dict[str, int]
    errors: dict[str, int]

    @property
    def loads_per_request(self) -> float:
        return self.loads / self.requests

    @property
    def hit_rate(self) -> float:
        """The share of requests that loaded nothing."""
        return max(0.0, 1 - self.loads_per_request)

    def document(self) -> dict[str, Any]:
        return {key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(self).items()}


async def run_traces(peer: Peer, drawn: Sequence[Trace], clients: int) -> list[Case]:
    cases = []
    for trace in drawn:
        await warm(peer, trace.adapters)
        cases.append(await run_trace(peer, trace, clients))
        print(f"   {trace}: {cases[-1].answers_per_s:.1f} answers/s, {cases[-1].failures} failures", flush=True)
    return cases


async def warm(peer: Peer, names: Sequence[str]) -> None:
    """Each adapter once, one after another: what follows is no first sight of any file."""
    async with client() as http:
        await closed_loop(http, peer.url, [model_of(name) for name in names], clients=1)


async def run_trace(peer: Peer, trace: Trace, clients: int) -> Case:
    before, fetched = await counted(peer), peer.fetches.of()
    async with client() as http:
        began = time.perf_counter()
        done = await closed_loop(http, peer.url, [model_of(name) for name in trace.names], clients)
        took_s = time.perf_counter() - began
    answers = [answer for _, answer in done]
    good = [answer.ttft_ms for answer in answers if answer.good]
    return Case(
        server=peer.name,
        times_slots=trace.times_slots,
        popularity=trace.popularity,
        requests=len(done),
        failures=len(done) - len(good),
        wrong_answers=wrong_of(peer.material, done),
        answers_per_s=len(good) / took_s,
        ttft_p50_ms=median(good),
        ttft_p99_ms=percentile(good, 0.99),
        ttft_max_ms=max(good, default=0.0),
        loads=await counted(peer) - before if peer.loads else leaders(answers),
        fetches=peer.fetches.of() - fetched,
        tiers=dict(Counter(answer.tier for answer in answers if answer.tier)),
        errors=errors_of(answers),
    )


def wrong_of(material: DemoMaterial, done: Sequence[tuple[str, Answer]]) -> int:
    return sum(answer.good and not material.says(model.partition(":")[2], answer.text) for model, answer in done)


def errors_of(answers: Sequence[Answer]) -> dict[str, int]:
    bad = Counter(f"{answer.status} {answer.error[:120]}" for answer in answers if not answer.good)
    return dict(bad.most_common(ERRORS_SHOWN))


def leaders(answers: Sequence[Answer]) -> int:
    """The requests that began a load; those that came while it went on followed it."""
    return sum(answer.load == "leader" for answer in answers)


async def counted(peer: Peer) -> float:
    return await asyncio.to_thread(peer.loads) if peer.loads else 0.0


def model_of(name: str) -> str:
    return f"{BASE}:{name}"


# -- servers -----------------------------------------------------------------------------------------------------------


@contextmanager
def running(server: str, material: DemoMaterial, *, replicas: int = 1) -> Iterator[Peer]:
    """The server with all of the material's adapters in its store."""
    with (
        s3_server() as (endpoint, store),
        shaped(endpoint) as counted_store,
        PEERS[server](material, Fetches(counted_store), store, replicas) as peer,
    ):
        yield peer


@contextmanager
def loramux(material: DemoMaterial, fetches: Fetches, store: Any, replicas: int) -> Iterator[Peer]:
    with tempfile.TemporaryDirectory(prefix="loramux-bench-") as folder:
        setting = configure(material, fetches.endpoint, Path(folder), engine=FEW_SLOTS, replicas=replicas)
        with up(setting):
            setting.publish_all(material, material.folders)
            wait_for_models(setting.url, len(material.folders) + 1)
            wait_for_replicas(setting.url, replicas)
            yield Peer(OURS, setting.url, material, fetches, forget=lambda name: setting.evict(name, 1))


@contextmanager
def stock_tuned(material: DemoMaterial, fetches: Fetches, store: Any, replicas: int) -> Iterator[Peer]:
    upload_all(store, material, material.folders)
    with stock(material, fetches.endpoint, tuned=True, engine=FEW_SLOTS, replicas=replicas) as peer:
        yield Peer("stock-tuned", peer.url, material, fetches, peer.loads)


PEERS: dict[str, Callable[..., Any]] = {OURS: loramux, "stock-tuned": stock_tuned}


# -- what is said of them ----------------------------------------------------------------------------------------------


def table_of(cases: Sequence[Case]) -> str:
    titles = (
        "server",
        "trace",
        "answers/s",
        "TTFT p50",
        "p99",
        "max",
        "hit rate",
        "loads per request",
        "failures",
        "wrong answers",
    )
    rows = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for case in cases:
        cells = (
            case.server,
            f"{case.times_slots}x {case.popularity}",
            f"{case.answers_per_s:.1f}",
            f"{case.ttft_p50_ms:.0f} ms",
            f"{case.ttft_p99_ms:.0f} ms",
            f"{case.ttft_max_ms:.0f} ms",
            f"{case.hit_rate:.0%}",
            f"{case.loads_per_request:.2f}",
            f"{case.failures} of {case.requests}",
            str(case.wrong_answers),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def promised(cases: Sequence[Case]) -> list[Figure]:
    """What LoraMux promises of every trace."""
    ours = [case for case in cases if case.server == OURS]
    asked = sum(case.requests for case in ours)
    return [
        Figure("failures of LoraMux, over all traces", sum(case.failures for case in ours), f"of {asked}", 0),
        Figure("wrong answers of LoraMux, over all traces", sum(case.wrong_answers for case in ours), f"of {asked}", 0),
    ]
