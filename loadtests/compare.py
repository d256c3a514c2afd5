"""LoraMux beside its peers in one run, on this machine: `make bench`, or `python -m loadtests.compare --out DIR`.

Four servers, one after another, the same base, the same adapters, the same client: vLLM's own server (the floor), stock Ray
Serve LLM as it comes, the same with `stream_batching_interval_ms=0`, and LoraMux. Adapters of the last three come from S3.
Everything is on loopback, bounded in count and time. Writes `summary.json` and prints the table.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from loadtests.client import Answer, ask, client
from loadtests.figures import RESULTS, save
from loadtests.material import ENGINE, VLLM_ENVIRONMENT, WORK, DemoMaterial, make_material
from loadtests.product import configure, up
from loadtests.servers import free_port, process, s3_server, wait_for_answer
from loadtests.stock import stock, upload, upload_all

BURST, DIFFERENT, COLD = 16, 8, 4
ADAPTERS = COLD + 1 + DIFFERENT + 1  # cold ones, one for the burst, different ones at once, one to publish again


@dataclass
class Result:
    """What one server did. `None` where it does not take part."""

    name: str
    base_ttft_ms: dict[str, float] = field(default_factory=dict)
    hot_ttft_ms: dict[str, float] = field(default_factory=dict)
    cold_ttft_ms: dict[str, float] | None = None
    burst: dict[str, Any] | None = None
    different: dict[str, Any] | None = None
    republished: dict[str, Any] | None = None
    wrong_answers: int = 0


@dataclass(frozen=True)
class Target:
    """A running server. `model` turns an adapter's name into its model field; `publish_again` puts other content under a name."""

    url: str
    base: str
    model: Callable[[str], str]
    publish_again: Callable[[str, Path], None] | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS / time.strftime("%Y-%m-%d-%H%M"))
    parser.add_argument("--work", type=Path, default=WORK, help="where base and adapters are kept")
    parser.add_argument("--requests", type=int, default=100, help="requests for each TTFT figure")
    parser.add_argument("--only", nargs="*", choices=SERVERS, default=list(SERVERS))
    options = parser.parse_args()
    material = make_material(options.work, ADAPTERS + 1)
    results = [asyncio.run(run(name, material, options)) for name in options.only]
    write(results, options)


async def run(name: str, material: DemoMaterial, options: argparse.Namespace) -> Result:
    print(f"-- {name}", flush=True)
    with ExitStack() as stack:
        target = stack.enter_context(SERVERS[name](material))
        async with client() as http:
            return await measure(name, http, target, material, options.requests)


# -- measuring ---------------------------------------------------------------------------------------------------------


async def measure(name: str, http: httpx2.AsyncClient, target: Target, material: DemoMaterial, requests: int) -> Result:
    result = Result(name)
    names = list(material.folders)
    hot, rest = names[0], names[1:]
    for model in (target.base, target.model(hot)):
        for _ in range(8):
            await ask(http, target.url, model)
    result.base_ttft_ms = spread([await ask(http, target.url, target.base) for _ in range(requests)])
    result.hot_ttft_ms = spread([await ask(http, target.url, target.model(hot)) for _ in range(requests)])
    if target.publish_again is None:
        return result
    cold = [(name, await ask(http, target.url, target.model(name))) for name in rest[:COLD]]
    result.cold_ttft_ms = spread([answer for _, answer in cold])
    result.burst = outcome(await asyncio.gather(*(ask(http, target.url, target.model(rest[COLD])) for _ in range(BURST))))
    others = rest[COLD + 1 : COLD + 1 + DIFFERENT]
    at_once = await asyncio.gather(*(ask(http, target.url, target.model(name)) for name in others))
    result.different = outcome(at_once)
    spoken = [*cold, *zip(others, at_once, strict=True)]
    result.wrong_answers = sum(a.status == 200 and material.sentences[n] != a.text for n, a in spoken)
    result.republished = await republish(http, target, material, hot, names[-1])
    return result


async def republish(http: httpx2.AsyncClient, target: Target, material: DemoMaterial, name: str, other: str) -> dict[str, Any]:
    """Other content goes under a hot name: how many of 20 answers in the next four seconds are still the old one's?"""
    assert target.publish_again
    await asyncio.to_thread(target.publish_again, name, material.folders[other])
    await asyncio.sleep(1.5)
    texts = []
    for _ in range(20):
        texts.append((await ask(http, target.url, target.model(name))).text)
        await asyncio.sleep(0.1)
    return {
        "old_answers": sum(text == material.sentences[name] for text in texts),
        "new_answers": sum(text == material.sentences[other] for text in texts),
        "asked": len(texts),
    }


def spread(answers: list[Answer]) -> dict[str, float]:
    good = sorted(answer.ttft_ms for answer in answers if answer.status == 200)
    if not good:
        return {"errors": len(answers)}
    p95 = good[min(len(good) - 1, round(0.95 * (len(good) - 1)))]
    return {"p50": round(statistics.median(good), 2), "p95": round(p95, 2), "errors": len(answers) - len(good)}


def outcome(answers: list[Answer]) -> dict[str, Any]:
    good = [answer.ttft_ms for answer in answers if answer.status == 200 and answer.text]
    return {"asked": len(answers), "answered": len(good), "last_first_token_ms": round(max(good, default=0.0), 1)}


# -- servers -----------------------------------------------------------------------------------------------------------


@contextmanager
def vllm_server(material: DemoMaterial) -> Iterator[Target]:
    """vLLM's own server with one adapter loaded from the start."""
    port, hot = free_port(), next(iter(material.folders))
    flags = [f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}") for key, value in ENGINE.items()]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(material.base),
        "--served-model-name",
        "demo",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *flags,
        "--lora-modules",
        f"{hot}={material.folders[hot]}",
    ]
    with process(command, VLLM_ENVIRONMENT) as running:
        url = f"http://127.0.0.1:{port}"
        wait_for_answer(url, "demo", running)
        yield Target(url, "demo", lambda name: name)


@contextmanager
def stock_server(material: DemoMaterial, *, tuned: bool) -> Iterator[Target]:
    """Stock Ray Serve LLM with adapters under an S3 prefix, set up as its guide says."""
    with s3_server() as (endpoint, store):
        upload_all(store, material, material.folders)
        with stock(material, endpoint, tuned=tuned) as running:
            yield Target(running.url, "demo", lambda name: f"demo:{name}", lambda name, folder: upload(store, name, folder))


@contextmanager
def loramux(material: DemoMaterial) -> Iterator[Target]:
    with s3_server() as (endpoint, _), tempfile.TemporaryDirectory(prefix="loramux-bench-") as folder:
        setting = configure(material, endpoint, Path(folder))
        with up(setting):
            for name, adapter in material.folders.items():
                setting.publish(name, adapter)
            time.sleep(2)
            yield Target(setting.url, "demo", lambda name: f"demo:{name}", setting.publish)


SERVERS: dict[str, Callable[[DemoMaterial], Any]] = {
    "vllm": vllm_server,
    "stock": lambda material: stock_server(material, tuned=False),
    "stock-tuned": lambda material: stock_server(material, tuned=True),
    "loramux": loramux,
}


# -- writing -----------------------------------------------------------------------------------------------------------


def write(results: list[Result], options: argparse.Namespace) -> None:
    about = {"machine": platform.processor() or platform.machine(), "requests": options.requests, "engine": ENGINE}
    save(options.out, about, results=[asdict(result) for result in results])
    print(table(results))
    print(f"\nwritten: {options.out / 'summary.json'}")


def table(results: list[Result]) -> str:
    floor = next((result for result in results if result.name == "vllm"), None)
    titles = (
        "server",
        "TTFT base p50",
        "TTFT hot adapter p50 / p95",
        "added over vLLM",
        "cold p50",
        "16 at once on one cold",
        "8 cold at once",
        "old answers after re-publishing",
        "wrong answers",
    )
    rows = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for result in results:
        hot = result.hot_ttft_ms
        added = f"{hot['p50'] - floor.hot_ttft_ms['p50']:.1f} ms" if floor and result is not floor and "p50" in hot else "-"
        rows.append(
            " | ".join(
                [
                    f"| {result.name}",
                    ms(result.base_ttft_ms, "p50"),
                    f"{ms(hot, 'p50')} / {ms(hot, 'p95')}",
                    added,
                    ms(result.cold_ttft_ms, "p50"),
                    answered(result.burst),
                    answered(result.different),
                    f"{result.republished['old_answers']} of {result.republished['asked']}" if result.republished else "-",
                    str(result.wrong_answers) if result.cold_ttft_ms else "-",
                ]
            )
            + " |"
        )
    return "\n".join(rows)


def ms(figures: dict[str, float] | None, key: str) -> str:
    return f"{figures[key]:.1f} ms" if figures and key in figures else "-"


def answered(figures: dict[str, Any] | None) -> str:
    return f"{figures['answered']} of {figures['asked']}, last {figures['last_first_token_ms']:.0f} ms" if figures else "-"


if __name__ == "__main__":
    main()
