"""LoraMux as its users run it: settings in a file, `loramux up`, commands, and its HTTP routes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import yaml

from loadtests.material import ENGINE, VLLM_ENVIRONMENT, DemoMaterial
from loadtests.servers import BIN, BUCKET, KEYS, free_port, process, wait_for_answer, wait_until

BASE = "demo"


@dataclass(frozen=True)
class Setting:
    """A product that is not running yet: its settings lie in `config`; `url` will be its address."""

    config: Path
    url: str

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs `loramux WORDS` over the same settings, whatever it returns."""
        line = [str(BIN / "loramux"), *words, "--config", str(self.config)]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    def must(self, *words: str) -> str:
        """The same; one that fails ends the load test. Returns what the command printed."""
        done = self.command(*words)
        if done.returncode:
            raise SystemExit(f"loramux {words[0]} failed: {done.stderr[-2000:]}")
        return done.stdout

    def publish(self, name: str, folder: Path, *, promote: bool = True) -> None:
        self.must("publish", str(folder), "--name", name, "--base", BASE, *(["--promote"] if promote else []))

    def evict(self, name: str, version: int) -> None:
        """Out of every engine and off every node's disk, through the route; waits until no request holds it."""
        body = {"base": BASE, "name": name, "version": version, "tier": "remote"}

        def given_up() -> None:
            with httpx2.Client(trust_env=False) as http:
                rows = http.post(f"{self.url}/registry/v1/evict", json=body).raise_for_status().json()["replicas"]
            if any(row["reason"] for row in rows):
                raise TimeoutError(f"a replica keeps it: {rows}")

        wait_until(given_up, f"giving up {name}@{version}")

    def publish_all(self, material: DemoMaterial, names: Iterable[str]) -> None:
        """Two at a time: a command is mostly its own start."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda name: self.publish(name, material.folders[name]), names))


def configure(
    material: DemoMaterial,
    endpoint: str,
    folder: Path,
    *,
    prefix: str = "registry",
    engine: dict[str, Any] = ENGINE,
    replicas: int = 1,
    sweep_interval_s: float | None = None,
) -> Setting:
    """Writes `folder/loramux.yaml` for a registry under `prefix` of the bucket at `endpoint`."""
    registry: dict[str, Any] = {
        "url": f"s3://{BUCKET}/{prefix}",
        "endpoint": endpoint,
        "access_key_id": KEYS["AWS_ACCESS_KEY_ID"],
        "secret_access_key": KEYS["AWS_SECRET_ACCESS_KEY"],
    }
    if sweep_interval_s is not None:
        registry["sweep_interval_s"] = sweep_interval_s
    base = {"id": BASE, "source": str(material.base), "accelerator": "cpu", "engine": engine, "env": VLLM_ENVIRONMENT}
    gateway = {"port": free_port(), "num_cpus": 0.5}
    bases = [base | {"replicas": replicas}]
    settings = {"registry": registry, "cache": {"dir": f"{folder}/cache"}, "gateway": gateway, "bases": bases}
    config = folder / "loramux.yaml"
    config.write_text(yaml.safe_dump(settings))
    return Setting(config, f"http://127.0.0.1:{gateway['port']}")


@contextmanager
def up(setting: Setting) -> Iterator[int]:
    """The running product: the id of its first process."""
    loramux = [str(BIN / "loramux"), "up", "--no-demo", "--config", str(setting.config)]
    with process(loramux, {}, cwd=str(setting.config.parent)) as running:
        wait_for_answer(setting.url, BASE, running)
        yield running.pid


def wait_for_models(url: str, count: int) -> None:
    """Until the gateway lists `count` models, the base among them."""

    def listed() -> None:
        with httpx2.Client(trust_env=False) as http:
            seen = len(http.get(f"{url}/v1/models").raise_for_status().json()["data"])
        if seen < count:
            raise TimeoutError(f"{seen} of {count} models are listed")

    wait_until(listed, f"the list of {count} models")


def wait_for_replicas(url: str, count: int) -> None:
    """Until `count` replicas of the base report what they hold; those of one replica are not told apart from none."""

    def reported() -> None:
        with httpx2.Client(trust_env=False) as http:
            view = http.get(f"{url}/registry/v1/residency").raise_for_status().json()
        seen = len(replicas_of(view)) or 1
        if seen < count:
            raise TimeoutError(f"{seen} of {count} replicas are there")

    wait_until(reported, f"{count} replicas")


def base_view(residency: dict[str, Any]) -> dict[str, Any]:
    """The base's part of what `/registry/v1/residency` shows."""
    bases = residency.get("bases", residency)
    return next(view for view in (bases if isinstance(bases, list) else [bases[BASE]]) if view.get("base", BASE) == BASE)


def replicas_of(residency: dict[str, Any]) -> list[dict[str, Any]]:
    return base_view(residency).get("replicas", [])


def timed_s(work: Any) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began
