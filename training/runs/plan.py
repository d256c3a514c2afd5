"""What the loop needs to know of a specification: how much, in which order, how often, and where to."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from training.maze import EvaluationSet, MazeSpec
from training.trajectory import Sampling, Task, dice

Decoding = Literal["sampled", "greedy"]
ResumeMode = Literal["none", "latest", "from_path"]


class BadPlan(ValueError):
    """A run that cannot be; names the field, the value and the limit."""


@dataclass(frozen=True, slots=True)
class DataOrder:
    """Which mazes a step trains on: each epoch is the whole list in an order of its own, what does not fill a batch is left out.

    A function of the step and of nothing else, so that a position in it is a step's number. Raises BadPlan.
    """

    maze_seeds: tuple[int, ...]
    train_batch_size: int
    epochs: int
    seed: int
    most_steps: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.train_batch_size <= len(self.maze_seeds):
            limit = f"from 1 to the number of training mazes, {len(self.maze_seeds)}"
            raise BadPlan(f"trainer.train_batch_size is {self.train_batch_size}: {limit}")
        if self.epochs < 1:
            raise BadPlan(f"trainer.epochs is {self.epochs}: at least 1")

    @property
    def steps_per_epoch(self) -> int:
        return len(self.maze_seeds) // self.train_batch_size

    @property
    def total_steps(self) -> int:
        steps = self.epochs * self.steps_per_epoch
        return min(steps, self.most_steps or steps)

    def epoch_of(self, step: int) -> int:
        """Steps and epochs count from 1."""
        return (step - 1) // self.steps_per_epoch + 1

    def ends_epoch(self, step: int) -> bool:
        return step % self.steps_per_epoch == 0

    def maze_seeds_at(self, step: int) -> tuple[int, ...]:
        order = list(self.maze_seeds)
        random.Random(f"{self.seed} {self.epoch_of(step)}").shuffle(order)
        begin = (step - 1) % self.steps_per_epoch * self.train_batch_size
        return tuple(order[begin : begin + self.train_batch_size])


def training_tasks(order: DataOrder, step: int, n_samples_per_prompt: int) -> list[Task]:
    """A group's samples lie beside each other."""
    return [
        Task(maze_seed, sample, dice(order.seed, step, maze_seed, sample))
        for maze_seed in order.maze_seeds_at(step)
        for sample in range(n_samples_per_prompt)
    ]


def evaluation_tasks(held_out: EvaluationSet, seed: int = 0) -> list[Task]:
    """Dice of each maze are the same at every step of every run: what changes is the policy."""
    return [Task(maze, 0, dice("evaluation", seed, held_out.name, maze), held_out.size) for maze in held_out.seeds]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`sets` are played every `interval` steps (never if that is not above 0), before the first step too if `before_train`, and
    `final_sets` beside them before the first step and after the last; each once for each of `decodings`. Dice are of `seed`."""

    sets: tuple[EvaluationSet, ...]
    final_sets: tuple[EvaluationSet, ...]
    decodings: Mapping[Decoding, Sampling]
    interval: int
    before_train: bool
    seed: int = 0

    def due(self, step: int, total_steps: int) -> tuple[EvaluationSet, ...]:
        if self.interval <= 0 or (step == 0 and not self.before_train):
            return ()
        if step in (0, total_steps):
            return tuple(dict.fromkeys((*self.sets, *self.final_sets)))
        return self.sets if step % self.interval == 0 else ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A run. `interval`s count steps, -1 is never; as in SkyRL the end of an epoch counts as due, and the last step's adapter is
    exported in any case. `spec` is the whole specification, flat, by which a resumed run is compared with what it was."""

    order: DataOrder
    maze: MazeSpec
    n_samples_per_prompt: int
    sampling: Sampling
    evaluation: Evaluation
    ckpt_interval: int
    hf_save_interval: int
    max_ckpts_to_keep: int
    ckpt_path: Path
    export_path: Path
    run_path: Path
    adapter_paths: tuple[Path, ...]
    resume_mode: ResumeMode = "latest"
    resume_path: Path | None = None
    spec: Mapping[str, Any] = field(default_factory=dict)
    spec_digest: str = ""

    @property
    def seed(self) -> int:
        return self.order.seed

    @property
    def total_steps(self) -> int:
        return self.order.total_steps

    def checkpoint_due(self, step: int) -> bool:
        return self._due(self.ckpt_interval, step)

    def export_due(self, step: int) -> bool:
        return step == self.total_steps or self._due(self.hf_save_interval, step)

    def export_folder(self, step: int) -> Path:
        return self.export_path / f"global_step_{step}" / "policy"

    def _due(self, interval: int, step: int) -> bool:
        return interval > 0 and (step % interval == 0 or self.order.ends_epoch(step))
