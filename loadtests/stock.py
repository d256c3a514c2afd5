"""Stock Ray Serve LLM as a peer: `stock_app.py` in a process of its own, adapters in the bucket, loads as it counts them."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from loadtests.material import ENGINE, VLLM_ENVIRONMENT, DemoMaterial
from loadtests.servers import BUCKET, KEYS, free_port, process, wait_for_answer

HERE = Path(__file__).resolve().parent
METRICS_AGE_S = 12  # the node's numbers are up to 10 s old
LOADS = re.compile(r"^ray_serve_multiplexed_models_load_counter(?:_total)?\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Stock:
    """A running one: its address, and the file that names where its node shows its metrics."""

    url: str
    metrics_file: Path

    def loads(self) -> float:
        """Adapters loaded so far, over all replicas, as Ray's multiplexing counts them; waits until the number is of now."""
        return loads_at(self.metrics_file.read_text())


def loads_at(metrics_url: str) -> float:
    """Adapters loaded so far by the replicas of a node; waits until the number is of now."""
    time.sleep(METRICS_AGE_S)
    with httpx2.Client(trust_env=False) as http:
        text = http.get(metrics_url).raise_for_status().text
    return sum(float(value) for value in LOADS.findall(text))


@contextmanager
def stock(
    material: DemoMaterial, endpoint: str, *, tuned: bool, engine: dict[str, Any] = ENGINE, replicas: int = 1
) -> Iterator[Stock]:
    """`tuned` holds no chunk back (`stream_batching_interval_ms=0`). Adapters come from `lora/` in the bucket at `endpoint`."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="loramux-bench-stock-") as folder:
        metrics_file = Path(folder) / "metrics-address"
        environment = (
            VLLM_ENVIRONMENT
            | KEYS
            | {
                "AWS_ENDPOINT_URL": endpoint,
                "BENCH_PORT": str(port),
                "BENCH_BASE_ID": "demo",
                "BENCH_BASE": str(material.base),
                "BENCH_ACCELERATOR": "cpu",
                "BENCH_BUCKET": BUCKET,
                "BENCH_ENGINE": json.dumps(engine),
                "BENCH_TUNED": str(int(tuned)),
                "BENCH_REPLICAS": str(replicas),
                "BENCH_METRICS_FILE": str(metrics_file),
            }
        )
        with process([sys.executable, str(HERE / "stock_app.py")], environment) as running:
            url = f"http://127.0.0.1:{port}"
            wait_for_answer(url, "demo", running)
            yield Stock(url, metrics_file)


def upload_all(client: Any, material: DemoMaterial, names: Iterable[str]) -> None:
    for name in names:
        upload(client, name, material.folders[name])


def upload(client: Any, name: str, folder: Path) -> None:
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        client.upload_file(str(folder / file), BUCKET, f"lora/{name}/{file}")
