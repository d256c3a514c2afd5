"""How often something was used, recent uses counting more. Pure: the clock is the number of uses, so a busy hour and a quiet
night forget at the same pace.

This is the value of LRFU (Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used and least frequently
used policies", IEEE Transactions on Computers 50(12), 2001): each use is worth 1 when it happens and half as much `half_life`
uses later. A half-life of a few uses gives the order of LRU, an endless one that of LFU.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_RESCALE_AT = 1e100


class Popularity(Generic[K]):
    """The decayed number of uses of each key. Remembers `max_keys` keys at most, the most valuable ones.

    Not resident keys are remembered too: what was busy, went and comes back doesn't begin from nothing.
    """

    def __init__(self, half_life: float, max_keys: int = 16_384) -> None:
        if half_life <= 0 or max_keys < 2:
            raise ValueError("half_life must be positive and max_keys two or more")
        self._growth = 2 ** (1 / half_life)
        self._max_keys = max_keys
        self._worth_now = 1.0  # what a use adds now; growing it is the same as halving all others, without touching them
        self._scores: dict[K, float] = {}

    def use(self, key: K) -> None:
        """One use, now. Constant time but for a rescaling once in hundreds of half-lives."""
        self._worth_now *= self._growth
        self._scores[key] = self._scores.get(key, 0.0) + self._worth_now
        if self._worth_now > _RESCALE_AT:
            self._rescale()
        if len(self._scores) > self._max_keys:
            self._forget_least()

    def value(self, key: K) -> float:
        """The decayed number of uses: 1.0 right after the first one, 0.0 for a key that is not remembered."""
        return self._scores.get(key, 0.0) / self._worth_now

    def busiest(self, count: int) -> list[K]:
        """The most valuable keys, the best first."""
        return heapq.nlargest(count, self._scores, key=self._scores.__getitem__)

    def snapshot(self) -> dict[K, float]:
        """Each key's value, for `restore`."""
        return {key: score / self._worth_now for key, score in self._scores.items()}

    def restore(self, values: Mapping[K, float]) -> None:
        """Adds what an earlier run remembered, as if no use had come since."""
        for key, value in values.items():
            self._scores[key] = self._scores.get(key, 0.0) + value * self._worth_now
        if len(self._scores) > self._max_keys:
            self._forget_least()

    def _rescale(self) -> None:
        self._scores = {key: score / self._worth_now for key, score in self._scores.items()}
        self._worth_now = 1.0

    def _forget_least(self) -> None:
        # Half at a time, so that a scan over more keys than are remembered costs little for each.
        kept = self.busiest(self._max_keys // 2)
        self._scores = {key: self._scores[key] for key in kept}
