"""A run on the terminal: a line an event where nobody watches, a live view where somebody does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from training.runs.events import AdapterSaved, CheckpointSaved, EvalEvent, RunEnded, RunStarted, StepEvent, Trouble
from training.runs.plan import Plan

DRIFT = "policy/rollout_train_logprobs_abs_diff_mean"
MOST_DRIFT = 0.1  # nats a token; bfloat16 alone comes to a hundredth
STEPS_SHOWN = 8
NOTES_SHOWN = 4
EVALUATIONS_SHOWN = 5
STEPS_FOR_PACE = 10

Seconds = Mapping[str, float]


class Watching(Protocol):
    """Told of events by the log, of phases by the loop. A context: what is shown live ends with it."""

    def __call__(self, event: Any) -> None: ...

    def phase(self, name: str) -> None: ...

    def __enter__(self) -> Watching: ...

    def __exit__(self, *_: object) -> None: ...


class Pace:
    """How fast a run has been, and from that how long it will still take."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._step = 0
        self._steps_s: list[float] = []
        self._maze_s: dict[tuple[str, str], float] = {}

    def note(self, event: Any) -> None:
        if isinstance(event, RunStarted):
            self._step = event.step
        elif isinstance(event, StepEvent):
            self._step = event.step
            self._steps_s.append(sum(event.seconds.values()))
        elif isinstance(event, EvalEvent):
            self._maze_s[event.set, event.decoding] = event.seconds / event.mazes

    def left_s(self) -> float | None:
        """None before a step was done. An evaluation that has not been yet takes as long a maze as those that have."""
        if not self._steps_s:
            return None
        steps_left = range(self._step + 1, self._plan.total_steps + 1)
        return mean(self._steps_s[-STEPS_FOR_PACE:]) * len(steps_left) + sum(map(self._evaluation_s, steps_left))

    def _evaluation_s(self, step: int) -> float:
        usual_s = mean(self._maze_s.values()) if self._maze_s else 0.0
        return sum(
            len(held_out.seeds) * self._maze_s.get((held_out.name, decoding), usual_s)
            for held_out in self._plan.evaluation.due(step, self._plan.total_steps)
            for decoding in self._plan.evaluation.decodings
        )


class Lines:
    """A line an event, for logs and pipes."""

    def __init__(self, plan: Plan, write: Callable[[str], None]):
        self._plan = plan
        self._write = write
        self._pace = Pace(plan)

    def __call__(self, event: Any) -> None:
        self._pace.note(event)
        line = told(event)
        if isinstance(event, StepEvent):
            line = f"step {event.step}/{self._plan.total_steps}: {line}{_left(self._pace.left_s())}"
        if line:
            self._write(line)

    def phase(self, name: str) -> None:
        pass

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Screen:
    """The last steps as a table, the last evaluations, a bar with the time that is left; at the end the lines stay."""

    def __init__(self, plan: Plan, console: Console, clock_s: Callable[[], float] = time.monotonic):
        self._plan = plan
        self._clock_s = clock_s
        self._pace = Pace(plan)
        self._steps: list[StepEvent] = []
        self._evals: dict[tuple[str, str], list[EvalEvent]] = {}
        self._notes: list[str] = []
        self._step = 0
        self._phase, self._phase_began_s = "starting", clock_s()
        self._live = Live(console=console, get_renderable=self._rendered, refresh_per_second=2)

    def __call__(self, event: Any) -> None:
        self._pace.note(event)
        if isinstance(event, StepEvent):
            self._step = event.step
            self._steps = [*self._steps[1 - STEPS_SHOWN :], event]
        elif isinstance(event, EvalEvent):
            self._evals.setdefault((event.set, event.decoding), []).append(event)
        elif line := told(event):
            self._step = event.step if isinstance(event, RunStarted) else self._step
            self._notes = [*self._notes[1 - NOTES_SHOWN :], line]

    def phase(self, name: str) -> None:
        self._phase, self._phase_began_s = name, self._clock_s()

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.phase("ended")
        self._live.stop()

    def _rendered(self) -> RenderableType:
        return Group(self._table(), *map(Text, self._eval_lines()), *map(Text, self._notes), *self._bar())

    def _table(self) -> Table:
        names = ("step", "solved", "reward", "mixed groups", "turns", "tokens a reply", "tokens/s", "s")
        table = Table(*names, box=None, header_style="dim")
        for column in table.columns:
            column.justify = "right"
        for event in self._steps:
            table.add_row(str(event.step), *_figures(event).values())
        return table

    def _eval_lines(self) -> list[str]:
        return [
            f"{held_out} {decoding}: "
            + "  ".join(f"{event.step}: {event.solve_rate:.1%}" for event in (*found[:1], *found[1:][-5:]))
            for (held_out, decoding), found in self._evals.items()
        ]

    def _bar(self) -> tuple[RenderableType, ...]:
        passed = f"{self._phase}, {duration(self._clock_s() - self._phase_began_s)}{_left(self._pace.left_s())}"
        bar = ProgressBar(total=self._plan.total_steps, completed=self._step, width=40)
        return bar, Text(f"step {self._step}/{self._plan.total_steps}  {passed}", style="dim")


def told(event: Any) -> str:
    """One line for people; empty for what is none of this room's events."""
    match event:
        case RunStarted():
            how = f"going on after step {event.step}" if event.resumed else "starting"
            lost = event.reached_step - event.step
            again = f", {lost} steps are done again" if lost > 0 else ""
            over = "".join(f"\npassed over: {one}" for one in event.passed_over)
            return f"seed {event.seed}: {how} of {event.total_steps}{again}, spec {event.spec_digest}{over}"
        case StepEvent():
            drift = event.learner.get(DRIFT, 0.0)
            apart = f", drift {drift:.2f}: engine and learner are not of one mind" if drift > MOST_DRIFT else ""
            return ", ".join(f"{name} {value}" for name, value in _figures(event).items()) + apart
        case EvalEvent():
            of = f"{event.set} {event.decoding}"
            return (
                f"step {event.step}: {of}: {event.solved} of {event.mazes} solved ({event.solve_rate:.1%}), {event.seconds:.0f} s"
            )
        case CheckpointSaved():
            return f"step {event.step}: checkpoint, {event.size_bytes / 1e6:.1f} MB in {event.seconds:.1f} s"
        case AdapterSaved():
            return f"step {event.step}: adapter in {event.folder}"
        case Trouble():
            return f"step {event.step}: {event.what} failed and is tried again: {event.error}"
        case RunEnded():
            return f"{event.reason} at step {event.step} after {duration(event.wall_s)}"
    return ""


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _figures(event: StepEvent) -> dict[str, str]:
    play_s, all_s = event.seconds.get("play", 0.0), sum(event.seconds.values())
    return {
        "solved": f"{event.solve_rate:.1%}",
        "reward": f"{event.reward_mean:.3f}",
        "mixed groups": f"{event.mixed_groups:.0%}",
        "turns": f"{event.turns_mean:.1f}",
        "tokens a reply": f"{event.reply_tokens_mean:.1f}",
        "tokens/s": f"{event.sampled_tokens / play_s:.0f}" if play_s else "-",
        "s": f"{all_s:.1f}",
    }


def _left(left_s: float | None) -> str:
    return "" if left_s is None else f", {duration(left_s)} left"
