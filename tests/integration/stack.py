"""The real stack for integration tests: the product's own command, `loramux up --no-demo`, on a SeaweedFS of the test run."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import yaml

from adapters.settings import RegistrySettings
from tests.seaweed import Seaweed

READY_TIMEOUT_S = 400
SLOTS = 4
CACHE_BYTES = 200_000_000
KEEPALIVE_AFTER_S = 2
GPU_PLACES = 2

DEMO_ENGINE = {
    "enable_lora": True,
    "max_loras": GPU_PLACES,
    "max_cpu_loras": SLOTS,
    "max_lora_rank": 16,
    "max_model_len": 2048,
    "max_num_seqs": 32,
    "enforce_eager": True,
    "dtype": "float32",
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    # So small a model would fill an answer with the blanks that JSON allows everywhere.
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}
POOLING_ENGINE = {
    "runner": "pooling",
    "convert": "embed",
    "enable_lora": True,
    "max_loras": 2,
    "max_cpu_loras": 2,
    "max_lora_rank": 16,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "dtype": "float32",
}
# One thread for each engine: two engines share the two cores of a small machine with everything else.
CPU = {
    "accelerator": "cpu",
    "env": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
}
# What is published stays cold until it is asked for, so that tests have something cold.
COLD = {"prewarm_on_publish": "none"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def assert_gone(processes: list[psutil.Process], timeout_s: float = 10) -> None:
    """Raises AssertionError that names what still lives."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    left = [" ".join(process.cmdline())[:100] for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert not left, f"processes were left: {left}"


class Stack:
    """A running LoraMux: `url`, its registry, its store, and its processes to kill."""

    def __init__(
        self, folder: Path, seaweed: Seaweed, bases: dict[str, Path], *, prefix: str = "stack", more: dict[str, Any] | None = None
    ) -> None:
        """`prefix` keeps stacks of one run apart in the store; `more` are further settings of each base."""
        port = free_port()
        self.folder = folder
        self.seaweed = seaweed
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        store = seaweed.settings(f"{prefix}/registry", retry_timeout_s=1.0, connect_timeout_s=1.0, request_timeout_s=10.0)
        self.registry = RegistrySettings.model_validate(store.model_dump() | {"poll_interval_s": 0.5})
        self.drop = seaweed.direct(f"{prefix}/drop")  # around the proxy, so that looking there counts nowhere
        self.config = folder / "loramux.yaml"
        self.config.write_text(yaml.safe_dump(self._settings(bases, port, more or {})))
        self._process: subprocess.Popen[bytes] | None = None

    def _settings(self, bases: dict[str, Path], port: int, more: dict[str, Any]) -> dict[str, Any]:
        registry = self.registry.model_dump(mode="json")
        registry["secret_access_key"] = self.registry.secret_access_key.get_secret_value()
        drop = self.drop.model_dump(include={"url", "endpoint"}) | {"base": "demo", "interval_s": 0.5, "settle_s": 1}
        engines = {"demo": DEMO_ENGINE, "embed": POOLING_ENGINE}
        common = CPU | COLD | more
        return {
            "registry": registry,
            **({"drop": drop} if "demo" in bases else {}),
            "cache": {"dir": str(self.folder / "cache"), "budget_bytes": CACHE_BYTES},
            "gateway": {"port": port, "num_cpus": 0.5, "max_body_bytes": 4_000_000, "keepalive_after_s": KEEPALIVE_AFTER_S},
            "bases": [{"id": name, "source": str(path), "engine": engines[name], **common} for name, path in bases.items()],
        }

    def start(self) -> None:
        log = (self.folder / "up.log").open("wb")
        loramux = Path(sys.executable).with_name("loramux")
        command = [str(loramux), "up", "--no-demo", "--config", str(self.config)]
        self._process = subprocess.Popen(
            command,
            cwd=self.folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        self._wait()

    def _wait(self) -> None:
        assert self._process
        deadline = time.monotonic() + READY_TIMEOUT_S
        while "LoraMux is up" not in self.log():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the stack did not start:\n{self.log()[-4000:]}")
            time.sleep(0.2)

    def log(self) -> str:
        return (self.folder / "up.log").read_text(errors="replace")

    def stop(self) -> None:
        """As Ctrl-C does. Raises AssertionError if a process is left."""
        if not self._process or self._process.poll() is not None:
            return
        family = self.family()
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)
        assert "stopped" in self.log(), self.log()[-1000:]
        assert_gone(family)

    def crash(self) -> list[psutil.Process]:
        """Kills the command without letting it clean up; gives what it had started."""
        assert self._process
        family = self.family()
        self._process.kill()
        self._process.wait(10)
        return family

    def family(self) -> list[psutil.Process]:
        assert self._process
        return psutil.Process(self._process.pid).children(recursive=True)

    def ray_address(self) -> str:
        """Where the cluster of this run can be joined."""
        words = next(p.cmdline() for p in self.family() if p.name() == "raylet")
        return next(word.removeprefix("--gcs-address=") for word in words if re.fullmatch(r"--gcs-address=[\w.]+:\d+", word))

    def replica(self, base: str) -> psutil.Process:
        """The process of the base's replica."""
        wanted = f"Replica:{base}"
        return next(p for p in self.family() if wanted in " ".join(p.cmdline()))

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return json.load(response)

    def residency(self, base: str = "demo", *, audit: bool = False) -> dict[str, Any]:
        return self.get(f"/registry/v1/residency?audit={audit}")[base]

    def digest(self, name: str) -> str:
        """The digest of version 1 of an adapter of `demo`."""
        rows = self.get("/registry/v1/adapters?base=demo")["adapters"]
        return next(row for row in rows if row["name"] == name)["versions"][0]["digest"]

    def alone(self, names: Iterable[str]) -> list[str]:
        """Those of the adapters, in order, whose content no other has: what shares its files can't be taken off the disk."""
        rows = self.get("/registry/v1/adapters?base=demo")["adapters"]
        shared = Counter(version["digest"] for row in rows for version in row["versions"])
        first = {row["name"]: row["versions"][0]["digest"] for row in rows}
        return [name for name in sorted(names) if shared[first[name]] == 1]

    def on_disk(self, name: str) -> Path:
        """Where the node cache keeps that version, if it does."""
        return self.folder / "cache" / self.digest(name)

    def evict(self, name: str, tier: str) -> None:
        """Takes that version out of the engine, for `remote` off the disk as well, as soon as nobody uses it."""
        body = json.dumps({"base": "demo", "name": name, "version": 1, "tier": tier}).encode()
        request = urllib.request.Request(f"{self.url}/registry/v1/evict", body, {"content-type": "application/json"})

        def is_done() -> bool:
            with urllib.request.urlopen(request, timeout=30) as response:
                return all(row["reason"] is None for row in json.load(response)["replicas"])

        self.wait_until(is_done, timeout_s=20)

    def settle(self, timeout_s: float = 120) -> None:
        """Waits until all is quiet and the engines list just what our tables do. Fails the test when that does not come true."""
        self.wait_until(lambda: all(map(_agrees, self.get("/registry/v1/residency?audit=true").values())), timeout_s)

    def wait_until(self, condition: Any, timeout_s: float = 10) -> None:
        """Polls a condition about the running stack; fails the test when it does not come true."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if condition():
                    return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.05)
        raise AssertionError(f"not true within {timeout_s} s; residency {self.residency()}")


def _agrees(base: dict[str, Any]) -> bool:
    """Whether a base has replicas, all of which answered, nothing under way, and an engine that holds what the table says."""
    answered = base["replicas"] and all(row["replica"] for row in base["replicas"])
    return bool(answered) and not base["requests"] and base["int_ids"] == base["engine_ids"]
