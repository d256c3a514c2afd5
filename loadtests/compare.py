"""LoraMux beside its peers in one run, on this machine: `make bench`, or `python -m loadtests.compare --out DIR`.

Four servers, one after another, the same base, the same adapters, the same client: vLLM's own server (the floor), stock Ray
Serve LLM as it comes, the same with `stream_batching_interval_ms=0`, and LoraMux. Adapters of the last three come from S3.
Everything is on loopback, bounded in count and time. Writes `summary.json` and prints the table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from loadtests.servers import BIN, BUCKET, KEYS, free_port, process, s3_server, wait_for_answer

HERE = Path(__file__).resolve().parent
BURST, DIFFERENT, COLD = 16, 8, 4
ADAPTERS = COLD + 1 + DIFFERENT + 1  # cold ones, one for the burst, different ones at once, one to publish again
ENGINE = {
    "enable_lora": True,
    "max_loras": 4,
    "max_cpu_loras": 8,
    "max_lora_rank": 16,
    "max_model_len": 2048,
    "max_num_seqs": 32,
    "enforce_eager": True,
    "dtype": "float32",
}
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # All servers alike: on two cores one engine thread leaves the other core to the rest of the server.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Answer:
    """One request as the client saw it. Times in ms; `ttft_ms` is to the first data event."""

    status: int
    text: str
    ttft_ms: float
    total_ms: float


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
class Material:
    """What all servers get: the base's folder, adapter folders by name, and what each adapter says."""

    base: Path
    folders: dict[str, Path]
    sentences: dict[str, str]


@dataclass(frozen=True)
class Target:
    """A running server. `model` turns an adapter's name into its model field; `publish_again` puts other content under a name."""

    url: str
    base: str
    model: Callable[[str], str]
    publish_again: Callable[[str, Path], None] | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "results" / time.strftime("%Y-%m-%d-%H%M"))
    parser.add_argument("--work", type=Path, default=Path(".loramux/bench"), help="where base and adapters are kept")
    parser.add_argument("--requests", type=int, default=100, help="requests for each TTFT figure")
    parser.add_argument("--only", nargs="*", choices=SERVERS, default=list(SERVERS))
    options = parser.parse_args()
    material = make_material(options.work)
    results = [asyncio.run(run(name, material, options)) for name in options.only]
    write(results, options)


def make_material(work: Path) -> Material:
    """The demo base and adapters with random sentences; made once, kept in `work`."""
    python = [sys.executable, "-m"]
    subprocess.run([*python, "training.demo", str(work), "--only-base"], check=True)
    making = [*python, "training.demo_sentences", str(work / "base"), str(work / "random"), str(ADAPTERS + 1)]
    subprocess.run(making, check=True)
    sentences = json.loads((work / "random" / "sentences.json").read_text())
    return Material((work / "base").resolve(), {name: (work / "random" / name).resolve() for name in sentences}, sentences)


async def run(name: str, material: Material, options: argparse.Namespace) -> Result:
    print(f"-- {name}", flush=True)
    with ExitStack() as stack:
        target = stack.enter_context(SERVERS[name](material))
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=100)) as http:
            return await measure(name, http, target, material, options.requests)


# -- measuring ---------------------------------------------------------------------------------------------------------


async def measure(name: str, http: httpx.AsyncClient, target: Target, material: Material, requests: int) -> Result:
    result = Result(name)
    names = list(material.folders)
    hot, rest = names[0], names[1:]
    for model in (target.base, target.model(hot)):
        for _ in range(8):
            await ask(http, target, model)
    result.base_ttft_ms = spread([await ask(http, target, target.base) for _ in range(requests)])
    result.hot_ttft_ms = spread([await ask(http, target, target.model(hot)) for _ in range(requests)])
    if target.publish_again is None:
        return result
    cold = [(name, await ask(http, target, target.model(name))) for name in rest[:COLD]]
    result.cold_ttft_ms = spread([answer for _, answer in cold])
    result.burst = outcome(await asyncio.gather(*(ask(http, target, target.model(rest[COLD])) for _ in range(BURST))))
    others = rest[COLD + 1 : COLD + 1 + DIFFERENT]
    at_once = await asyncio.gather(*(ask(http, target, target.model(name)) for name in others))
    result.different = outcome(at_once)
    spoken = [*cold, *zip(others, at_once, strict=True)]
    result.wrong_answers = sum(a.status == 200 and material.sentences[n] != a.text for n, a in spoken)
    result.republished = await republish(http, target, material, hot, names[-1])
    return result


async def republish(http: httpx.AsyncClient, target: Target, material: Material, name: str, other: str) -> dict[str, Any]:
    """Other content goes under a hot name: how many of 20 answers in the next four seconds are still the old one's?"""
    assert target.publish_again
    await asyncio.to_thread(target.publish_again, name, material.folders[other])
    await asyncio.sleep(1.5)
    texts = []
    for _ in range(20):
        texts.append((await ask(http, target, target.model(name))).text)
        await asyncio.sleep(0.1)
    return {
        "old_answers": sum(text == material.sentences[name] for text in texts),
        "new_answers": sum(text == material.sentences[other] for text in texts),
        "asked": len(texts),
    }


async def ask(http: httpx.AsyncClient, target: Target, model: str) -> Answer:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": model, "messages": messages, "max_tokens": 32, "temperature": 0, "stream": True}
    began, first, text = time.perf_counter(), 0.0, []
    try:
        async with http.stream("POST", f"{target.url}/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter()
                    text += [choice["delta"].get("content") or "" for choice in json.loads(line[6:]).get("choices", [])]
            status = response.status_code
    except httpx.HTTPError:
        status = 0
    ended = time.perf_counter()
    return Answer(status, "".join(text).strip(), ((first or ended) - began) * 1e3, (ended - began) * 1e3)


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
def vllm_server(material: Material) -> Iterator[Target]:
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
def stock(material: Material, *, tuned: bool) -> Iterator[Target]:
    """Stock Ray Serve LLM with adapters under an S3 prefix, set up as its guide says."""
    with s3_server() as (endpoint, client):
        for name, folder in material.folders.items():
            upload(client, name, folder)
        port = free_port()
        environment = (
            VLLM_ENVIRONMENT
            | KEYS
            | {
                "AWS_ENDPOINT_URL": endpoint,
                "BENCH_PORT": str(port),
                "BENCH_BASE": str(material.base),
                "BENCH_BUCKET": BUCKET,
                "BENCH_ENGINE": json.dumps(ENGINE),
                "BENCH_TUNED": str(int(tuned)),
            }
        )
        with process([sys.executable, str(HERE / "stock_app.py")], environment) as running:
            url = f"http://127.0.0.1:{port}"
            wait_for_answer(url, "demo", running)
            yield Target(url, "demo", lambda name: f"demo:{name}", lambda name, folder: upload(client, name, folder))


@contextmanager
def loramux(material: Material) -> Iterator[Target]:
    with s3_server() as (endpoint, _), tempfile.TemporaryDirectory(prefix="loramux-bench-") as folder:
        port, config = free_port(), Path(folder) / "loramux.yaml"
        config.write_text(yaml.safe_dump(loramux_settings(material, endpoint, folder, port)))

        def publish(name: str, adapter: Path) -> None:
            options = ["--name", name, "--base", "demo", "--promote", "--config", str(config), "--json"]
            subprocess.run([str(BIN / "loramux"), "publish", str(adapter), *options], check=True, capture_output=True)

        with process([str(BIN / "loramux"), "up", "--no-demo", "--config", str(config)], {}, cwd=folder) as running:
            url = f"http://127.0.0.1:{port}"
            wait_for_answer(url, "demo", running)
            for name, adapter in material.folders.items():
                publish(name, adapter)
            time.sleep(2)
            yield Target(url, "demo", lambda name: f"demo:{name}", publish)


def loramux_settings(material: Material, endpoint: str, folder: str, port: int) -> dict[str, Any]:
    registry = {
        "url": f"s3://{BUCKET}/registry",
        "endpoint": endpoint,
        "access_key_id": KEYS["AWS_ACCESS_KEY_ID"],
        "secret_access_key": KEYS["AWS_SECRET_ACCESS_KEY"],
    }
    base = {"id": "demo", "source": str(material.base), "accelerator": "cpu", "engine": ENGINE, "env": VLLM_ENVIRONMENT}
    return {
        "registry": registry,
        "cache": {"dir": f"{folder}/cache"},
        "gateway": {"port": port, "num_cpus": 0.5},
        "bases": [base],
    }


SERVERS: dict[str, Callable[[Material], Any]] = {
    "vllm": vllm_server,
    "stock": lambda material: stock(material, tuned=False),
    "stock-tuned": lambda material: stock(material, tuned=True),
    "loramux": loramux,
}


def upload(client: Any, name: str, folder: Path) -> None:
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        client.upload_file(str(folder / file), BUCKET, f"lora/{name}/{file}")


# -- writing -----------------------------------------------------------------------------------------------------------


def write(results: list[Result], options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    about = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "requests": options.requests,
        "engine": ENGINE,
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    summary = {"schema_version": 1, "about": about, "results": [asdict(result) for result in results]}
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
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
