"""Traces of requests: which of some adapters each request asks for, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Popularity = Literal["zipf", "uniform"]


@dataclass(frozen=True)
class Trace:
    """Requests for `adapters` adapters, `times_slots` as many as there are slots; `names` are what they ask for, in order."""

    times_slots: int
    popularity: Popularity
    adapters: tuple[str, ...]
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.times_slots}x {self.popularity}"


def draw(names: Sequence[str], requests: int, popularity: Popularity, seed: int) -> list[str]:
    """The names that `requests` requests ask for. `zipf` draws the k-th name with weight 1/k (exponent 1.0); which name is the
    k-th is drawn too, so that no order of publication helps anybody."""
    dice = random.Random(seed)
    ranked = dice.sample(list(names), len(names))
    weights = [1 / rank if popularity == "zipf" else 1.0 for rank in range(1, len(ranked) + 1)]
    return dice.choices(ranked, weights, k=requests)


def traces(names: Sequence[str], slots: int, times: Sequence[int], requests: int, seed: int) -> list[Trace]:
    """A trace for each multiple of the slots and each popularity; where every adapter has its slot, one is enough."""
    drawn = []
    for multiple in times:
        adapters = tuple(names[: multiple * slots])
        for popularity in ("uniform",) if multiple == 1 else ("zipf", "uniform"):
            drawn.append(Trace(multiple, popularity, adapters, tuple(draw(adapters, requests, popularity, seed))))
    return drawn
