"""What all servers of a load test are given: the demo base, adapters that each say a sentence of their own, engine settings."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORK = Path(".loramux/bench")
ENGINE: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 4,
    "max_cpu_loras": 8,
    "max_lora_rank": 16,
    "max_model_len": 2048,
    "max_num_seqs": 32,
    "enforce_eager": True,
    "dtype": "float32",
}
SLOTS = 4
# As many adapters in the engine's memory as in its batch, so that a slot means the same to every server.
FEW_SLOTS = ENGINE | {"max_cpu_loras": SLOTS}
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
class Material:
    """The base's folder, adapter folders by name, and what each adapter says."""

    base: Path
    folders: dict[str, Path]
    sentences: dict[str, str]

    def says(self, name: str, text: str) -> bool:
        return self.sentences[name] == text


def make_material(work: Path, adapters: int) -> Material:
    """The demo base and `adapters` adapters with random sentences; made once, kept in `work`."""
    python = [sys.executable, "-m"]
    subprocess.run([*python, "training.demo", str(work), "--only-base"], check=True)
    making = [*python, "training.demo_sentences", str(work / "base"), str(work / "random"), str(adapters)]
    subprocess.run(making, check=True)
    sentences = json.loads((work / "random" / "sentences.json").read_text())
    return Material((work / "base").resolve(), {name: (work / "random" / name).resolve() for name in sentences}, sentences)
