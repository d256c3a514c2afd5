"""Whether a version may become what an alias names: one decision, pure, with its reasons."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adapters.errors import InvalidRequest

NOT_EVALUATED = "not_evaluated"
BELOW_MINIMUM = "below_minimum"
NOT_BETTER = "not_better"
UNKNOWN = "unknown"
MEASURED_OTHERWISE = "measured_otherwise"
SHARED = "shared"

METRIC = "eval/easy-64/sampled/solve_rate"


@dataclass(frozen=True, slots=True)
class Gate:
    """`metric` is what decides, a share of 1 (the solve rate on a fixed set), `min_solve_rate` what it has to be at least.
    Raises InvalidRequest."""

    metric: str = METRIC
    min_solve_rate: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_solve_rate <= 1.0:
            raise InvalidRequest(
                f"`min_solve_rate` is {self.min_solve_rate}; it is a share, from 0 to 1",
                limit=1.0,
                value=str(self.min_solve_rate),
                param="min_solve_rate",
            )


@dataclass(frozen=True, slots=True)
class Score:
    """What is known of a version: its `rate`, and how that was `measured` (set, its digest, decoding) where that was said."""

    rate: float | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Incumbent:
    """The version that the alias names now, or is about to; `is_shared` while others share its traffic."""

    version: int
    score: Score
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Reason:
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reasons` say why not; none where the version may be promoted."""

    reasons: tuple[Reason, ...] = ()

    @property
    def promotes(self) -> bool:
        return not self.reasons


def judge(gate: Gate, candidate: Score, incumbent: Incumbent | None) -> Verdict:
    """Promotes what solves enough and strictly more than what the alias names now.

    An incumbent of which nothing is known, or whose rate was measured in another way, is not replaced: users are served by it,
    and nothing shows that the new one is better. Nor is one whose traffic is shared, since that is somebody's trial.
    """
    rate = candidate.rate
    if rate is None or not math.isfinite(rate):
        return Verdict((Reason(NOT_EVALUATED, f"`{gate.metric}` is not known"),))
    reasons = []
    if rate < gate.min_solve_rate:
        reasons.append(Reason(BELOW_MINIMUM, f"`{gate.metric}` is {rate:.4f}; at least {gate.min_solve_rate:.4f} is asked for"))
    if incumbent is not None:
        reasons += _against(gate, rate, candidate, incumbent)
    return Verdict(tuple(reasons))


def _against(gate: Gate, rate: float, candidate: Score, incumbent: Incumbent) -> list[Reason]:
    named, theirs = f"version {incumbent.version}", incumbent.score
    if incumbent.is_shared:
        return [Reason(SHARED, f"the traffic of {named} is shared with others; end that trial first")]
    if theirs.rate is None:
        return [Reason(UNKNOWN, f"`{gate.metric}` of {named} is not known, so nothing shows that this one is better")]
    if candidate.measured and theirs.measured and dict(candidate.measured) != dict(theirs.measured):
        return [Reason(MEASURED_OTHERWISE, f"{named} was measured otherwise: {_difference(candidate.measured, theirs.measured)}")]
    if rate <= theirs.rate:
        return [Reason(NOT_BETTER, f"`{gate.metric}` is {rate:.4f}, that of {named} {theirs.rate:.4f}")]
    return []


def _difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    keys = sorted({*ours, *theirs})
    return ", ".join(f"{key} {theirs.get(key)} and not {ours.get(key)}" for key in keys if ours.get(key) != theirs.get(key))
