"""Rows of SkyRL's data sets: a ticket names a maze by seed and rules, so that all samples of a group get the same one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from training.maze import MazeSpec, evaluation_set, training_mazes
from training.spec.sections import ENV_CLASS

PLACEHOLDER = [{"role": "user", "content": "maze"}]  # the environment says what is asked

Ticket = dict[str, Any]


def training_tickets(spec: MazeSpec, count: int, first_seed: int = 0) -> list[Ticket]:
    """None of them is a maze of an evaluation set."""
    return [ticket(spec, seed, "train") for seed, _ in islice(training_mazes(spec.size, first_seed), count)]


def evaluation_tickets(spec: MazeSpec, name: str) -> list[Ticket]:
    """One for each maze of a set. Raises ValueError for rules of another size than the set's."""
    held_out = evaluation_set(name)
    if held_out.size != spec.size:
        raise ValueError(f"{name} has mazes of size {held_out.size}, the rules say {spec.size}")
    return [ticket(spec, seed, name) for seed in held_out.seeds]


def ticket(spec: MazeSpec, seed: int, source: str) -> Ticket:
    return {"prompt": PLACEHOLDER, "env_class": ENV_CLASS, "data_source": source, "seed": seed, "maze": spec.as_dict()}


def write(tickets: Iterable[Ticket], file: Path) -> None:
    """JSON lines, which SkyRL's `data.train_data` and `data.val_data` take."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(one)}\n" for one in tickets))
