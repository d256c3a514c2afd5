"""Thrash: what was evicted is asked for again at once, so places are too few for what is busy. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

REMEMBERED = 4_096


class ThrashWatch:
    """Counts the loads that bring back what was evicted less than `window_s` before; says when that is an alarm.

    Times are seconds of any one clock. An alarm is `MIN_RELOADS` such loads within one window that are `SHARE` of its loads or
    more; it is given once a window.
    """

    MIN_RELOADS = 8
    SHARE = 0.5

    def __init__(self, window_s: float = 60) -> None:
        self.window_s = window_s
        self._evicted_at_s: dict[Hashable, float] = {}
        self._loads: deque[tuple[float, bool]] = deque()
        self._alarmed_at_s = float("-inf")

    def evicted(self, key: Hashable, now_s: float) -> None:
        self._evicted_at_s.pop(key, None)
        self._evicted_at_s[key] = now_s
        if len(self._evicted_at_s) > REMEMBERED:
            del self._evicted_at_s[next(iter(self._evicted_at_s))]

    def forgive(self, key: Hashable) -> None:
        """The key was evicted because someone asked for it, so its coming back says nothing about places."""
        self._evicted_at_s.pop(key, None)

    def loaded(self, key: Hashable, now_s: float) -> bool:
        """Whether this load brings back what went less than a window before."""
        evicted_at_s = self._evicted_at_s.pop(key, None)
        is_reload = evicted_at_s is not None and now_s - evicted_at_s < self.window_s
        self._loads.append((now_s, is_reload))
        self._drop_old(now_s)
        return is_reload

    def alarm(self, now_s: float) -> tuple[int, int] | None:
        """The reloads and the loads of the last window when they are an alarm; None when not, or when it was just given."""
        self._drop_old(now_s)
        reloads = sum(is_reload for _, is_reload in self._loads)
        if now_s - self._alarmed_at_s < self.window_s or reloads < max(self.MIN_RELOADS, self.SHARE * len(self._loads)):
            return None
        self._alarmed_at_s = now_s
        return reloads, len(self._loads)

    def _drop_old(self, now_s: float) -> None:
        while self._loads and now_s - self._loads[0][0] >= self.window_s:
            self._loads.popleft()
