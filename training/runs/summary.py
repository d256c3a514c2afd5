"""What a run came to, and several runs that differ by their seeds: figures of the last step, never of the best one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from training.runs.events import (
    FILE,
    CheckpointSaved,
    EvalEvent,
    Line,
    RunEnded,
    RunStarted,
    StepEvent,
    Trouble,
    history,
    read_events,
)
from training.runs.measures import played_by

TRAINED_TOKENS = "policy/trained_tokens"


class NoRun(ValueError):
    """A folder without a run's events."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """A process that took a run up again. `lost_steps` had been done and were not kept; `start_up_s` passed until the loop began,
    and `caught_up_s` from the start of the process until the run was as far as it had been; None if it never was."""

    at_step: int
    reached_step: int
    lost_steps: int
    start_up_s: float
    caught_up_s: float | None
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Rates are by `<set>/<decoding>`: `before` of the policy before the first step, `at_end` of the last step's, nothing where
    that was not evaluated. `wall_s` adds up all processes that worked at the run, lost work too; `device_s` is that times how
    many devices they held. Tokens are of what counts, not of what was lost."""

    folder: str
    seed: int
    spec_digest: str
    ended: str
    steps: int
    total_steps: int
    before: Mapping[str, float]
    at_end: Mapping[str, float]
    device: str
    devices: int
    wall_s: float
    device_s: float
    sampled_tokens: int
    evaluation_tokens: int
    trained_tokens: int
    parts_s: Mapping[str, float]
    troubles: int
    recoveries: tuple[Recovery, ...]

    @property
    def is_whole(self) -> bool:
        return self.steps == self.total_steps


@dataclass(frozen=True, slots=True)
class Spread:
    """Over seeds. `deviation` is that of a sample, 0 for one."""

    seeds: int
    mean: float
    deviation: float
    lowest: float
    highest: float


def load(folder: Path) -> list[Line]:
    """Raises NoRun."""
    lines = read_events(folder / FILE)
    if not any(isinstance(line.event, RunStarted) for line in lines):
        raise NoRun(f"{folder} is no run: {FILE} with a start in it is missing")
    return lines


def summarize(folder: Path, lines: Sequence[Line]) -> RunSummary:
    started = [line.event for line in lines if isinstance(line.event, RunStarted)]
    held = history(lines)
    steps = [line.event for line in held if isinstance(line.event, StepEvent)]
    evaluations = [line.event for line in held if isinstance(line.event, EvalEvent)]
    last = steps[-1].step if steps else started[-1].step
    walls_s = [_life_s(life) for life in lives(lines)]
    return RunSummary(
        folder=str(folder),
        seed=started[-1].seed,
        spec_digest=started[-1].spec_digest,
        ended=next((line.event.reason for line in reversed(lines) if isinstance(line.event, RunEnded)), "killed"),
        steps=last,
        total_steps=started[-1].total_steps,
        before=_rates(evaluations, 0),
        at_end=_rates(evaluations, last),
        device=started[-1].device,
        devices=started[-1].devices,
        wall_s=sum(walls_s),
        device_s=sum(wall_s * one.devices for wall_s, one in zip(walls_s, started, strict=True)),
        sampled_tokens=sum(one.sampled_tokens for one in steps),
        evaluation_tokens=sum(one.sampled_tokens for one in evaluations),
        trained_tokens=round(sum(one.learner.get(TRAINED_TOKENS, 0) for one in steps)),
        parts_s=_parts(lines),
        troubles=sum(isinstance(line.event, Trouble) for line in lines),
        recoveries=recoveries(lines),
    )


def spreads(rates: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Of what all runs have."""
    shared = [name for name in rates[0] if all(name in one for one in rates)] if rates else []
    return {name: _spread([one[name] for one in rates]) for name in shared}


def lives(lines: Sequence[Line]) -> list[list[Line]]:
    """The lines of each process, which begin with its start."""
    found: list[list[Line]] = []
    for line in lines:
        if isinstance(line.event, RunStarted):
            found.append([])
        if found:
            found[-1].append(line)
    return found


def recoveries(lines: Sequence[Line]) -> tuple[Recovery, ...]:
    return tuple(_recovery(life) for life in lives(lines) if life[0].event.resumed)


def solved_before_and_after(folder: Path, held_out: str, decoding: str, first: int, last: int) -> tuple[int, int, int]:
    """How many mazes are solved both times, only after, and only before; 0 each where a file is missing."""
    before, after = (played_by(folder / "evals" / f"step_{step}" / f"{held_out}-{decoding}.jsonl") for step in (first, last))
    both = before.keys() & after.keys()
    kept = sum(before[maze].solved and after[maze].solved for maze in both)
    gained = sum(after[maze].solved and not before[maze].solved for maze in both)
    return kept, gained, sum(before[maze].solved and not after[maze].solved for maze in both)


def _recovery(life: Sequence[Line]) -> Recovery:
    began, event = life[0], life[0].event
    there = (line.at_s for line in life if isinstance(line.event, StepEvent) and line.event.step >= event.reached_step)
    lost = max(0, event.reached_step - event.step)
    caught_up_at_s = next(there, None) if lost else began.at_s
    caught_up_s = None if caught_up_at_s is None else caught_up_at_s - began.at_s + event.start_up_s
    return Recovery(event.step, event.reached_step, lost, event.start_up_s, caught_up_s, tuple(event.passed_over))


def _life_s(life: Sequence[Line]) -> float:
    return life[-1].at_s - life[0].at_s + life[0].event.start_up_s


def _parts(lines: Sequence[Line]) -> dict[str, float]:
    """Where the time of all processes went, lost work too."""
    parts: dict[str, float] = {}

    def add(name: str, seconds: float) -> None:
        parts[name] = parts.get(name, 0.0) + seconds

    for event in (line.event for line in lines):
        if isinstance(event, StepEvent):
            for name, seconds in event.seconds.items():
                add(name, seconds)
        elif isinstance(event, EvalEvent):
            add("evaluate", event.seconds)
        elif isinstance(event, CheckpointSaved):
            add("checkpoint", event.seconds)
        elif isinstance(event, RunStarted):
            add("start up", event.start_up_s)
    return parts


def _rates(evaluations: Sequence[EvalEvent], step: int) -> dict[str, float]:
    return {f"{one.set}/{one.decoding}": one.solve_rate for one in evaluations if one.step == step}


def _spread(values: Sequence[float]) -> Spread:
    deviation = stdev(values) if len(values) > 1 else 0.0
    return Spread(len(values), mean(values), deviation, min(values), max(values))
