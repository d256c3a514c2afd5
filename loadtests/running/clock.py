"""The clock of a phase: all that runs beside the requests waits on it."""

from __future__ import annotations

import threading
import time


class Clock:
    """Seconds since the phase began. It begins when the sender says so, and may be stopped by whoever breaks the phase off."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._began_ns: int | None = None
        self._stopped = False

    def begin(self, wall_ns: int) -> None:
        """The phase's second 0; may lie a moment ahead. Only the first call counts."""
        with self._change:
            if self._began_ns is None:
                self._began_ns = wall_ns
            self._change.notify_all()

    def stop(self) -> None:
        with self._change:
            self._stopped = True
            self._change.notify_all()

    @property
    def began_ns(self) -> int:
        """Wall clock of second 0; of now where it has not begun."""
        return self._began_ns or time.time_ns()

    def at(self, wall_ns: int) -> float:
        return (wall_ns - self.began_ns) / 1e9

    def now_s(self) -> float:
        return self.at(time.time_ns())

    def reached(self, at_s: float) -> bool:
        """Waits until then; False if the phase was broken off before."""
        with self._change:
            while not self._stopped:
                if self._began_ns is None:
                    self._change.wait()
                elif (left_s := at_s - self.now_s()) > 0:
                    self._change.wait(left_s)
                else:
                    return True
            return False
