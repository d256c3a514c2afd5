"""Two runs of one scenario beside each other: ratios with intervals, and which stage grew. From their summaries alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from loadtests.analysis.figures import figures, is_late
from loadtests.analysis.spread import rounded
from loadtests.analysis.summary import Account, Estimate, LoadFigures, Summary, Value
from loadtests.scenario import Scenario

MAY_DIFFER = ("about", "aims", "rounds", "peers", "memory_every_s")
WARNED = ("store", "engine", "seed")  # where it runs, not what is asked
MOMENTS = ("date", "when", "began", "ended", "took_s", "run", "folder", "command", "commit")
COUNTS = ("planned", "failed", "lost", "wrong")
PLAIN = ("answers_per_s", "hit_rate", "gaps_ms/p99", "gaps_ms/max", "gaps_ms[loading]/p99")
LEAST_MS, LEAST_SHARE = 1.0, 0.02  # what a stage has to grow by, and of the TTFT, to be named


class Incomparable(Exception):
    """Runs of different scenarios; says what differs."""


class Row(Value):
    """A figure in both runs. `verdict` says whether the ratio's interval leaves 1 out; empty where there is no interval."""

    figure: str
    a: Estimate
    b: Estimate
    ratio: Estimate | None = None
    verdict: str = ""
    late: bool = False


class Grown(Value):
    """How the mean TTFT of a load differs between the runs, in ms, and the stages that account for it, largest first: means,
    since they add up. Stages named `in front of the door` and `behind the door` are what no clock has seen."""

    where: str
    ttft_ms: Estimate
    stages_ms: dict[str, Estimate]

    @property
    def sentence(self) -> str:
        if not self.stages_ms:
            return f"{self.where}: TTFT {self.ttft_ms.value:+.1f} ms in the mean; no stage differs by more than its noise"
        told = ", ".join(f"{name} {delta.value:+.1f} ms" for name, delta in self.stages_ms.items())
        return f"{self.where}: TTFT {self.ttft_ms.value:+.1f} ms in the mean; {told}"


class Comparison(Value):
    """`b` over `a`. `counts` are absolute; `missing` are figures that one of the runs does not have."""

    scenario: str
    rows: tuple[Row, ...]
    counts: dict[str, tuple[float, float]]
    grown: tuple[Grown, ...]
    warnings: tuple[str, ...]
    missing: tuple[str, ...]


def compare(a: Summary, b: Summary) -> Comparison:
    """Raises Incomparable."""
    warnings = (*_scenarios(a.scenario, b.scenario), *_environments(a.environment, b.environment))
    of_a, of_b = ({(one.peer, one.phase, one.load): one for one in run.loads} for run in (a, b))
    both = [key for key in of_a if key in of_b]
    late = [is_late(run) for run in (a, b)]
    return Comparison(
        scenario=a.scenario.name,
        rows=tuple(row for key in both for row in _rows("/".join(key), of_a[key], of_b[key], late)) + tuple(_plain(a, b, late)),
        counts=_counts(a, b),
        grown=tuple(found for key in both if (found := grown("/".join(key), of_a[key], of_b[key]))),
        warnings=warnings,
        missing=tuple("/".join(key) for key in sorted({*of_a} ^ {*of_b})),
    )


def _counts(a: Summary, b: Summary) -> dict[str, tuple[float, float]]:
    """Of loads and of whole phases, where a request may be missing whose load nobody knows."""
    of_a, of_b = figures(a), figures(b)
    return {key: (value, of_b[key]) for key, value in of_a.items() if key in of_b and key.rsplit("/", 1)[-1] in COUNTS}


def _rows(where: str, a: LoadFigures, b: LoadFigures, late: list[Callable[[str], bool]]) -> Iterator[Row]:
    for name in ("ttft_ms", "total_ms"):
        one, other = getattr(a, name), getattr(b, name)
        if one is not None and other is not None:
            for stat in ("p50", "p95", "p99"):
                yield _row(f"{where}/{name}/{stat}", getattr(one, stat), getattr(other, stat), late)


def _row(figure: str, a: Estimate, b: Estimate, late: list[Callable[[str], bool]]) -> Row:
    over = quotient(a, b)
    return Row(figure=figure, a=a, b=b, ratio=over, verdict=_verdict(over), late=any(check(figure) for check in late))


def _plain(a: Summary, b: Summary, late: list[Callable[[str], bool]]) -> Iterator[Row]:
    of_a, of_b = figures(a), figures(b)
    for figure, value in of_a.items():
        if figure in of_b and figure.endswith(tuple(f"/{name}" for name in PLAIN)):
            yield _row(figure, Estimate(value=value), Estimate(value=of_b[figure]), late)


def quotient(a: Estimate, b: Estimate) -> Estimate | None:
    """b over a, with the interval that follows from theirs when they are independent (in logarithms, by the distances of the
    limits from the values; Zou and Donner 2008). None where a value is not above 0."""
    if a.value <= 0 or b.value <= 0:
        return None
    value = b.value / a.value
    if not (a.low and a.high and b.low and b.high) or min(a.low, b.low) <= 0:
        return Estimate(value=rounded(value))
    down = math.hypot(math.log(b.value / b.low), math.log(a.high / a.value))
    up = math.hypot(math.log(b.high / b.value), math.log(a.value / a.low))
    return Estimate(value=rounded(value), low=rounded(value * math.exp(-down)), high=rounded(value * math.exp(up)))


def difference(a: Estimate, b: Estimate) -> Estimate:
    """b less a, with the interval that follows from theirs."""
    value = b.value - a.value
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return Estimate(value=rounded(value))
    low, high = value - math.hypot(b.value - b.low, a.high - a.value), value + math.hypot(b.high - b.value, a.value - a.low)
    return Estimate(value=rounded(value), low=rounded(low), high=rounded(high))


def _verdict(over: Estimate | None) -> str:
    if over is None or over.low is None or over.high is None:
        return ""
    return "more" if over.low > 1 else "less" if over.high < 1 else "no difference seen"


# -- which stage grew --------------------------------------------------------------------------------------------------


def grown(where: str, a: LoadFigures, b: LoadFigures) -> Grown | None:
    """None where either run tells no stages."""
    if not (a.account and b.account and a.account.ttft_ms and b.account.ttft_ms):
        return None
    of_a, of_b = _clocks(a.account), _clocks(b.account)
    least = max(LEAST_MS, LEAST_SHARE * a.account.ttft_ms.mean.value)
    nothing = Estimate(value=0.0, low=0.0, high=0.0)
    deltas = {name: difference(of_a.get(name, nothing), of_b.get(name, nothing)) for name in {**of_a, **of_b}}
    named = {name: delta for name, delta in deltas.items() if abs(delta.value) >= least and _is_sure(delta)}
    return Grown(
        where=where,
        ttft_ms=difference(a.account.ttft_ms.mean, b.account.ttft_ms.mean),
        stages_ms=dict(sorted(named.items(), key=lambda item: -abs(item[1].value))),
    )


def _clocks(account: Account) -> dict[str, Estimate]:
    """What parts that don't contain each other add to the mean TTFT; answers that don't tell a stage had none of it."""
    unseen = {"in front of the door": account.in_front_ms, "behind the door": account.behind_ms}
    parts = {name: lie for name, lie in (account.stages_ms | unseen).items() if name != "relay" and lie is not None}
    return {name: _scaled(lie.mean, lie.count / account.judged) for name, lie in parts.items()}


def _scaled(estimate: Estimate, by: float) -> Estimate:
    low, high = (None if end is None else end * by for end in (estimate.low, estimate.high))
    return Estimate(value=estimate.value * by, low=low, high=high)


def _is_sure(delta: Estimate) -> bool:
    return delta.low is None or delta.high is None or delta.low > 0 or delta.high < 0


# -- may they be compared ----------------------------------------------------------------------------------------------


def _scenarios(a: Scenario, b: Scenario) -> tuple[str, ...]:
    """Warnings; raises Incomparable where the two runs were not asked the same."""
    if a.name != b.name:
        raise Incomparable(f"runs of different scenarios: {a.name} and {b.name}")
    of_a, of_b = flat(a.model_dump(mode="json")), flat(b.model_dump(mode="json"))
    different = [key for key in {**of_a, **of_b} if of_a.get(key) != of_b.get(key) and key.split(".")[0] not in MAY_DIFFER]
    asked = [key for key in different if not {*key.split(".")} & {*WARNED}]
    if asked:
        raise Incomparable(f"both runs are of {a.name}, but it asks something else now: {', '.join(asked[:8])}")
    return tuple(f"{key}: {of_a.get(key)} and {of_b.get(key)}" for key in different)


def _environments(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, ...]:
    of_a, of_b = flat(a), flat(b)
    different = [key for key in {**of_a, **of_b} if of_a.get(key) != of_b.get(key) and key.split(".")[-1] not in MOMENTS]
    return tuple(f"{key}: {of_a.get(key, 'not told')} and {of_b.get(key, 'not told')}" for key in different)


def flat(document: Any, above: str = "") -> dict[str, Any]:
    """Plain values by their path, `a.b.0`."""
    if isinstance(document, Mapping):
        items = [(str(key), value) for key, value in document.items()]
    elif isinstance(document, list | tuple):
        items = [(str(number), value) for number, value in enumerate(document)]
    else:
        return {above: document}
    return {key: value for name, below in items for key, value in flat(below, f"{above}.{name}" if above else name).items()}
