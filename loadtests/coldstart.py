"""Cold starts, tier by tier and stage by stage, against a server that runs already: `python -m loadtests.coldstart --url URL`.

Needs this folder, httpx2 and the standard library. Adapters are put where they have to be through the server's own routes: out of
the engine, out of the node's cache. Where there are no such routes (`--fresh`), each adapter is asked for once as a cold one, and
the other tiers are left out; then `--models` names them.

It measures: base and hot adapter; from the store, from the node's disk, from the engine's memory, with the stages that the server
tells; different cold ones at once; many at once on one cold, and once more when it is there; the gaps of running streams during
cold loads, from the first cold request to the last cold first token. Writes `summary.json`; `--aims` puts the aims for an H200
and adapters of 175 MB beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2

from loadtests.client import Answer, ask, client
from loadtests.figures import Figure, median, new_results, percentile, write

PROMPT = "import os\ndef main():\n" * 8
OFF_GPU = "engine, off the GPU"
DIFFERENT, AT_ONCE = 8, 64
STAGES = ("resolve", "relay", "fetch", "stage", "queue", "load", "engine")  # relay is the time of all that follow it
QUIET_S = 5
EVICT_TRIES = 50
METRICS_AGE_S = 12  # the node's numbers are up to 10 s old
COUNTED = re.compile(r"^(loramux_\w+(?:_total|_sum|_count))\{(.*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Options:
    """What to ask. `models` are refs or names that all stand for an adapter each."""

    url: str
    base: str
    models: tuple[str, ...]
    fresh: bool
    times: int
    tokens: int
    gpu_places: int
    streams: int
    stream_tokens: int
    rate_per_s: float
    aims: bool


class Target:
    """The server: asks it, and puts adapters where they have to be."""

    def __init__(self, http: httpx2.AsyncClient, options: Options) -> None:
        self._http = http
        self.options = options
        self._unused = list(options.models)

    async def ask(self, model: str, tokens: int | None = None, events_s: list[float] | None = None) -> Answer:
        fields = {"prompt": PROMPT, "max_tokens": tokens or self.options.tokens, "ignore_eos": True}
        return await ask(self._http, self.options.url, model, events_s, **fields)

    async def cold(self, count: int) -> list[str]:
        """`count` adapters that are in no engine and on no node's disk."""
        if self.options.fresh:
            if len(self._unused) < count:
                raise SystemExit(f"{count} fresh adapters are wanted, {len(self._unused)} are left: name more with --models")
            taken, self._unused = self._unused[:count], self._unused[count:]
            return taken
        models = list(self.options.models[:-1][:count])  # the last one stays hot
        if len(models) < count:
            raise SystemExit(f"{count} adapters beside the hot one are wanted, the server has {len(self.options.models)} in all")
        await asyncio.gather(*(self.evict(model, "remote") for model in models))
        return models

    async def evict(self, ref: str, tier: str) -> None:
        """Waits until no request holds it: a use may end a moment after its answer."""
        base, _, rest = ref.partition(":")
        name, _, version = rest.partition("@")
        body = {"base": base, "name": name, "version": int(version), "tier": tier}
        for _ in range(EVICT_TRIES):
            answer = await self._http.post(f"{self.options.url}/registry/v1/evict", json=body)
            if answer.status_code == 200 and not held(answer.json()):
                return
            await asyncio.sleep(0.1)
        raise SystemExit(f"{ref} does not leave: {answer.status_code} {answer.text[:300]}")


def held(answer: dict[str, Any]) -> bool:
    return any(row.get("reason") for row in answer.get("replicas", []))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", required=True, help="address of the server, http://host:8000")
    parser.add_argument("--base", help="base to ask; without it the first model that has no adapter in its name")
    parser.add_argument("--models", nargs="*", help="adapters to ask for; without it all that the registry lists for the base")
    parser.add_argument("--fresh", action="store_true", help="a server without tier routes: each adapter is cold once")
    parser.add_argument("--times", type=int, default=10, help="cold starts for each tier")
    parser.add_argument("--hot", type=int, default=50, help="requests for base and hot adapter")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--gpu-places", type=int, default=0, help="the engine's max_loras: adds its CPU memory as a tier")
    parser.add_argument("--streams", type=int, default=4, help="streams that run during cold loads")
    parser.add_argument("--stream-tokens", type=int, default=1500, help="tokens of one of them; it begins anew then")
    parser.add_argument("--rate", type=float, default=2.0, help="cold loads a second beside them")
    parser.add_argument("--different", type=int, default=DIFFERENT, help="different cold adapters at once")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="requests at once on one cold adapter")
    parser.add_argument("--gateway-metrics", action="store_true", help="what /metrics counted meanwhile")
    parser.add_argument("--aims", action="store_true", help="the aims for an H200 and adapters of 175 MB beside the figures")
    parser.add_argument("--out", type=Path, default=new_results("coldstart"))
    asyncio.run(run(parser.parse_args()))


async def run(given: argparse.Namespace) -> None:
    async with client(connections=given.at_once + given.streams + 16) as http:
        options = await options_of(http, given)
        before = await counters(http, options.url) if given.gateway_metrics else {}
        figures, parts = await measure(Target(http, options), given)
        if given.gateway_metrics:
            await asyncio.sleep(METRICS_AGE_S)
            parts["metrics"] = grown(before, await counters(http, options.url))
    about = {"base": options.base, "adapters": len(options.models), "fresh": options.fresh, "streams": options.streams}
    about |= {"rate_per_s": options.rate_per_s, "times": options.times, "tokens": options.tokens}
    print(stage_table(parts["tiers"]), end="\n\n")
    if not options.aims:
        figures = [replace(figure, limit=None) for figure in figures]
    write(given.out, about, figures, **parts)


async def options_of(http: httpx2.AsyncClient, given: argparse.Namespace) -> Options:
    url = given.url.rstrip("/").removesuffix("/v1")
    base = given.base or await first_base(http, url)
    models = given.models or ([] if given.fresh else await listed(http, url, base))
    if not models:
        raise SystemExit("no adapter to ask for: name some with --models")
    return Options(
        url=url,
        base=base,
        models=tuple(models),
        fresh=given.fresh,
        times=given.times,
        tokens=given.tokens,
        gpu_places=given.gpu_places,
        streams=given.streams,
        stream_tokens=given.stream_tokens,
        rate_per_s=given.rate,
        aims=given.aims,
    )


async def first_base(http: httpx2.AsyncClient, url: str) -> str:
    models = (await http.get(f"{url}/v1/models")).raise_for_status().json()["data"]
    return next(model["id"] for model in models if ":" not in model["id"])


async def listed(http: httpx2.AsyncClient, url: str, base: str) -> list[str]:
    """The refs behind `production`, or the newest where nothing is in production."""
    answer = await http.get(f"{url}/registry/v1/adapters", params={"base": base})
    rows = answer.raise_for_status().json()["adapters"]
    live = {row["name"]: row.get("aliases", {}).get("production") or newest(row) for row in rows}
    return [f"{base}:{name}@{version}" for name, version in live.items() if version]


def newest(row: dict[str, Any]) -> int | None:
    return max((version["version"] for version in row["versions"] if not version.get("retired")), default=None)


# -- measuring ---------------------------------------------------------------------------------------------------------


async def measure(target: Target, given: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    options = target.options
    hot = options.models[-1] if not options.fresh else (await target.cold(1))[0]
    for model in (options.base, hot) * 5:
        await target.ask(model)
    tiers = {
        "base": [await target.ask(options.base) for _ in range(given.hot)],
        "hot": [await target.ask(hot) for _ in range(given.hot)],
        "remote": await from_store(target),
    }
    if not options.fresh:
        tiers["disk"] = await from_disk(target)
    if options.gpu_places and not options.fresh:
        tiers[OFF_GPU] = await from_engine(target)
    print("   tiers measured", flush=True)
    different = await asyncio.gather(*(target.ask(model) for model in await target.cold(given.different)))
    (cold,) = await target.cold(1)
    same = await asyncio.gather(*(target.ask(cold) for _ in range(given.at_once)))
    warm = await asyncio.gather(*(target.ask(cold) for _ in range(given.at_once)))
    print("   bursts measured", flush=True)
    gaps = await during_loads(target, hot, given.different)
    figures = [*of_tiers(tiers), *of_bursts(different, same, warm, tiers["remote"]), *of_gaps(gaps)]
    bursts = {"different": [*map(document, different)], "same": [*map(document, same)], "warm": [*map(document, warm)]}
    return figures, {"tiers": {tier: [*map(document, of)] for tier, of in tiers.items()}, "bursts": bursts, "gaps": gaps}


async def from_store(target: Target) -> list[Answer]:
    answers = []
    for turn in range(target.options.times):
        if target.options.fresh:
            (model,) = await target.cold(1)
        else:
            model = target.options.models[turn % len(target.options.models)]
            await target.evict(model, "remote")
        answers.append(await target.ask(model))
    return answers


async def from_disk(target: Target) -> list[Answer]:
    answers = []
    for turn in range(target.options.times):
        model = target.options.models[turn % len(target.options.models)]
        await target.ask(model)
        await target.evict(model, "disk")
        answers.append(await target.ask(model))
    return answers


async def from_engine(target: Target) -> list[Answer]:
    """In the engine's memory, while others took all places on the GPU since."""
    models, places, answers = target.options.models, target.options.gpu_places, []
    for turn in range(target.options.times):
        model = models[turn % len(models)]
        await target.ask(model)
        for step in range(1, places + 1):
            await target.ask(models[(turn + step) % len(models)])
        answers.append(await target.ask(model))
    return answers


async def during_loads(target: Target, hot: str, loads: int) -> dict[str, Any]:
    """Gaps between events of running streams, in ms: while nothing else happens, and while cold adapters come one by one."""
    cold = await target.cold(loads)
    async with running_streams(target, hot) as streams:
        quiet_s = time.perf_counter()
        await asyncio.sleep(QUIET_S)
        storm_s = time.perf_counter()
        answers = await storm(target, cold)
        last_s = max(answer.began_s + answer.ttft_ms / 1e3 for answer in answers)
    return {
        "streams": len(streams),
        "loads": sum(answer.whole for answer in answers),
        "failures": sum(not answer.whole for answer in answers),
        "loads_per_s": round(len(answers) / (last_s - storm_s), 2),
        "cold_ttft_p50_ms": round(median(answer.ttft_ms for answer in answers), 1),
        "quiet": spread([gap for stream in streams for gap in stream.gaps_ms(quiet_s, storm_s)]),
        "loading": spread([gap for stream in streams for gap in stream.gaps_ms(storm_s, last_s)]),
    }


async def storm(target: Target, models: Sequence[str]) -> list[Answer]:
    """One request a turn, whether the one before was answered or not."""
    tasks = []
    for model in models:
        tasks.append(asyncio.ensure_future(target.ask(model)))
        await asyncio.sleep(1 / target.options.rate_per_s)
    return await asyncio.gather(*tasks)


class Stream:
    """One request after another with as many tokens as the base gives; the pause between two is no gap."""

    def __init__(self, target: Target, model: str) -> None:
        self._target = target
        self._model = model
        self._runs: list[list[float]] = []

    async def run(self) -> None:
        while True:
            self._runs.append([])
            answer = await self._target.ask(self._model, tokens=self._target.options.stream_tokens, events_s=self._runs[-1])
            if not answer.whole:
                raise SystemExit(f"a running stream failed: {answer.status} {answer.error}")

    @property
    def has_begun(self) -> bool:
        return any(len(run) > 1 for run in self._runs)

    def gaps_ms(self, from_s: float, to_s: float) -> list[float]:
        """The gaps that ended in that time."""
        return [(b - a) * 1e3 for run in self._runs for a, b in pairwise(run) if from_s <= b <= to_s]


@asynccontextmanager
async def running_streams(target: Target, model: str) -> AsyncIterator[list[Stream]]:
    streams = [Stream(target, model) for _ in range(target.options.streams)]
    tasks = [asyncio.ensure_future(stream.run()) for stream in streams]
    try:
        while not all(stream.has_begun for stream in streams):
            await asyncio.sleep(0.01)
            for task in tasks:
                if task.done():
                    task.result()
        yield streams
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def counters(http: httpx2.AsyncClient, url: str) -> dict[str, float]:
    """What `/metrics` has counted, over all processes of the node, by name and labels."""
    sums: dict[str, float] = {}
    for name, labels, value in COUNTED.findall((await http.get(f"{url}/metrics")).raise_for_status().text):
        kept = ",".join(f"{key}={said}" for key, said in LABEL.findall(labels) if key != "process")
        sums[f"{name}{{{kept}}}"] = sums.get(f"{name}{{{kept}}}", 0.0) + float(value)
    return sums


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    grew = {name: round(value - before.get(name, 0.0), 6) for name, value in sorted(after.items())}
    return {name: value for name, value in grew.items() if value}


# -- figures -----------------------------------------------------------------------------------------------------------


def of_tiers(tiers: dict[str, list[Answer]]) -> list[Figure]:
    hot = median(ttfts(tiers["hot"]))
    figures = [
        Figure("base: TTFT p50", median(ttfts(tiers["base"])), "ms"),
        Figure("hot adapter: TTFT p50", hot, "ms"),
        Figure("from the store: TTFT p50", median(ttfts(tiers["remote"])), "ms", 800),
        Figure("from the store: TTFT p95", percentile(ttfts(tiers["remote"]), 0.95), "ms", 1200),
    ]
    if "disk" in tiers:
        figures.append(Figure("from the node's disk: TTFT p50 over hot", median(ttfts(tiers["disk"])) - hot, "ms", 250))
    if OFF_GPU in tiers:
        figures.append(Figure("from the engine's memory: TTFT p50 over hot", median(ttfts(tiers[OFF_GPU])) - hot, "ms", 50))
    wanted = {"base": "base", "hot": "engine", "remote": "remote", "disk": "disk", OFF_GPU: "engine"}
    told = [(tier, answer) for tier, answers in tiers.items() for answer in answers]
    figures.append(Figure("failures", sum(not answer.whole for _, answer in told), f"of {len(told)}", 0))
    if any(answer.tier for _, answer in told):
        missed = sum(answer.tier != wanted[tier] for tier, answer in told)
        figures.append(Figure("answers from another tier than the one set", missed, f"of {len(told)}", 0))
    return figures


def of_bursts(
    different: Sequence[Answer], same: Sequence[Answer], warm: Sequence[Answer], alone: Sequence[Answer]
) -> list[Figure]:
    """`warm` is the control of `same`: as many at once when the adapter is there."""
    alone_ms = median(ttfts(alone))
    load_ms = sum(median(answer.stages_ms.get(stage, 0.0) for answer in alone) for stage in ("stage", "load"))
    fetch_ms = median(answer.stages_ms.get("fetch", 0.0) for answer in alone)
    expected_ms = max(fetch_ms, load_ms) * len(different) + 400 if load_ms else None
    return [
        Figure(f"{len(different)} different cold at once: answered", whole(different), "", len(different), ">="),
        Figure(
            f"{len(different)} different cold at once: last first token", max(ttfts(different), default=0.0), "ms", expected_ms
        ),
        Figure(f"{len(same)} at once on one cold: answered", whole(same), "", len(same), ">="),
        Figure(f"{len(same)} at once on one cold: loads", sum(answer.load == "leader" for answer in same), "", 1),
        Figure(
            f"{len(same)} at once on one cold: TTFT p95 over one alone",
            percentile(ttfts(same), 0.95) / alone_ms if alone_ms else 0.0,
            "times",
            1.3,
        ),
        Figure(f"control, {len(warm)} at once on it once more: TTFT p95", percentile(ttfts(warm), 0.95), "ms"),
        Figure(f"{len(same)} at once on one cold: TTFT p95", percentile(ttfts(same), 0.95), "ms"),
    ]


def of_gaps(gaps: dict[str, Any]) -> list[Figure]:
    quiet, loading = gaps["quiet"], gaps["loading"]
    over = loading["p99_ms"] / quiet["p99_ms"] if quiet["p99_ms"] else 0.0
    return [
        Figure("running streams, quiet: p99 gap", quiet["p99_ms"], "ms"),
        Figure(f"running streams, at {gaps['loads_per_s']} loads a second: p99 gap", loading["p99_ms"], "ms"),
        Figure("the same over quiet", over, "times", 3),
        Figure("running streams during loads: largest gap", loading["max_ms"], "ms", 60),
        Figure("cold requests that failed meanwhile", gaps["failures"], f"of {gaps['loads'] + gaps['failures']}", 0),
    ]


def stage_table(tiers: dict[str, list[dict[str, Any]]]) -> str:
    """Median ms of each stage that the server tells, beside the client's TTFT."""
    told = dict.fromkeys(stage for rows in tiers.values() for row in rows for stage in row["stages_ms"])
    stages = [*(stage for stage in STAGES if stage in told), *(stage for stage in told if stage not in STAGES)]
    lines = [f"| tier | {' | '.join(stages)} | TTFT p50 | p95 |", "| --- " * (len(stages) + 3) + "|"]
    for tier, rows in tiers.items():
        good = [row for row in rows if row["status"] == 200]
        cells = [f"{median(row['stages_ms'].get(stage, 0.0) for row in good):.1f}" for stage in stages]
        first = [row["ttft_ms"] for row in good]
        lines.append(f"| {tier} | {' | '.join([*cells, f'{median(first):.1f}', f'{percentile(first, 0.95):.1f}'])} |")
    return "\n".join(lines)


def document(answer: Answer) -> dict[str, Any]:
    said = {"status": answer.status, "ttft_ms": round(answer.ttft_ms, 2), "tier": answer.tier, "load": answer.load}
    return said | {"stages_ms": answer.stages_ms} | ({"error": answer.error} if answer.error else {})


def spread(gaps_ms: Sequence[float]) -> dict[str, float]:
    return {
        "gaps": len(gaps_ms),
        "p50_ms": round(median(gaps_ms), 2),
        "p99_ms": round(percentile(gaps_ms, 0.99), 2),
        "max_ms": round(max(gaps_ms, default=0.0), 2),
    }


def whole(answers: Sequence[Answer]) -> int:
    return sum(answer.whole for answer in answers)


def ttfts(answers: Sequence[Answer]) -> list[float]:
    return [answer.ttft_ms for answer in answers if answer.whole]


if __name__ == "__main__":
    main()
