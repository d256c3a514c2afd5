"""What went on beside the requests: reads at the store, changes, promotions, memory."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from loadtests.analysis.requests import said, ttfts
from loadtests.analysis.spread import percentile, rounded, spread
from loadtests.analysis.summary import Changes, Fetches, Memory, Moved
from loadtests.records import Event, MemorySample, Record

CHANGES = ("publish", "republish", "promote", "evict")

FEWEST_SAMPLES, SHORTEST_S = 20, 300.0
MOST_POINTS = 60  # medians of neighbours: samples a moment apart are no independent witnesses
GROWS_FROM = 0.01  # of its size, an hour


def fetches(events: Iterable[Event]) -> Fetches | None:
    found = [event for event in events if event.kind == "fetch"]
    if not found:
        return None
    rates = [
        event.details["bytes"] / event.took_s / 1e6 for event in found if event.took_s and event.details.get("bytes") is not None
    ]
    return Fetches(
        count=len(found),
        max_per_round=max(Counter(event.round for event in found).values()),
        max_per_adapter=max(Counter((event.round, event.adapter) for event in found).values()),
        bytes=sum(event.details.get("bytes") or 0 for event in found),
        mb_per_s=spread(rates),
    )


def changes(events: Iterable[Event]) -> dict[str, Changes]:
    """By kind; one that failed counts as failed and its time nowhere."""
    of_kind: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind in CHANGES:
            of_kind[event.kind].append(event)
    return {kind: _changes(found) for kind, found in sorted(of_kind.items(), key=lambda item: CHANGES.index(item[0]))}


def _changes(events: Sequence[Event]) -> Changes:
    failed = [event for event in events if event.details.get("failed")]
    took = [event.took_s for event in events if event.took_s is not None and not event.details.get("failed")]
    return Changes(
        count=len(events), failed=len(failed), took_s=spread(took), said=said(str(event.details["failed"]) for event in failed)
    )


def moved(records: Sequence[Record], events: Iterable[Event]) -> Moved | None:
    """Requests of one load on an alias, those after its first move beside those before the first was asked for; None where
    nothing moved."""
    asked_s: dict[int, float] = {}
    moved_s: dict[int, float] = {}
    for event in sorted((event for event in events if event.kind == "promote"), key=lambda event: event.at_s):
        asked_s.setdefault(event.round, event.at_s)
        if event.took_s is not None and not event.details.get("failed"):
            moved_s.setdefault(event.round, float(event.details.get("moved_s") or event.at_s + event.took_s))
    if not moved_s:
        return None
    sent = [record for record in records if record.sent_s is not None]
    after = [record for record in sent if record.sent_s > moved_s.get(record.round, math.inf)]
    hot = ttfts(record for record in sent if record.sent_s < asked_s.get(record.round, -math.inf))
    told = [record for record in after if record.tier]
    later_p99, hot_p99 = percentile(ttfts(after), 0.99), percentile(hot, 0.99)
    return Moved(
        requests=len(after),
        engine_share=rounded(sum(record.tier == "engine" for record in told) / len(told)) if told else None,
        ttft_ms=spread(ttfts(after)),
        hot_ms=spread(hot),
        p99_over_hot=rounded(later_p99 / hot_p99) if later_p99 and hot_p99 else None,
    )


# -- memory ------------------------------------------------------------------------------------------------------------


def memory(samples: Iterable[MemorySample]) -> dict[str, Memory]:
    """By part: of the round in which it grew most."""
    series: dict[str, dict[int, list[MemorySample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        series[sample.part][sample.round].append(sample)
    found = {part: [growth(of_round) for of_round in rounds.values()] for part, rounds in sorted(series.items())}
    return {part: max(grown, key=lambda one: one.slope_bytes_per_h) for part, grown in found.items()}


def growth(samples: Sequence[MemorySample]) -> Memory:
    """How one part's memory grew in one round.

    The slope is the median of the slopes between all pairs of points (Theil-Sen) of the second half, since the first fills what
    fills once; its interval is Sen's (from the variance of Kendall's statistic). It grows where the interval lies above 0 and the
    slope is more than 1 % of its size an hour.
    """
    ordered = sorted(samples, key=lambda sample: sample.at_s)
    sizes = [sample.uss_bytes for sample in ordered]
    quarter = max(1, len(sizes) // 4)
    last = float(np.median(sizes[-quarter:]))
    slope, low, high = _slope_per_s(_thinned(ordered[len(ordered) // 2 :]))
    long_enough = len(ordered) >= FEWEST_SAMPLES and ordered[-1].at_s - ordered[0].at_s >= SHORTEST_S
    grows = low > 0 and slope * 3600 > GROWS_FROM * last
    return Memory(
        samples=len(ordered),
        first_bytes=float(np.median(sizes[:quarter])),
        last_bytes=last,
        slope_bytes_per_h=rounded(slope * 3600),
        slope_low=rounded(low * 3600),
        slope_high=rounded(high * 3600),
        rests=not grows if long_enough else None,
    )


def _thinned(samples: Sequence[MemorySample]) -> np.ndarray:
    """Time and size, medians of neighbours, so many at most."""
    points = np.array([(sample.at_s, sample.uss_bytes) for sample in samples], dtype=float)
    parts = np.array_split(points, min(MOST_POINTS, len(points)))
    return np.array([np.median(part, axis=0) for part in parts])


def _slope_per_s(points: np.ndarray) -> tuple[float, float, float]:
    """The median slope and its interval; zeros where there is one point."""
    first, second = np.triu_indices(len(points), 1)
    passed = points[second, 0] - points[first, 0]
    slopes = np.sort((points[second, 1] - points[first, 1])[passed > 0] / passed[passed > 0])
    if not len(slopes):
        return 0.0, 0.0, 0.0
    n = len(points)
    off = 1.96 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low = slopes[max(0, round((len(slopes) - off) / 2))]
    high = slopes[min(len(slopes) - 1, round((len(slopes) + off) / 2))]
    return float(np.median(slopes)), float(low), float(high)
