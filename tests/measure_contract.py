"""How long the publish contract takes, and how much memory: `python -m tests.measure_contract [MEGABYTES]`. Prints a table.

Times are of one process on whatever machine it runs on, so nothing is asserted here; the aims stand beside the figures.
"""

from __future__ import annotations

import json
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from adapters.contract import inspect, prepare
from adapters.types import BaseContract, ModuleShape

LAYERS, HIDDEN, INNER, KV, RANK = 36, 2560, 9728, 1024, 16
SHAPES = {
    "self_attn.q_proj": (HIDDEN, 4096),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (4096, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}


def contract() -> BaseContract:
    """The modules of a model of four billion parameters."""
    modules = {f"model.layers.{layer}.{name}": ModuleShape(*widths) for layer in range(LAYERS) for name, widths in SHAPES.items()}
    return BaseContract("measured", "f" * 64, modules, max_rank=64)


def write_adapter(folder: Path, megabytes: float, **fields: object) -> None:
    """All modules in float32, as many ranks as fit."""
    widths = sum(width_in + width_out for width_in, width_out in SHAPES.values()) * LAYERS * 4
    rank = max(1, min(64, int(megabytes * 1e6 / widths)))
    names = sorted({name.rpartition(".")[2] for name in SHAPES})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 3 * rank, "target_modules": names, **fields}
    header: dict[str, object] = {}
    offset = 0
    for layer in range(LAYERS):
        for name, (width_in, width_out) in SHAPES.items():
            for side, shape in (("A", (rank, width_in)), ("B", (width_out, rank))):
                size = shape[0] * shape[1] * 4
                key = f"base_model.model.model.layers.{layer}.{name}.lora_{side}.weight"
                header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
                offset += size
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    random = np.random.default_rng(0)
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, offset // 4, 2**20):
            file.write(random.standard_normal(min(2**20, offset // 4 - start), np.float32).tobytes())


def hostile_headers(folder: Path) -> dict[str, bytes]:
    """Weights files that are nothing but a header with bad intent."""
    row = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}
    return {
        "a length of 2**62": struct.pack("<Q", 2**62) + b"{",
        "no bottom": struct.pack("<Q", 60_000) + b"[" * 60_000,
        "a tensor larger than the file": _only_header(json.dumps({"a": row}).encode()),
        "one key a thousand times": _only_header(b"{" + b",".join([b'"a":{}'] * 1000) + b"}"),
        "four thousand empty rows": _only_header(json.dumps({f"x{number}": {} for number in range(4000)}).encode()),
    }


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _only_header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _child(folder: Path) -> None:
    """Prepares once in a process of its own, so that its peak of memory is its own."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = timed(lambda: prepare(folder / "in", contract(), workdir=folder / "out"))
    print(json.dumps({"seconds": seconds, "before": before, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))


def main(megabytes: float) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_adapter(folder / "in", megabytes)
        size = (folder / "in" / "adapter_model.safetensors").stat().st_size / 1e6
        out = subprocess.run([sys.executable, "-m", __spec__.name, "--child", place], capture_output=True, text=True, check=True)
        figures = json.loads(out.stdout)
        print(f"inspect, {size:.0f} MB: {timed(lambda: inspect(folder / 'in', contract())):.2f} s (aim: 2 s)")
        print(
            f"prepare, {size:.0f} MB: {figures['seconds']:.2f} s (aim: 2 s), peak {figures['peak'] / 1024:.0f} MB (aim: 300 MB)"
        )
        patterns = dict.fromkeys(contract().modules, RANK)
        write_adapter(folder / "patterns", 10, rank_pattern=patterns, alpha_pattern=patterns)
        print(f"a pattern for each module: {timed(lambda: inspect(folder / 'patterns', contract())):.2f} s")
        for name, data in hostile_headers(folder).items():
            (folder / "in" / "adapter_model.safetensors").write_bytes(data)
            seconds = min(timed(lambda: inspect(folder / "in", contract())) for _ in range(3))
            print(f"a header with {name}: {seconds * 1000:.1f} ms (aim: 10 ms)")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(Path(sys.argv[2]))
    else:
        main(float(sys.argv[1]) if len(sys.argv) > 1 else 175)
