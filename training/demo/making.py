"""Making models in folders: what is complete already, from the same seed and recipe, is kept. Nothing half made is ever seen
under its final name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

MARKER = ".complete.json"
RECIPE = 3  # raise it when the models would come out different: earlier ones are then made again
SHIPPED = Path(__file__).parents[1] / "base" / "weights"


def stamp(seed: int, **about: str) -> dict[str, object]:
    """What a finished folder was made from."""
    return {"recipe": RECIPE, "seed": seed, **about}


def base_digest(base_dir: Path) -> str:
    """The base's weights as sha256: an adapter belongs to exactly one base."""
    return hashlib.sha256((base_dir / "model.safetensors").read_bytes()).hexdigest()


def is_complete(folder: Path, expected: dict[str, object]) -> bool:
    """Whether the folder was finished, from what is `expected`."""
    try:
        return bool(json.loads((folder / MARKER).read_text(encoding="utf-8")) == expected)
    except (OSError, ValueError):
        return False


def partial_of(folder: Path) -> Path:
    """An empty place beside the folder to make it in; on the same disk, so that a rename ends the work."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.making")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def finish(partial: Path, folder: Path, made_from: dict[str, object]) -> None:
    """Writes the marker, last, and moves the folder to its name; an older one goes."""
    (partial / MARKER).write_text(json.dumps(made_from) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def put_base(out: Path) -> Path:
    """`out/base`: the maze base that comes with this package, copied unless it is there."""
    folder, made_from = out / "base", {"recipe": RECIPE, "weights": base_digest(SHIPPED)}
    if is_complete(folder, made_from):
        print(f"base: complete in {folder}")
        return folder
    partial = partial_of(folder)
    shutil.copytree(SHIPPED, partial, dirs_exist_ok=True)
    finish(partial, folder, made_from)
    print(f"base: copied to {folder}", flush=True)
    return folder


def make_adapters(base_dir: Path, root: Path, sentences: Mapping[str, str], seed: int) -> list[Path]:
    """`root/<name>` for each name, an adapter that says the name's sentence, made unless complete."""
    digest = base_digest(base_dir)
    stamps = {name: stamp(seed, base=digest, sentence=sentence) for name, sentence in sentences.items()}
    missing = {name: sentence for name, sentence in sentences.items() if not is_complete(root / name, stamps[name])}
    for name in [name for name in sentences if name not in missing]:
        print(f"{name}: complete in {root / name}")
    if missing:
        root.mkdir(parents=True, exist_ok=True)
        _train(base_dir, root, missing, stamps, seed)
    return [root / name for name in sentences]


def _train(base_dir: Path, root: Path, sentences: dict[str, str], stamps: dict[str, dict[str, object]], seed: int) -> None:
    prepare_torch()
    from training.demo.adapters import Fit, train_adapters

    partial = partial_of(root / "batch")
    started = time.monotonic()

    def told(name: str, result: Fit) -> None:
        nonlocal started
        finish(partial / name, root / name, stamps[name])
        now = time.monotonic()
        print(f"{name}: {result.steps} steps, {now - started:.1f} s, says {sentences[name]!r}", flush=True)
        started = now

    train_adapters(base_dir, partial, sentences, seed=seed, told=told)
    partial.rmdir()


def prepare_torch() -> None:
    """Quiet libraries, and two threads on any number of cores: the order of sums, and so the weights, would follow the number."""
    import warnings

    import torch
    from transformers.utils import logging

    torch.set_num_threads(2)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
