"""The learning rate by place in the run: SkyRL's `optimizer_config.scheduler`, which are transformers' schedules (pure)."""

from __future__ import annotations

import math

from training.spec import TrainSpec
from training.spec.sections import Optimizer


def steps_per_batch(spec: TrainSpec) -> int:
    """Optimizer steps that one training step plans."""
    trainer = spec.trainer
    return trainer.train_batch_size // trainer.policy_mini_batch_size * trainer.update_epochs_per_batch


def planned_steps(spec: TrainSpec) -> int:
    """Optimizer steps of the whole run; those in which nothing was to be learnt count too."""
    trainer = spec.trainer
    steps = trainer.epochs * (spec.loramux.training_mazes.count // trainer.train_batch_size)
    return min(steps, trainer.max_training_steps or steps) * steps_per_batch(spec)


def rate(optimizing: Optimizer, made: int, place: int, planned: int) -> float:
    """The rate of the step at `place` of `planned`, from 0; `made` steps were made before it, which is what a warm-up counts."""
    warmup = optimizing.num_warmup_steps
    if warmup and made < warmup:
        return optimizing.lr * made / warmup
    passed = min(1.0, max(0, place - warmup) / max(1, planned - warmup))
    match optimizing.scheduler:
        case "linear":
            return optimizing.lr * (1.0 - passed)
        case "cosine":
            return optimizing.lr * 0.5 * (1.0 + math.cos(math.pi * passed))
    return optimizing.lr
