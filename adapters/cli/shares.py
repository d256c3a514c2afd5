"""From "10 % to version 8" to the weights of an alias. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from adapters.errors import InvalidRequest
from adapters.registry.weights import MAX_WEIGHT
from adapters.types import Head


def weights_of(head: Head, alias: str) -> dict[int, int]:
    """What the alias sends where; empty if it names nothing."""
    if alias in head.weights:
        return head.weights[alias]
    return {head.aliases[alias]: 1} if alias in head.aliases else {}


def with_share(weights: Mapping[int, int], version: int, percent: float) -> dict[int, int]:
    """`version` gets `percent` of the traffic, the others keep their proportions in the rest; as percent where that is exact.

    Raises InvalidRequest if there is nobody to share with, or the percentage is none.
    """
    share = Fraction(str(percent)) / 100
    if not 0 <= share <= 1:
        raise InvalidRequest(f"{percent:g} % is no share", limit="0 to 100", value=percent, param="weight")
    others = {number: weight for number, weight in weights.items() if number != version}
    if share == 1:
        return {version: 100}
    if not others:
        raise InvalidRequest(
            f"there is no other version to share with {version}",
            reason="nothing_to_share_with",
            hint="promote it without --weight, or name another version",
        )
    total = sum(others.values())
    shares = {number: Fraction(weight, total) * (1 - share) for number, weight in others.items()} | {version: share}
    return _whole({number: part for number, part in shares.items() if part})


def newcomer(head: Head, alias: str) -> int | None:
    """While the alias shares its traffic: the newest version that it doesn't name, the one under trial."""
    others = [version for version in head.weights.get(alias, {}) if version != head.aliases.get(alias)]
    return max(others, default=None)


def percentages(weights: Mapping[int, int]) -> dict[int, float]:
    total = sum(weights.values())
    return {version: 100 * weight / total for version, weight in sorted(weights.items())}


def shown(percent: float) -> str:
    """`10%`, `0.5%`, `33.3%`."""
    return f"{percent:.3g}%"


def _whole(shares: Mapping[int, Fraction]) -> dict[int, int]:
    """Whole numbers in the same proportion: percent if that is exact, the smallest else."""
    scale = math.lcm(*(part.denominator for part in shares.values()))
    scale = 100 if 100 % scale == 0 else scale
    if scale > MAX_WEIGHT:
        scale = 10_000  # such proportions nobody asked for; a hundredth of a percent is near enough
    return {version: max(1, round(part * scale)) for version, part in sorted(shares.items())}
