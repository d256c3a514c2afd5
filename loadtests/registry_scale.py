"""A registry of thousands of adapters, on this machine: `python -m loadtests.registry_scale --out DIR`.

Fills an S3 server on loopback with adapters of three versions each (copies of real, published ones under other names), lets the
product build its index, then starts it and asks: how long does a start take beside one with an empty registry, how much memory
has the gateway, how fast are lists, resolving, publishing and promoting, and what do invented names cost beside as many
requests for one name that nobody has (the control: same route, same answer). Start and resolving stand beside those of a registry
that holds one adapter. Writes `summary.json` and prints a table beside the aims.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from loadtests.figures import Figure, new_results, percentile, write
from loadtests.material import WORK, DemoMaterial, make_material
from loadtests.product import Setting, configure, timed_s, up
from loadtests.servers import BUCKET, s3_server

VERSIONS = 3
SETTLE_S = 15
SWEEP_INTERVAL_S = 3600  # only the start sweeps: its calls and memory are told apart from those of requests
METRICS_AGE_S = 12  # the node's numbers are up to 10 s old
PREFIX = "registry"
SEED = "seed"
METHOD = re.compile(r'method="([^"]+)"')
RESOLVE = re.compile(r"resolve;dur=([0-9.]+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=new_results("registry"))
    parser.add_argument("--work", type=Path, default=WORK, help="where base and adapters are kept")
    parser.add_argument("--adapters", type=int, default=10_000)
    parser.add_argument("--invented", type=int, default=100_000, help="names that no adapter has, asked for")
    parser.add_argument("--requests", type=int, default=500, help="requests behind each figure")
    options = parser.parse_args()
    material = make_material(options.work, VERSIONS + 1)
    figures = asyncio.run(run(material, options))
    write(options.out, {"adapters": options.adapters, "versions": VERSIONS, "requests": options.requests}, figures)


async def run(material: DemoMaterial, options: argparse.Namespace) -> list[Figure]:
    with s3_server() as (endpoint, client), tempfile.TemporaryDirectory(prefix="loramux-scale-") as folder:
        small = await of_one_adapter(material, endpoint, Path(folder), options.requests)
        print(f"-- start with a registry of one adapter: {small.started_s:.1f} s", flush=True)
        setting = configure(material, endpoint, Path(folder), prefix=PREFIX, sweep_interval_s=SWEEP_INTERVAL_S)
        figures = fill(client, material, setting, options.adapters)
        with started(setting) as started_s:
            figures.append(Figure("start of the product with it", started_s, "s"))
            figures.append(Figure("the same over that with one adapter", started_s / small.started_s, "times", 1.25))
            figures += await ask(setting, material, small, options)
        return figures


@dataclass(frozen=True)
class Small:
    """The product over a registry of one adapter: seconds of its start, ms of its resolving."""

    started_s: float
    resolve_ms: list[float]


async def of_one_adapter(material: DemoMaterial, endpoint: str, folder: Path, requests: int) -> Small:
    setting = configure(material, endpoint, folder, prefix="small", sweep_interval_s=SWEEP_INTERVAL_S)
    publish_seed(material, setting)
    with started(setting) as started_s:
        async with httpx.AsyncClient(base_url=setting.url, timeout=120) as http:
            return Small(started_s, await resolving(http, [f"demo:{SEED}@2"] * requests))


# -- filling -----------------------------------------------------------------------------------------------------------


def fill(client: Any, material: DemoMaterial, setting: Setting, adapters: int) -> list[Figure]:
    """Publishes one adapter, copies its manifests and head under other names, and lets the product index them."""
    publish_seed(material, setting)
    documents = seed_documents(client)
    names = [f"team-{number % 100:02d}/adapter-{number:05d}" for number in range(adapters)]
    began = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        for done, _ in enumerate(pool.map(lambda name: copy_under(client, documents, name), names)):
            if done % 2000 == 0:
                print(f"-- {done} of {adapters} adapters written, {time.monotonic() - began:.0f} s", flush=True)
    indexing = timed_s(lambda: setting.must("sweep"))
    again = timed_s(lambda: setting.must("sweep"))
    print(f"-- indexed in {indexing:.0f} s, looked through again in {again:.1f} s", flush=True)
    shards = [row["Size"] for row in listed(client, f"{PREFIX}/index/")]
    return [
        Figure(f"index of {adapters} new adapters x {VERSIONS} versions built", indexing, "s"),
        Figure("sweep that finds nothing to do", again, "s"),
        Figure("largest shard, rewritten by a publication", max(shards) / 1e3, "kB", 1000),
    ]


def publish_seed(material: DemoMaterial, setting: Setting) -> None:
    for number, folder in enumerate(list(material.folders.values())[:VERSIONS]):
        setting.publish(SEED, folder, promote=number == 0)


def seed_documents(client: Any) -> dict[str, str]:
    """The documents of the published adapter, by what follows its name in the key."""
    root = f"{PREFIX}/adapters/demo/{SEED}/"
    return {row["Key"].removeprefix(root): read(client, row["Key"]) for row in listed(client, root)}


def copy_under(client: Any, documents: dict[str, str], name: str) -> None:
    """The same versions under another name: keys and the name inside differ, digests and files are shared."""
    for tail, text in documents.items():
        body = text.replace(f'"{SEED}"', json.dumps(name))
        client.put_object(Bucket=BUCKET, Key=f"{PREFIX}/adapters/demo/{name}/{tail}", Body=body.encode())


def listed(client: Any, prefix: str) -> Iterator[dict[str, Any]]:
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix):
        yield from page.get("Contents", [])


def read(client: Any, key: str) -> str:
    return client.get_object(Bucket=BUCKET, Key=key)["Body"].read().decode()


# -- asking ------------------------------------------------------------------------------------------------------------


async def ask(setting: Setting, material: DemoMaterial, small: Small, options: argparse.Namespace) -> list[Figure]:
    gateway = gateway_process()
    numbers = random.Random(1).choices(range(options.adapters), k=options.requests)
    async with httpx.AsyncClient(base_url=setting.url, timeout=120, limits=httpx.Limits(max_connections=32)) as http:
        models = await spread(options.requests, lambda: get(http, "/v1/models"))
        count = len((await http.get("/v1/models")).json()["data"])
        page = await spread(options.requests, lambda: get(http, "/v1/models?limit=100"))
        resolve = await resolving(http, [f"demo:team-{n % 100:02d}/adapter-{n:05d}@2" for n in numbers])
        publish, seen = await publishing(http, setting, material)
        promote = timed_s(lambda: setting.must("promote", "demo:team-00/adapter-00000", "2", "--now"))
        fresh = (await spread(1, lambda: get(http, "/v1/models")))[0]
        settled = await settled_mb(gateway)
        control = await cost_of(http, gateway, ["demo:team-00/ghost"] * options.invented)
        invented = await cost_of(http, gateway, [f"demo:team-{n % 100:02d}/ghost-{n:06d}" for n in range(options.invented)])
    listing = timed_s(lambda: setting.must("list", "--json"))
    filtered = timed_s(lambda: setting.must("list", "team-07/*", "--json"))
    return [
        Figure(f"/v1/models, {count} entries, p50", statistics.median(models), "ms"),
        Figure("/v1/models, p99", percentile(models, 0.99), "ms", 100),
        Figure("/v1/models, the first after a change", fresh, "ms", 100),
        Figure("/v1/models?limit=100, p99", percentile(page, 0.99), "ms", 100),
        Figure("resolve, p50 (server-timing)", statistics.median(resolve), "ms", 0.1),
        Figure("resolve, p99", percentile(resolve, 0.99), "ms", 0.1),
        Figure("control: resolve with one adapter in the registry, p50", statistics.median(small.resolve_ms), "ms"),
        Figure("control: the same, p99", percentile(small.resolve_ms, 0.99), "ms"),
        Figure("loramux publish, the command", publish, "s"),
        Figure("publication, from the command's end until the gateway shows it", seen, "s", 1.5),
        Figure("loramux promote --now, the command", promote, "s"),
        Figure("loramux list, the command", listing, "s"),
        Figure("loramux list 'team-07/*', the command", filtered, "s"),
        Figure("memory of the gateway's process", settled, "MB"),
        Figure(f"control: more memory after {options.invented} requests for one unknown name", control.grown_mb, "MB"),
        Figure("control: listings a second meanwhile (polls)", control.listings_per_s, "1/s"),
        Figure(f"more memory after {options.invented} invented names then", invented.grown_mb, "MB", 5),
        Figure("listings a second meanwhile (polls)", invented.listings_per_s, "1/s"),
        Figure("store calls meanwhile that were no listings", invented.other_calls, "calls", 0),
    ]


async def resolving(http: httpx.AsyncClient, models: list[str]) -> list[float]:
    """Ms to resolve each name, as the gateway measures it, one request after another."""
    times = []
    for model in models:
        answer = await http.post("/v1/completions", json={"model": model, "prompt": "Hello", "max_tokens": 1})
        answer.raise_for_status()
        times.append(float(RESOLVE.search(answer.headers["server-timing"])[1]))  # type: ignore[index]
    return times


async def publishing(http: httpx.AsyncClient, setting: Setting, material: DemoMaterial) -> tuple[float, float]:
    """Seconds of the command, and from its end until the gateway shows the new version."""
    folder = list(material.folders.values())[VERSIONS]
    took_s = timed_s(lambda: setting.publish("team-00/adapter-00000", folder, promote=False))
    began = time.monotonic()
    where = {"base": "demo", "name": "team-00/adapter-00000"}
    for _ in range(1000):
        if len((await http.get("/registry/v1/adapter", params=where)).json()["versions"]) > VERSIONS:
            return took_s, time.monotonic() - began
        await asyncio.sleep(0.02)
    raise SystemExit("the gateway never showed the new version")


@dataclass(frozen=True)
class Cost:
    """What some requests left behind: memory of the gateway, and store calls of all the node's processes meanwhile."""

    grown_mb: float
    listings_per_s: float
    other_calls: float


async def cost_of(http: httpx.AsyncClient, gateway: psutil.Process, models: list[str]) -> Cost:
    """Asks for models that don't exist, 16 at a time."""
    before_mb, before, began = rss_mb(gateway), await store_calls(http), time.monotonic()
    left = iter(models)

    async def work() -> None:
        for model in left:
            assert (await http.post("/v1/completions", json={"model": model, "prompt": "Hello"})).status_code == 404

    await asyncio.gather(*(work() for _ in range(16)))
    grown_mb = rss_mb(gateway) - before_mb
    await asyncio.sleep(METRICS_AGE_S)
    calls = await store_calls(http)
    calls.subtract(before)
    return Cost(grown_mb, calls.pop("list", 0) / (time.monotonic() - began), sum(calls.values()))


async def store_calls(http: httpx.AsyncClient) -> Counter[str]:
    """The calls to the store that the node's processes have counted, by method."""
    calls: Counter[str] = Counter()
    for line in (await http.get("/metrics")).text.splitlines():
        if line.startswith("loramux_store_calls_total{"):
            calls[METHOD.search(line)[1]] += round(float(line.rpartition(" ")[2]))  # type: ignore[index]
    return calls


async def get(http: httpx.AsyncClient, path: str) -> None:
    (await http.get(path)).raise_for_status()


async def spread(number: int, call: Callable[[], Awaitable[None]]) -> list[float]:
    """Ms of each call, one after another."""
    times = []
    for _ in range(number):
        began = time.perf_counter()
        await call()
        times.append((time.perf_counter() - began) * 1e3)
    return times


def gateway_process() -> psutil.Process:
    return next(p for p in psutil.process_iter(["cmdline"]) if "Gateway" in " ".join(p.info["cmdline"] or [])[:200])


def rss_mb(process: psutil.Process) -> float:
    return process.memory_info().rss / 1e6


async def settled_mb(process: psutil.Process) -> float:
    """The memory once it stays where it is: the sweep of the start lists every adapter."""
    most = rss_mb(process)
    for _ in range(8):
        await asyncio.sleep(SETTLE_S)
        now = rss_mb(process)
        if now < most + 1:
            return now
        most = now
    return most


@contextmanager
def started(setting: Setting) -> Iterator[float]:
    """The running product: the seconds until it answered."""
    began = time.monotonic()
    with up(setting):
        yield time.monotonic() - began


if __name__ == "__main__":
    main()
