"""Percentiles, the intervals that they come with, ratios of them. One rule everywhere: numpy's, linear between neighbours.

Intervals are of the bootstrap (percentiles of 1,000 resamples, 95 %), seeded, so that the same records give the same figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from loadtests.analysis.summary import Estimate, Spread

RESAMPLES = 1000
FEWEST = 5  # values; fewer say nothing about how far they spread
SEED = 5
MOST_DRAWN = 2_000_000  # numbers at once: 16 MB
SHARES = (0.5, 0.95, 0.99)
DIGITS = 4


def percentile(values: Iterable[float], share: float) -> float | None:
    """None where there are no values."""
    found = list(values)
    return float(np.percentile(found, share * 100)) if found else None


def spread(values: Iterable[float], intervals: bool = True) -> Spread | None:
    """None where there are no values."""
    found = np.asarray(list(values), dtype=float)
    if not len(found):
        return None
    points = (found.mean(), *np.percentile(found, np.multiply(SHARES, 100)))
    if intervals and len(found) >= FEWEST:
        drawn = _resampled(found, SHARES, SEED)
        mean, p50, p95, p99 = (_estimate(point, drawn[:, number]) for number, point in enumerate(points))
    else:
        mean, p50, p95, p99 = (Estimate(value=rounded(point)) for point in points)
    return Spread(count=len(found), mean=mean, p50=p50, p95=p95, p99=p99, max=rounded(found.max()))


def ratio(above: Sequence[float], below: Sequence[float], share: float) -> Estimate | None:
    """One percentile over the same of others; None where either has no values or the lower one is 0."""
    if not above or not below or not (base := float(np.percentile(below, share * 100))):
        return None
    value = float(np.percentile(above, share * 100)) / base
    if min(len(above), len(below)) < FEWEST:
        return Estimate(value=rounded(value))
    drawn = _resampled(np.asarray(above), (share,), SEED) / _resampled(np.asarray(below), (share,), SEED + 1)
    return _estimate(value, drawn[:, 1])


def rounded(value: float) -> float:
    """To so many digits after the point, or to as many that count where the number is small."""
    return round(float(value), DIGITS) if abs(value) >= 1 else float(f"{value:.{DIGITS}g}")


def _resampled(values: np.ndarray, shares: Sequence[float], seed: int) -> np.ndarray:
    """The mean and the percentiles of each resample: a row each."""
    random = np.random.default_rng(seed)
    rows = max(1, MOST_DRAWN // len(values))
    parts = []
    for begin in range(0, RESAMPLES, rows):
        drawn = random.choice(values, (min(rows, RESAMPLES - begin), len(values)))
        parts.append(np.vstack([drawn.mean(axis=1), np.percentile(drawn, np.multiply(shares, 100), axis=1)]).T)
    return np.concatenate(parts)


def _estimate(value: float, drawn: np.ndarray) -> Estimate:
    low, high = np.percentile(drawn, (2.5, 97.5))
    return Estimate(value=rounded(value), low=rounded(low), high=rounded(high))
