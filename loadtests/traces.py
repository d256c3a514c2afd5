"""Traces of requests: which of some adapters each request asks for, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

Popularity = Literal["zipf", "uniform"]


def trace(names: Sequence[str], requests: int, popularity: Popularity, seed: int) -> list[str]:
    """The names that `requests` requests ask for. `zipf` draws the k-th name with weight 1/k (exponent 1.0); which name is the
    k-th is drawn too, so that no order of publication helps anybody."""
    dice = random.Random(seed)
    ranked = dice.sample(list(names), len(names))
    weights = [1 / rank if popularity == "zipf" else 1.0 for rank in range(1, len(ranked) + 1)]
    return dice.choices(ranked, weights, k=requests)
