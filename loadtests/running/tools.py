"""What a real run uses: the demo base and its adapters, servers on this machine, aiperf."""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from loadtests import peers, sending, workload
from loadtests.material import WORK, BadMaterial, Base, Material, engine_for, given, make
from loadtests.running.environment import describe
from loadtests.running.run import Running, Tools
from loadtests.running.warming import warm_up
from loadtests.scenario import Pool
from loadtests.servers import s3_server
from loadtests.shaping import shaped

AIPERF = re.compile(r"^aiperf==([^\s\\]+)", re.MULTILINE)


class NotPrepared(Exception):
    """What a run needs can't be had; says what, and why."""


@dataclass(frozen=True)
class Served:
    """What is served where it is not the demo: the base's id, its folder, what it runs on, and a folder of adapters to make
    variants of."""

    base: Base
    adapters: Path


def tools(url: str | None = None, served: Served | None = None) -> Tools:
    """`url` is a server that runs already and is asked in place of one of ours. Raises NotPrepared."""
    try:
        sending.prepare()
    except (sending.SenderFailed, OSError) as error:
        raise NotPrepared(str(error)) from error
    return Tools(
        # A server that outlives the run may know the bytes of an earlier one.
        make=partial(material_of, served, salt=int(time.time()) if url else 0),
        start=partial(attached, url) if url else started,
        engine=lambda scenario: engine_for(scenario.pools, scenario.engine),
        warm_up=lambda peer, models: warm_up(peer.url, models),
        plan=workload.plan,
        send=send,
        describe=partial(describe, aiperf=aiperf_version()),
    )


def material_of(served: Served | None, pools: Mapping[str, Pool], salt: int) -> Material:
    """Raises NotPrepared."""
    try:
        return given(served.adapters, served.base, WORK, pools, salt) if served else make(WORK, pools, salt)
    except (BadMaterial, subprocess.CalledProcessError, OSError) as error:
        raise NotPrepared(f"adapters: {error}") from error


@contextmanager
def started(name: str, base: Base, engine: Mapping[str, Any], logs: Path) -> Iterator[Running]:
    """A server of its own with an empty store behind the shaped proxy. Raises peers.NotStarted."""
    with s3_server() as (endpoint, _), shaped(endpoint) as store, peers.start(name, base, store, dict(engine), logs) as peer:
        yield Running(peer, store)


@contextmanager
def attached(url: str, name: str, base: Base, engine: Mapping[str, Any], logs: Path) -> Iterator[Running]:
    """A server that runs already, with a store of its own."""
    yield Running(peers.attached(name, url, base.id, slots=engine["max_loras"]), None)


def send(url: str, planned: Any, models: Any, folder: Path, on_start: Any) -> list[sending.Sent]:
    return asyncio.run(sending.send(url, planned, models, folder, on_start))


def aiperf_version() -> str:
    lock = Path(sending.__file__).with_name("aiperf.lock").read_text()
    found = AIPERF.search(lock)
    return found[1] if found else ""
