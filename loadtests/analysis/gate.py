"""A run beside a baseline: figures that must hold, with tolerances as ratios."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from loadtests.analysis.figures import COUNTED, WHOLE, evaluated, figures, is_late, keys
from loadtests.analysis.spread import rounded
from loadtests.analysis.summary import LoadFigures, Summary, Value
from loadtests.scenario import OURS

TOLERANCE = 1.5
MUST_BE_NONE = ("failed", "lost", "wrong")
NOT_IN_BRIEF = ("engine",)


class BadBaseline(Exception):
    """A file that is no baseline, or of another scenario; says why."""


class Kept(Value):
    """What a figure was, and how far it may move: up to `value * tolerance`, or down to `value / tolerance` for `>=`."""

    value: float
    tolerance: float = Field(1.0, ge=1)
    bound: Literal["<=", ">="] = "<="

    @property
    def limit(self) -> float:
        far = abs(self.value) * (self.tolerance - 1 if self.bound == "<=" else 1 - 1 / self.tolerance)
        return rounded(self.value + far if self.bound == "<=" else self.value - far)


class Baseline(Value):
    """`figures` by key, or by quotient or difference of two: quotients within a run hold on other machines too."""

    schema_version: Literal[1] = 1
    scenario: str
    made_from: dict[str, Any] = Field(default_factory=dict)
    figures: dict[str, Kept]


class Verdict(Value):
    """`value` is None where the figure was not measured, which is a miss. `late`: a load behind it did not keep its schedule."""

    figure: str
    value: float | None
    limit: float
    bound: Literal["<=", ">="]
    baseline: float
    met: bool
    late: bool = False


def check(baseline: Baseline, summary: Summary) -> tuple[Verdict, ...]:
    """A verdict for each figure of the baseline. Raises BadBaseline for a run of another scenario."""
    if baseline.scenario != summary.scenario.name:
        raise BadBaseline(f"the baseline is of the scenario {baseline.scenario}, the run of {summary.scenario.name}")
    measured, late = figures(summary), is_late(summary)
    return tuple(_verdict(figure, kept, evaluated(figure, measured), late(figure)) for figure, kept in baseline.figures.items())


def _verdict(figure: str, kept: Kept, value: float | None, late: bool) -> Verdict:
    met = value is not None and (value <= kept.limit if kept.bound == "<=" else value >= kept.limit)
    return Verdict(figure=figure, value=value, limit=kept.limit, bound=kept.bound, baseline=kept.value, met=met, late=late)


def baseline_of(summary: Summary, like: Baseline | None = None) -> Baseline:
    """A baseline from a run: the figures, tolerances and bounds of `like` with new values, else a choice that holds on other
    machines: nothing failed, lost or wrong; our TTFT over a peer's, else over that of our quickest load; hit rates; fetches.

    Raises BadBaseline where a figure of `like` was not measured.
    """
    measured = figures(summary)
    if like is None:
        found = dict(_chosen(summary, measured))
    else:
        found = {figure: _anew(figure, kept, evaluated(figure, measured)) for figure, kept in like.figures.items()}
    made_from = {key: value for key, value in summary.environment.items() if key not in NOT_IN_BRIEF}
    return Baseline(scenario=summary.scenario.name, made_from=made_from, figures=found)


def _anew(figure: str, kept: Kept, value: float | None) -> Kept:
    if value is None:
        raise BadBaseline(f"{figure} was not measured")
    return kept if _is_count(figure) else kept.model_copy(update={"value": rounded(value)})


def _is_count(figure: str) -> bool:
    return all(key.rsplit("/", 1)[-1] in COUNTED for key in keys(figure)) and len(keys(figure)) == 1


def _chosen(summary: Summary, measured: Mapping[str, float]) -> Iterator[tuple[str, Kept]]:
    ours = [load for load in summary.loads if load.peer == OURS]
    quickest = min((load for load in ours if load.ttft_ms), key=lambda load: load.ttft_ms.p50.value, default=None)
    for load in ours:
        where = _where(load)
        for stat in ("p50", "p95"):
            figure = f"{where}/ttft_ms/{stat}"
            over = _reference(summary, load, quickest, stat, measured)
            if over and (value := evaluated(f"{figure} / {over}", measured)) is not None:
                yield f"{figure} / {over}", Kept(value=rounded(value), tolerance=TOLERANCE)
        if f"{where}/hit_rate" in measured:
            yield f"{where}/hit_rate", Kept(value=measured[f"{where}/hit_rate"], tolerance=1.1, bound=">=")
    for phase in summary.phases:
        if phase.peer == OURS:
            yield from ((f"{OURS}/{phase.phase}/{WHOLE}/{name}", Kept(value=0)) for name in MUST_BE_NONE)
            if phase.fetches:
                most = phase.fetches.max_per_adapter
                yield f"{OURS}/{phase.phase}/{WHOLE}/fetches/max_per_adapter", Kept(value=most)


def _where(load: LoadFigures) -> str:
    return f"{load.peer}/{load.phase}/{load.load}"


def _reference(
    summary: Summary, load: LoadFigures, quickest: LoadFigures | None, stat: str, measured: Mapping[str, float]
) -> str | None:
    peers = (f"{peer}/{load.phase}/{load.load}/ttft_ms/{stat}" for peer in summary.scenario.peers if peer != OURS)
    found = next((key for key in peers if key in measured), None)
    if found or quickest is None or quickest is load:
        return found
    return f"{_where(quickest)}/ttft_ms/p50"


def load_baseline(path: Path) -> Baseline:
    """Raises BadBaseline."""
    try:
        return Baseline.model_validate_json(path.read_text())
    except OSError as error:
        raise BadBaseline(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise BadBaseline(f"{path.name}: {'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}") from None


def write_baseline(path: Path, baseline: Baseline) -> None:
    path.write_text(baseline.model_dump_json(indent=1) + "\n")
