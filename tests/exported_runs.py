"""Runs as a publisher sees them: exports in a folder, what was saved when, and what it told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training.publishing import Gate, Origin, Target
from training.publishing.gate import METRIC
from training.runs.events import AdapterSaved
from tests.adapter_folders import TEXT, plain

BASE, NAME, ALIAS = TEXT.base, "maze", "production"
PATIENCE_S = 30.0

# ruff: noqa: I001  (training and tests are both ours)


def target(alias: str | None = ALIAS, min_solve_rate: float = 0.5, **others: Any) -> Target:
    return Target(BASE, NAME, alias, Gate(METRIC, min_solve_rate), **others)


def origin(run: str = "run-a", **others: Any) -> Origin:
    return Origin(run, base_digest="b" * 64, code_revision="c" * 40, **others)


def export(export_path: Path, step: int, seed: int | None = None) -> Path:
    """An adapter whose content is the seed's (the step's by default), as SkyRL lays it down."""
    return plain(seed=step if seed is None else seed).write(export_path / f"global_step_{step}" / "policy")


def saved(folder: Path, rate: float | None = None, **metrics: float) -> AdapterSaved:
    step = int(folder.parent.name.rpartition("_")[2])
    known = metrics if rate is None else {METRIC: rate} | metrics
    return AdapterSaved(step, str(folder), known, "d" * 64)


class Told:
    """What a publisher told; `wait` returns the first event of a kind, of a step if one is named."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self._more = threading.Condition()

    def __call__(self, event: Any) -> None:
        with self._more:
            self.events.append(event)
            self._more.notify_all()

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def wait(self, kind: type, step: int | None = None, *, count: int = 1) -> Any:
        def found() -> list[Any]:
            return [event for event in self.of(kind) if step in (None, event.step)]

        with self._more:
            assert self._more.wait_for(lambda: len(found()) >= count, PATIENCE_S), f"{kind.__name__} not told: {self.events}"
        return found()[count - 1]


def wait_until(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "not true in time"
        time.sleep(0.01)
