"""How many steps to let pass between checkpoints, from how long writing one takes and how long machines last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from training.runs.events import CheckpointSaved, Line, StepEvent

THIRDS = 3


class NothingMeasured(ValueError):
    """A run without a step or a checkpoint, from which nothing can be suggested."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one step and of writing one checkpoint, in seconds."""

    step_s: float
    write_s: float


@dataclass(frozen=True, slots=True)
class Suggestion:
    """`lost_share` is what is expected to be lost of all time, to writing and to doing again, from 0 to 1."""

    rule: str
    interval_s: float
    ckpt_interval: int
    lost_share: float


def measured(lines: Sequence[Line]) -> Costs:
    """Means over a run. Raises NothingMeasured."""
    steps = [sum(line.event.seconds.values()) for line in lines if isinstance(line.event, StepEvent)]
    writes = [line.event.seconds for line in lines if isinstance(line.event, CheckpointSaved)]
    if not steps or not writes:
        raise NothingMeasured(f"{len(steps)} steps and {len(writes)} checkpoints: at least one of each has to be in the run")
    return Costs(mean(steps), mean(writes))


def suggestions(costs: Costs, failure_every_s: float) -> tuple[Suggestion, ...]:
    """First the rule of thumb, a third of the time to failure; then Young's optimum, sqrt(2 * write * time to failure) ("A first
    order approximation to the optimum checkpoint interval", 1974; Daly, "A higher order estimate", 2006, adds terms that vanish
    where writing is short beside the time to failure). Raises ValueError for a time to failure that is not above 0."""
    if failure_every_s <= 0:
        raise ValueError(f"the time to failure is {failure_every_s:g} s: it has to be above 0")
    youngs_s = math.sqrt(2 * costs.write_s * failure_every_s)
    rules = {"time to failure / 3": failure_every_s / THIRDS, "Young: sqrt(2 x write x time to failure)": youngs_s}
    return tuple(_suggestion(rule, interval_s, costs, failure_every_s) for rule, interval_s in rules.items())


def _suggestion(rule: str, interval_s: float, costs: Costs, failure_every_s: float) -> Suggestion:
    """A failure comes half-way on average: to first order write / interval + interval / 2 / time to failure is lost."""
    steps = max(1, round(interval_s / costs.step_s))
    taken_s = steps * costs.step_s
    lost = costs.write_s / (taken_s + costs.write_s) + taken_s / 2 / failure_every_s
    return Suggestion(rule, interval_s, steps, min(1.0, lost))
