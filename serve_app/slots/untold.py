"""Failures of loads that nobody waited for, until somebody asks again."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

from adapters.errors import LoraMuxError
from adapters.names import AdapterRef

TOLD_FOR_S = 60.0
MAX_KEPT = 1_024


class Untold:
    """Who does not wait for a load would never learn that it fails: each failure is told once, to the next of them."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._failures: dict[AdapterRef, tuple[float, LoraMuxError]] = {}

    def keep(self, ref: AdapterRef, error: LoraMuxError) -> None:
        if len(self._failures) >= MAX_KEPT:
            self._failures.clear()
        self._failures[ref] = self._clock_s(), copy.copy(error)  # a copy has no trace that keeps everything else alive

    def take(self, ref: AdapterRef) -> LoraMuxError | None:
        """The failure to be told now; None without one, or when it is too old to say anything."""
        at_s, error = self._failures.pop(ref, (0.0, None))
        return error if error is not None and self._clock_s() - at_s <= TOLD_FOR_S else None
