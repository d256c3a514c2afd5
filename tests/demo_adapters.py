"""Adapters for tests: each says its own sentence. They are trained in another process, so that the test's never imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from training.demo_text import random_sentence

MAKE = """
import json, sys
from pathlib import Path
from training.demo import make_adapters
make_adapters(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]), seed=int(sys.argv[4]))
"""


def sentences_of(count: int, seed: int) -> dict[str, str]:
    """Names and the sentences that their adapters say, the same for the same seed."""
    return {f"demo-{seed}-{index}": random_sentence(1000 * seed + index) for index in range(count)}


def make_base(out: Path, seed: int = 0) -> Path:
    """The demo base, in `out/base`; kept if it is there. Takes about 10 s."""
    _run("-m", "training.demo", str(out), "--only-base", "--seed", str(seed))
    return out / "base"


def make_adapters(base_dir: Path, out: Path, count: int, seed: int) -> dict[str, str]:
    """Trains `count` adapters, each in `out/<name>`; gives name to sentence. Takes about 2 s each; complete ones are kept."""
    sentences = sentences_of(count, seed)
    _run("-c", MAKE, str(base_dir), str(out), json.dumps(sentences), str(seed))
    return sentences


def _run(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the demo models could not be made:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
