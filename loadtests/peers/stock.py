"""Stock Ray Serve LLM as its guide sets it up: adapters below a prefix of the bucket, `stock_app.py` in a process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import psutil

from loadtests.material import CONFIG, WEIGHTS, Adapter, Base
from loadtests.memory import processes_below
from loadtests.peers.asking import ask_once
from loadtests.peers.peer import CannotDo, NotPut, check_room
from loadtests.records import Tier
from loadtests.servers import BUCKET, KEYS, NotStarted, free_port, process, s3_client, wait_for_answer
from loadtests.shaping import Store
from loadtests.stock import loads_at

APP = Path(__file__).resolve().parents[1] / "stock_app.py"
PREFIX = "lora"
S3 = "s3://"


@dataclass(frozen=True)
class AdapterPath:
    """Where it finds adapters, its `dynamic_lora_loading_path`: a folder for each below a prefix of a bucket."""

    client: Any
    bucket: str
    prefix: str

    def upload(self, name: str, content: Adapter) -> None:
        for file in (CONFIG, WEIGHTS):
            self.client.upload_file(str(content.folder / file), self.bucket, f"{self.prefix}/{name}/{file}")


def adapter_path(url: str) -> AdapterPath:
    """Of `s3://bucket/prefix`, with endpoint and credentials as the environment has them. Raises NotStarted."""
    bucket, _, prefix = url.removeprefix(S3).strip("/").partition("/")
    if not url.startswith(S3) or not bucket or not prefix:
        raise NotStarted(f"{url} is no path of adapters: s3://bucket/prefix is")
    return AdapterPath(boto3.client("s3"), bucket, prefix)


class Stock:
    """It forgets nothing and says nothing of tiers: an adapter that nobody has asked for is in the store, one that was asked for
    just now is in the engine. `path` is None where nobody said where its adapters lie; `slots` is how many it keeps at once."""

    def __init__(
        self,
        name: str,
        url: str,
        base: str,
        slots: int,
        path: AdapterPath | None = None,
        pid: int | None = None,
        metrics_file: Path | None = None,
    ) -> None:
        self.name = name
        self.url = url
        self.base = base
        self.pid = pid
        self._slots = slots
        self._path = path
        self._metrics_file = metrics_file
        self._used: set[str] = set()

    def model(self, adapter: Adapter, *, alias: str | None = None) -> str:
        return f"{self.base}:{adapter.name}"

    def version(self, adapter: Adapter) -> None:
        return None

    def adapter_of(self, path: str) -> str | None:
        parts = path.split("/")
        return parts[-2] if len(parts) > 1 else None

    def can_put(self, tier: Tier) -> bool:
        return tier != "disk"

    def needs_fresh(self, tier: Tier) -> bool:
        return tier == "remote"

    def put(self, adapters: Sequence[Adapter], tier: Tier) -> None:
        """`remote` holds once for each adapter. `engine` is asked for, and right until others are asked for."""
        names = [adapter.name for adapter in adapters]
        if tier == "remote":
            if again := next((name for name in names if name in self._used), None):
                raise NotPut(again, tier, "it was used before, and this server can't be made to forget it")
        elif tier == "engine":
            check_room(adapters, self._slots)
            for adapter in adapters:
                ask_once(self.url, self.model(adapter))
        else:
            raise NotPut(names[0], tier, "this server says of no adapter that it is on its disk")
        self._used |= set(names)

    def add(self, adapter: Adapter) -> None:
        self._upload(adapter.name, adapter)

    def republish(self, adapter: Adapter, content: Adapter) -> None:
        self._upload(adapter.name, content)

    def promote(self, adapter: Adapter, content: Adapter) -> None:
        self._upload(adapter.name, content)

    def evict(self, adapter: Adapter, tier: Tier) -> None:
        raise CannotDo("stock Ray Serve LLM has no way to give an adapter up")

    def loads(self) -> float | None:
        """As Ray's multiplexing counts them over all replicas, by now: it waits for that. None where it was not started here."""
        return loads_at(self._metrics_file.read_text()) if self._metrics_file else None

    def processes(self) -> Mapping[str, Sequence[psutil.Process]]:
        return processes_below(self.pid) if self.pid else {}

    def _upload(self, name: str, content: Adapter) -> None:
        if self._path is None:
            raise CannotDo("where this server's adapters lie is not known: name it with --adapters-at s3://bucket/prefix")
        self._path.upload(name, content)


@contextmanager
def started(
    name: str, base: Base, store: Store, engine: Mapping[str, Any], folder: Path, *, tuned: bool, replicas: int = 1
) -> Iterator[Stock]:
    """Raises NotStarted. `tuned` sends every token at once instead of batches (`stream_batching_interval_ms=0`)."""
    port, metrics_file = free_port(), folder / "metrics-address"
    environment = {
        **base.environment,
        **KEYS,
        "AWS_ENDPOINT_URL": store.endpoint,
        "BENCH_PORT": str(port),
        "BENCH_BASE_ID": base.id,
        "BENCH_BASE": base.source,
        "BENCH_ACCELERATOR": base.accelerator,
        "BENCH_BUCKET": BUCKET,
        "BENCH_ENGINE": json.dumps(dict(engine)),
        "BENCH_TUNED": str(int(tuned)),
        "BENCH_REPLICAS": str(replicas),
        "BENCH_METRICS_FILE": str(metrics_file.resolve()),
    }
    with process([sys.executable, str(APP)], environment, log=folder / "server.log") as running:
        url = f"http://127.0.0.1:{port}"
        wait_for_answer(url, base.id, running)
        path = AdapterPath(s3_client(store.upstream), BUCKET, PREFIX)
        yield Stock(name, url, base.id, engine["max_loras"], path, running.pid, metrics_file)
