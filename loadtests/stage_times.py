"""What a run measured of fetches, loads and hot answers, as the times that a plan counts with."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from loadtests.analysis.summary import LoadFigures, Spread, Summary
from loadtests.planning import Times

OURS = "loramux"
AT_ONCE_BYTES_PER_S = 1e15  # where a run does not tell sizes, the time is the same for all


class NotMeasured(Exception):
    """The run lacks what a plan needs; the text says what."""


def times_of(summary: Summary) -> Times:
    """Medians: of the fetch stage where most answers came from the store, of stage and load together where most loads were, and
    the TTFT where most answers found their adapter in the engine. Raises NotMeasured."""
    loads = [load for load in summary.loads if load.peer == OURS]
    fetched = _most(loads, lambda load: _stage(load, "fetch"), "remote", "an adapter from the store with its fetch stage")
    loaded = _most(loads, lambda load: _stage(load, "load"), None, "a load of an adapter with its stage")
    hot = _most(loads, lambda load: _tier(load, "engine"), None, "an answer from tier engine")
    hot_ms = _tier(hot, "engine")
    assert hot_ms is not None
    return Times(
        *_rate(_stage_s(fetched, "fetch"), fetched),
        *_rate(_stage_s(loaded, "load") + _stage_s(loaded, "stage"), loaded),
        hot_p50_ms=hot_ms.p50.value,
        hot_p95_ms=max(hot_ms.p50.value, hot_ms.p95.value),
        measured_bytes=_size(fetched),
    )


def _most(
    loads: Iterable[LoadFigures], spread: Callable[[LoadFigures], Spread | None], tier: str | None, what: str
) -> LoadFigures:
    def count(load: LoadFigures) -> int:
        shown, of_tier = spread(load), spread(load) if tier is None else _tier(load, tier)
        return min(shown.count, of_tier.count) if shown is not None and of_tier is not None else 0

    fitting = [load for load in loads if count(load)]
    if not fitting:
        raise NotMeasured(f"the run has no answer of {OURS} that shows {what}")
    return max(fitting, key=count)


def _stage(load: LoadFigures, stage: str) -> Spread | None:
    return load.account.stages_ms.get(stage) if load.account is not None else None


def _stage_s(load: LoadFigures, stage: str) -> float:
    spread = _stage(load, stage)
    return spread.p50.value / 1e3 if spread is not None else 0.0


def _tier(load: LoadFigures, tier: str) -> Spread | None:
    return next((split.ttft_ms for split in load.splits if (split.by, split.value) == ("tier", tier)), None)


def _rate(took_s: float, load: LoadFigures) -> tuple[float, float]:
    """Seconds whatever the size, and bytes a second."""
    size_bytes = _size(load)
    return (0.0, size_bytes / took_s) if size_bytes and took_s else (took_s, AT_ONCE_BYTES_PER_S)


def _size(load: LoadFigures) -> float | None:
    """The median of those of the rank that was asked for most."""
    sized = [split for split in load.splits if split.by == "rank" and split.size_bytes]
    return max(sized, key=lambda split: split.ttft_ms.count).size_bytes if sized else None
