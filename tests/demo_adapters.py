"""Adapters for tests: each says its own sentence. They are trained in another process, so that the test's never imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def make_adapters(base_dir: Path, out: Path, count: int, seed: int) -> dict[str, str]:
    """Trains `count` adapters, each in `out/<name>`; gives name to sentence. About 2 s each; complete ones are kept."""
    command = [sys.executable, "-m", "training.demo.sentences", str(base_dir), str(out), str(count), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the demo adapters could not be made:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return json.loads((out / "sentences.json").read_text())
