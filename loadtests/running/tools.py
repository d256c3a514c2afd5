"""What a real run uses: the demo base and its adapters, servers on this machine, aiperf."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from loadtests import peers, sending, workload
from loadtests.material import WORK, BadMaterial, Base, Material, engine_for, make
from loadtests.material import given as material_from
from loadtests.running.environment import describe
from loadtests.running.run import Running, Tools
from loadtests.running.warming import warm_up
from loadtests.scenario import Pool
from loadtests.servers import s3_server
from loadtests.shaping import shaped, unshaped

BASE = Base("demo", "demo")
ON_GPU = {"VLLM_NO_USAGE_STATS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
AIPERF = re.compile(r"^aiperf==([^\s\\]+)", re.MULTILINE)


class NotPrepared(Exception):
    """What a run needs can't be had; says what, and why."""


@dataclass(frozen=True)
class Given:
    """What a user names in place of ours. `url` is a server that runs already, `base` its base's id there, else the folder of a
    base to serve; `adapters` a folder of adapters to make variants of; `direct` leaves the proxy in front of the store out, where
    the store is faster: nothing is shaped then, and no fetch counted; `adapters_at` is where stock at `url` finds adapters."""

    url: str | None = None
    base: str | None = None
    adapters: Path | None = None
    accelerator: str = "cpu"
    direct: bool = False
    adapters_at: str | None = None


def tools(given: Given) -> Tools:
    """Raises NotPrepared."""
    try:
        sending.prepare()
    except (sending.SenderFailed, OSError) as error:
        raise NotPrepared(str(error)) from error
    return Tools(
        make=partial(material_of, given),
        start=partial(attached, given.url, given.adapters_at) if given.url else partial(started, given.direct),
        engine=lambda scenario: engine_for(scenario.pools, scenario.engine),
        warm_up=lambda peer, models: warm_up(peer.url, models),
        plan=workload.plan,
        send=send,
        describe=partial(describe, aiperf=aiperf_version()),
    )


def material_of(given: Given, pools: Mapping[str, Pool]) -> Material:
    """Raises NotPrepared."""
    salt = int(time.time()) if given.url else 0  # a server that outlives the run may know the bytes of an earlier one
    try:
        material = material_from(given.adapters, BASE, WORK, pools, salt) if given.adapters else make(WORK, pools, salt)
        return replace(material, base=base_of(given, material.base))
    except (BadMaterial, httpx2.HTTPError, OSError) as error:
        raise NotPrepared(f"{type(error).__name__}: {error}") from error


def base_of(given: Given, demo: Base) -> Base:
    """Raises httpx2.HTTPError where a server does not say what it serves."""
    if given.url:
        return replace(demo, id=given.base or served_at(given.url))
    if given.base is None:
        return demo
    environment = demo.environment if given.accelerator == "cpu" else ON_GPU
    return Base("base", str(Path(given.base).resolve()), given.accelerator, environment)


def served_at(url: str) -> str:
    """The id of the first base that a server lists."""
    with httpx2.Client(trust_env=False) as http:
        models = http.get(f"{url.rstrip('/').removesuffix('/v1')}/v1/models").raise_for_status().json()["data"]
    return next((model["id"] for model in models if ":" not in model["id"]), BASE.id)


@contextmanager
def started(direct: bool, name: str, base: Base, engine: Mapping[str, Any], logs: Path) -> Iterator[Running]:
    """A server of its own with an empty store. Raises peers.NotStarted."""
    in_front = unshaped if direct else shaped
    with s3_server() as (endpoint, _), in_front(endpoint) as store, peers.start(name, base, store, engine, logs) as peer:
        yield Running(peer, store)


@contextmanager
def attached(
    url: str, adapters_at: str | None, name: str, base: Base, engine: Mapping[str, Any], logs: Path
) -> Iterator[Running]:
    """A server that runs already, with a store of its own."""
    yield Running(peers.attached(name, url, base.id, slots=engine["max_loras"], adapters_at=adapters_at), None)


def send(url: str, planned: Any, models: Any, folder: Path, on_start: Any) -> list[sending.Sent]:
    return asyncio.run(sending.send(url, planned, models, folder, on_start))


def aiperf_version() -> str:
    lock = Path(sending.__file__).with_name("aiperf.lock").read_text()
    found = AIPERF.search(lock)
    return found[1] if found else ""
