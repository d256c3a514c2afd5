"""What SkyRL has no key for: the maze, what is trained and evaluated on, publishing, and how the local backend computes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from training.maze import HELD_OUT, MazeSpec
from training.maze.sets import FIRST_SEED
from training.spec.sections import Part

Decoding = Literal["greedy", "sampled"]


class TrainingMazes(Part):
    """`count` mazes by their seeds from `first_seed` on, those of evaluation sets left out: one epoch."""

    first_seed: int = Field(default=0, ge=0, lt=FIRST_SEED)
    count: int = Field(default=256, ge=1)


class Evaluation(Part):
    """`sets` are played at each evaluation, `final_sets` as well before the first step (with `trainer.eval_before_train`) and
    after the last. `greedy` decodes with `generator.eval_sampling_params`, which are at temperature 0 by SkyRL's default,
    `sampled` with `generator.sampling_params`; dice come from `seed`, the same at every evaluation."""

    sets: tuple[str, ...] = ("easy-64",)
    final_sets: tuple[str, ...] = ("easy-512", "hard-128")
    decodings: tuple[Decoding, ...] = ("sampled", "greedy")
    seed: int = Field(default=0, ge=0)

    @field_validator("sets", "final_sets")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in HELD_OUT:
                raise ValueError(f"{name!r} is none of {', '.join(HELD_OUT)}")
        return names

    def metrics(self) -> tuple[str, ...]:
        """Names of the solve rates that every evaluation tells."""
        return tuple(f"eval/{name}/{decoding}/solve_rate" for name in self.sets for decoding in self.decodings)


class Publish(Part):
    """Exports become versions of `base:name`; without `name` nothing is published. `registry` is its URL; without one it is what
    `loramux.yaml` and the environment say, from where credentials come in any case. `alias` moves to a version whose `metric` is
    at least `min_solve_rate` and more than that of the version that it names; without an alias nothing moves."""

    registry: str | None = None
    base: str | None = None
    name: str | None = None
    alias: str | None = "production"
    metric: str = "eval/easy-64/sampled/solve_rate"
    min_solve_rate: float = Field(default=0.9, ge=0, le=1)
    close_timeout_s: float = Field(default=60.0, gt=0)


class SkyrlOnly(Part):
    """For the `skyrl` backend alone. `overrides` are `key.path=value` for keys of SkyRL's that a spec does not have, handed on as
    they are, after all others. `tickets_path` is a folder that every node sees; without one it is below `trainer.export_path`."""

    overrides: tuple[str, ...] = ()
    tickets_path: str | None = None


class Loramux(Part):
    """`threads` are torch's in the learner (none: torch decides; bits depend on it). `dtype` is what the local backend computes
    in: `auto` is float32 on CPUs, and on GPUs bfloat16 if `trainer.bf16`, over float32 LoRA weights."""

    maze: MazeSpec = MazeSpec()
    training_mazes: TrainingMazes = TrainingMazes()
    evaluation: Evaluation = Evaluation()
    publish: Publish = Publish()
    skyrl: SkyrlOnly = SkyrlOnly()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: int | None = Field(default=None, ge=1)
