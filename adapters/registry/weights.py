"""Aliases that share their traffic: what weights are allowed, and which version a caller gets. Pure functions."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

from adapters.errors import InvalidRequest

MAX_SHARES = 8
MAX_WEIGHT = 1_000_000
_POINTS = 2**64


def check_weights(weights: Mapping[int, int]) -> dict[int, int]:
    """The shares that are not 0, in version order. Raises InvalidRequest."""
    for version, weight in weights.items():
        if type(weight) is not int or not 0 <= weight <= MAX_WEIGHT:
            raise InvalidRequest(
                f"the weight of version {version} is {weight}; a whole number from 0 to {MAX_WEIGHT} is needed",
                limit=MAX_WEIGHT,
                value=weight,
                param="weights",
            )
    shares = {version: weight for version, weight in sorted(weights.items()) if weight}
    if not shares:
        raise InvalidRequest("no version has a weight above 0", param="weights", limit="at least one", value=0)
    if len(shares) > MAX_SHARES:
        raise InvalidRequest(
            f"{len(shares)} versions share the alias; at most {MAX_SHARES} may",
            limit=MAX_SHARES,
            value=len(shares),
            param="weights",
        )
    return shares


def choose(weights: Mapping[int, int], point: float) -> int:
    """The version at `point` of [0, 1). The newest owns the low end: who has it keeps it while its share grows."""
    total, low = sum(weights.values()), 0
    for version in sorted(weights, reverse=True):
        low += weights[version]
        if point * total < low:
            return version
    return min(weights)


def point_of(adapter: str, alias: str, key: str | None) -> float:
    """Where a caller stands in [0, 1): fixed for a key under one alias of one adapter, anywhere without one.

    The adapter and the alias count, so that not always the same callers are the first to meet something new.
    """
    if key is None:
        return random.random()
    digest = hashlib.sha256("\0".join((adapter, alias, key)).encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / _POINTS
