"""What happens in a run, as values and as JSON lines: what the terminal, the report and the publisher are told from.

Lines are only ever appended, across restarts too, so that work that was lost stays visible; `history` makes of them what holds.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

FILE = "events.jsonl"


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A process took the run up: anew at step 0, or from the checkpoint of `step`. `passed_over` says which newer checkpoints
    were damaged and how, `reached_step` how far the run had come before, `start_up_s` is from the command to here."""

    step: int
    total_steps: int
    seed: int
    spec_digest: str
    device: str
    devices: int
    resumed: bool = False
    reached_step: int = 0
    passed_over: tuple[str, ...] = ()
    start_up_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One update. Rates are shares of 1; `solve_rate` is the environment's word, not the reward's. `mixed_groups` is the share of
    groups in which rewards differ, the others teach nothing. `seconds` has the step's parts, `learner` what the learner told."""

    step: int
    epoch: int
    solve_rate: float
    reward_mean: float
    mixed_groups: float
    turns_mean: float
    reply_tokens_mean: float
    cut_short: float
    episodes: int
    sampled_tokens: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    learner: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalEvent:
    """A set that the policy of `step` played, `decoding` being `greedy` or `sampled`; `file` holds a Played a line."""

    step: int
    set: str
    decoding: str
    mazes: int
    solved: int
    turns_mean: float
    sampled_tokens: int
    seconds: float
    file: str = ""

    @property
    def solve_rate(self) -> float:
        return self.solved / self.mazes


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    step: int
    folder: str
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AdapterSaved:
    """The adapter of `step` lies complete in `folder`. `metrics` has what is known of it then: the step's, and solve rates as
    `eval/<set>/<decoding>/solve_rate` where it was evaluated."""

    step: int
    folder: str
    metrics: Mapping[str, float]
    spec_digest: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something failed that does not end the run, and is tried again: `what` is `checkpoint`, `export`, `evaluation file`, ..."""

    step: int
    what: str
    error: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """`reason` is `finished`, `stopped`, `failed`, or `unsaved`: what was to be kept at the end could not be written."""

    step: int
    reason: str
    wall_s: float


KINDS: dict[str, type] = {
    kind.__name__: kind for kind in (RunStarted, StepEvent, EvalEvent, CheckpointSaved, AdapterSaved, Trouble, RunEnded)
}


@dataclass(frozen=True, slots=True)
class Line:
    """An event as it was written: when, in seconds since 1970."""

    at_s: float
    event: Any


class EventLog:
    """Appends events to a file and hands them to who listens; from any thread. A line that cannot be written is lost and said to
    nobody but the listeners, who saw the event: a full disk ends no run. Any frozen dataclass can be told, other rooms' too."""

    def __init__(self, file: Path, listeners: Iterable[Callable[[Any], None]] = (), now_s: Callable[[], float] = time.time):
        self.file = file
        self._listeners = tuple(listeners)
        self._now_s = now_s
        self._lock = threading.Lock()
        self._torn = _is_torn(file)

    def tell(self, event: Any) -> Line:
        line = Line(round(self._now_s(), 3), event)
        with self._lock:
            self._append(json.dumps(as_row(line)))
            for listener in self._listeners:
                listener(event)
        return line

    def restore(self, lines: Iterable[Line]) -> None:
        """What a checkpoint kept, where the file is not there any more."""
        if not self.file.exists():
            with self._lock:
                for line in lines:
                    self._append(json.dumps(as_row(line)))

    def _append(self, line: str) -> None:
        """One write; after one that was cut off, a line's end first, so that only the cut line is unreadable."""
        try:
            with self.file.open("ab", buffering=0) as out:
                data = f"{chr(10) * self._torn}{line}\n".encode()
                self._torn = True
                self._torn = out.write(data) != len(data)
        except OSError:
            pass


def _is_torn(file: Path) -> bool:
    if not file.exists() or not file.stat().st_size:
        return False
    with file.open("rb") as opened:
        opened.seek(-1, os.SEEK_END)
        return opened.read(1) != b"\n"


def read_events(file: Path) -> list[Line]:
    """In the order of writing; lines that were cut off by a crash and events of other rooms are left out."""
    if not file.exists():
        return []
    read = [as_line(row) for row in map(_row, file.read_bytes().splitlines()) if row]
    return [line for line in read if line]


def as_row(line: Line) -> dict[str, Any]:
    return {"event": type(line.event).__name__, "at_s": line.at_s, **asdict(line.event)}


def as_line(row: Mapping[str, Any]) -> Line | None:
    kind = KINDS.get(row.get("event", ""))
    if kind is None:
        return None
    known = {one.name for one in fields(kind)}
    return Line(row["at_s"], kind(**{name: value for name, value in row.items() if name in known}))


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def history(lines: Iterable[Line]) -> list[Line]:
    """What holds of steps, evaluations and exports: a process that took the run up from a step does again what came after it."""
    held: dict[tuple[Any, ...], Line] = {}
    for line in lines:
        event = line.event
        if isinstance(event, RunStarted):
            held = {key: one for key, one in held.items() if event.resumed and one.event.step <= event.step}
        elif isinstance(event, EvalEvent):
            held[EvalEvent, event.step, event.set, event.decoding] = line
        elif isinstance(event, StepEvent | AdapterSaved):
            held[type(event), event.step] = line
    return sorted(held.values(), key=lambda line: line.event.step)
