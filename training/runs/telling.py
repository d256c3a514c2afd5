"""What one run has told so far, written by rank 0 and remembered by all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from training.runs.events import EventLog, Line, StepEvent, Trouble, as_line, read_events


class Telling:
    """`lines` holds what was told in this life of the run and, of earlier ones, what the checkpoint knew."""

    def __init__(self, log: EventLog | None):
        self._log = log
        self.lines: list[Line] = []

    def tell(self, event: Any) -> None:
        self.lines.append(self._log.tell(event) if self._log else Line(0.0, event))

    def attempt(self, step: int, what: str, act: Callable[[], Any]) -> bool:
        """Whether it succeeded. What fails here is said and does not end the run."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a run outlives whatever a disk or a store does
            self.tell(Trouble(step, what, f"{type(error).__name__}: {error}"))
            return False
        return True

    def recall(self, rows: list[dict[str, Any]]) -> None:
        self.lines = [line for row in rows if (line := as_line(row))]
        if self._log:
            self._log.restore(self.lines)

    def reached_step(self) -> int:
        """The last step that any life of the run told of, kept or not."""
        lines = read_events(self._log.file) if self._log else []
        return max((line.event.step for line in lines if isinstance(line.event, StepEvent)), default=0)
