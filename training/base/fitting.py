"""AdamW with a rate that rises, holds and falls; what both lessons of the base are learnt with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Course:
    """How long and how fast: the rate rises over `rise` steps to `lr` and falls in a line to a twentieth at the end."""

    steps: int
    batch: int
    lr: float
    rise: int = 50
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    most_norm: float = 1.0

    def rate(self, step: int) -> float:
        return self.lr * min(1.0, step / self.rise) * max(0.05, 1.0 - (step - 1) / self.steps)


def fit(course: Course, parameters: Sequence[nn.Parameter], losses: Callable[[], Tensor]) -> Iterator[tuple[int, float]]:
    """Makes the course's steps, one for each (step, loss) that is asked for; `losses` gives the loss of a fresh batch."""
    optimizer = torch.optim.AdamW(parameters, lr=course.lr, betas=course.betas, weight_decay=course.weight_decay, fused=True)
    for step in range(1, course.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = course.rate(step)
        optimizer.zero_grad(set_to_none=True)
        loss = losses()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, course.most_norm)
        optimizer.step()
        yield step, loss.item()


def autocast(device: torch.device) -> AbstractContextManager[None]:
    """Products in bfloat16."""
    return torch.autocast(device.type, torch.bfloat16)
