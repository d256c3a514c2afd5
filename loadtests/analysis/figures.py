"""A summary as flat figures, the aims that are evaluated from them, and what may be said of them.

    peer/phase/load/ttft_ms/p95          loramux/cold/one/ttft_ms[tier=remote]/p50          loramux/storm/*/fetches/count

A load `*` is the whole phase. An expression is a key, a quotient or a difference of two: `a / b`, `a - b`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from loadtests.analysis.summary import AimResult, Changes, Counts, LoadFigures, Loading, PhaseFigures, Spread, Summary
from loadtests.scenario import PEERS, Aim, Phase, Scenario

WHOLE = "*"
COUNTED = ("planned", "sent", "ok", "failed", "lost", "wrong")
SIGN = re.compile(r" ([/-]) ")
KNOWN = re.compile(
    r"""(planned|sent|ok|failed|lost|wrong|failed_share|tier_other|kept_schedule|answers_per_s)
    |loads|loads_per_request|hit_rate
    |(ttft_ms|total_ms)/(mean|p50|p95|p99|max)|ttft_ms\[(tier|role|rank|put)=\w+\]/(mean|p50|p95|p99|max)
    |gaps_ms(\[(loading|quiet)\])?/(mean|p50|p95|p99|max)|lag_ms/(mean|p50|p95|p99|max)
    |stage_ms\[[\w-]+\]/(mean|p50|p95|p99|max)|missing_ms(\[(in_front|behind)\])?/(mean|p50|p95|p99|max)
    |fetch_over_bandwidth/(mean|p50|p95|p99|max)|promote/(requests|engine_share|p99_over_hot)
    |fetches/(count|max_per_round|max_per_adapter)|fetched_bytes|fetch_mb_per_s/(mean|p50|p95|p99|max)
    |(publish|republish|promote|evict)_s/(mean|p50|p95|p99|max|failed)
    |memory_bytes\[.+\]/(first|last|slope_per_h|rests)""",
    re.VERBOSE,
)


EXAMPLES = (
    "ok",
    "failed",
    "lost",
    "wrong",
    "ttft_ms/p50",
    "ttft_ms/p95",
    "total_ms/p50",
    "gaps_ms/p99",
    "hit_rate",
    "answers_per_s",
)


class UnknownFigure(Exception):
    """A key that no run of the scenario can have; names near ones."""


def figures(summary: Summary) -> dict[str, float]:
    """Every figure that was measured, by its key."""
    found: dict[str, float] = {}
    for load in summary.loads:
        found |= {f"{load.peer}/{load.phase}/{load.load}/{name}": value for name, value in _of_load(load)}
    for phase in summary.phases:
        found |= {f"{phase.peer}/{phase.phase}/{WHOLE}/{name}": value for name, value in _of_phase(phase)}
    return found


def _of_load(load: LoadFigures) -> Iterator[tuple[str, float]]:
    yield from _counts(load.counts)
    if load.schedule:
        yield "kept_schedule", float(load.schedule.kept)
        yield from _spread("lag_ms", load.schedule.lag_ms)
    yield from _spread("ttft_ms", load.ttft_ms)
    yield from _spread("total_ms", load.total_ms)
    for split in load.splits:
        yield from _spread(f"ttft_ms[{split.by}={split.value}]", split.ttft_ms)
    yield from _streams(load)
    yield from _loading(load.loads)
    yield from _maybe("answers_per_s", load.answers_per_s)
    yield from _account(load)
    yield from _spread("fetch_over_bandwidth", load.fetch_over_bandwidth)
    if load.promote:
        yield "promote/requests", float(load.promote.requests)
        yield from _maybe("promote/engine_share", load.promote.engine_share)
        yield from _maybe("promote/p99_over_hot", load.promote.p99_over_hot)


def _of_phase(phase: PhaseFigures) -> Iterator[tuple[str, float]]:
    yield from _counts(phase.counts)
    yield from _maybe("answers_per_s", phase.answers_per_s)
    yield from _loading(phase.loads)
    if phase.fetches:
        yield "fetches/count", float(phase.fetches.count)
        yield "fetches/max_per_round", float(phase.fetches.max_per_round)
        yield "fetches/max_per_adapter", float(phase.fetches.max_per_adapter)
        yield "fetched_bytes", float(phase.fetches.bytes)
        yield from _spread("fetch_mb_per_s", phase.fetches.mb_per_s)
    for kind, done in phase.changes.items():
        yield from _changes(kind, done)
    for part, memory in phase.memory.items():
        yield f"memory_bytes[{part}]/first", memory.first_bytes
        yield f"memory_bytes[{part}]/last", memory.last_bytes
        yield f"memory_bytes[{part}]/slope_per_h", memory.slope_bytes_per_h
        yield from _maybe(f"memory_bytes[{part}]/rests", memory.rests)


def _counts(counts: Counts) -> Iterator[tuple[str, float]]:
    for name in COUNTED:
        yield name, float(getattr(counts, name))
    if counts.planned:
        yield "failed_share", (counts.failed + counts.lost + counts.wrong) / counts.planned
    if counts.first:
        yield "tier_other", float(counts.tier_other)


def _streams(load: LoadFigures) -> Iterator[tuple[str, float]]:
    if load.streams:
        yield from _spread("gaps_ms", load.streams.gaps_ms)
        yield from _spread("gaps_ms[loading]", load.streams.loading_ms)
        yield from _spread("gaps_ms[quiet]", load.streams.quiet_ms)


def _account(load: LoadFigures) -> Iterator[tuple[str, float]]:
    if load.account:
        for stage, lie in load.account.stages_ms.items():
            yield from _spread(f"stage_ms[{stage}]", lie)
        yield from _spread("missing_ms", load.account.missing_ms)
        yield from _spread("missing_ms[in_front]", load.account.in_front_ms)
        yield from _spread("missing_ms[behind]", load.account.behind_ms)


def _loading(loads: Loading | None) -> Iterator[tuple[str, float]]:
    if loads:
        yield "loads", float(loads.count)
        yield "loads_per_request", loads.per_request
        yield "hit_rate", loads.hit_rate


def _changes(kind: str, done: Changes) -> Iterator[tuple[str, float]]:
    yield f"{kind}_s/failed", float(done.failed)
    yield from _spread(f"{kind}_s", done.took_s)


def _spread(name: str, lie: Spread | None) -> Iterator[tuple[str, float]]:
    if lie is not None:
        yield f"{name}/mean", lie.mean.value
        yield f"{name}/p50", lie.p50.value
        yield f"{name}/p95", lie.p95.value
        yield f"{name}/p99", lie.p99.value
        yield f"{name}/max", lie.max


def _maybe(name: str, value: float | None) -> Iterator[tuple[str, float]]:
    if value is not None:
        yield name, float(value)


def is_late(summary: Summary) -> Callable[[str], bool]:
    """Whether a load that an expression is about did not keep its schedule."""
    late = {(load.peer, load.phase, load.load) for load in summary.loads if load.schedule and not load.schedule.kept}
    late |= {(peer, phase, WHOLE) for peer, phase, _ in late}
    return lambda expression: any(key.startswith("/".join(where) + "/") for key in keys(expression) for where in late)


# -- expressions and aims ----------------------------------------------------------------------------------------------


def keys(expression: str) -> tuple[str, ...]:
    """The one or two keys of an expression."""
    return tuple(part.strip() for part in SIGN.split(expression, maxsplit=1)[::2])


def evaluated(expression: str, measured: Mapping[str, float]) -> float | None:
    """None where a key was not measured, or where it would be divided by 0."""
    values = [measured.get(key) for key in keys(expression)]
    if any(value is None for value in values):
        return None
    if len(values) == 1:
        return values[0]
    a, b = values
    if (sign := SIGN.search(expression)) and sign[1] == "-":
        return a - b
    return a / b if b else None


def check_expression(expression: str, scenario: Scenario, measured: Iterable[str] = ()) -> None:
    """Raises UnknownFigure for a key that no run of the scenario can have. `measured` are keys that near names come from, too."""
    places = [f"{peer}/{phase.name}/{name}/" for peer in PEERS for phase in scenario.phases for name in _loads(phase)]
    for key in keys(expression):
        place = next((place for place in places if key.startswith(place)), None)
        if place is None or not KNOWN.fullmatch(key.removeprefix(place)):
            examples = [f"{one}{name}" for one in places if place in (None, one) for name in EXAMPLES]
            near = difflib.get_close_matches(key, dict.fromkeys([*measured, *examples]), n=3, cutoff=0.4)
            raise UnknownFigure(
                f"no figure {key}: " + (f"near it are {', '.join(near)}" if near else "it is peer/phase/load/figure")
            )


def _loads(phase: Phase) -> list[str]:
    return [*(load.name for load in phase.loads), WHOLE]


def check_aims(scenario: Scenario) -> None:
    """Before a run. Raises UnknownFigure."""
    for aim in scenario.aims:
        try:
            check_expression(aim.figure, scenario)
        except UnknownFigure as error:
            raise UnknownFigure(f"aim {aim.name}: {error}") from None


def aims(scenario: Scenario, measured: Mapping[str, float]) -> tuple[AimResult, ...]:
    """Each aim beside what was measured. Raises UnknownFigure."""
    found = []
    for aim in scenario.aims:
        check_expression(aim.figure, scenario, measured)
        value = evaluated(aim.figure, measured)
        found.append(AimResult(aim=aim, value=value, met=None if value is None else _met(aim, value)))
    return tuple(found)


def _met(aim: Aim, value: float) -> bool:
    return value <= aim.limit if aim.bound == "<=" else value >= aim.limit
