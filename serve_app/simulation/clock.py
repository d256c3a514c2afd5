"""A clock for events that need no loop: it goes to the next one at once."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Events in the order of their times, those of one time in the order of their making."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), event))

    def run(self) -> None:
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
