"""What a run's records come to: values only. What could not be measured is None or absent, never 0.

`python -m loadtests.analysis` writes their JSON schema beside this file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from loadtests.scenario import Aim, Scenario

SCHEMA = Path(__file__).with_name("summary.schema.json")
FILE = "summary.json"
Interval = tuple[float, float]


class Value(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Estimate(Value):
    """A figure and its 95 % interval, which is None where too few values are behind it."""

    value: float
    low: float | None = None
    high: float | None = None


class Spread(Value):
    """How values lie. `count` of them; percentiles by numpy's rule, linear between neighbours."""

    count: int
    mean: Estimate
    p50: Estimate
    p95: Estimate
    p99: Estimate
    max: float


class Said(Value):
    """What failed answers said, and how many said it."""

    text: str
    count: int


class Counts(Value):
    """Requests: `planned` = ok + failed + lost + wrong. `first` are first requests of an adapter that was put into a tier, whose
    answers told a tier; `tier_other` are those of them that told another one."""

    planned: int
    sent: int
    ok: int
    failed: int
    lost: int
    wrong: int
    first: int = 0
    tier_other: int = 0
    said: tuple[Said, ...] = ()


class Schedule(Value):
    """How late requests were sent. `kept` is False where the 99th percentile of how far they were from their time, early or late,
    is over `limit_ms`."""

    lag_ms: Spread
    kept: bool
    limit_ms: float


class Split(Value):
    """The TTFT of the answers that have `value` in common. `size_bytes` is the median of their adapters, with `rank` only."""

    by: Literal["tier", "role", "rank", "put"]
    value: str
    ttft_ms: Spread
    size_bytes: float | None = None


class Loading(Value):
    """Adapters' loads: as many as answers say that they led, or as the server counted. `requests` are those that could lead."""

    count: int
    requests: int
    told_by: Literal["answers", "server"]
    per_request: float
    hit_rate: float


class Account(Value):
    """The server's own clocks beside the client's TTFT, over `judged` answers. Followers are left out: their stages are those of
    a load that began before they came. A stage is of the answers that told it, `count` of them.

    `in_front_ms` is TTFT less resolve and relay, `behind_ms` relay less the stages behind the door, `missing_ms` both. `largest`
    is the stage whose mean is the largest of those that don't contain others. `equal`: the median of what is missing is within
    5 ms of nothing.
    """

    stages_ms: dict[str, Spread]
    judged: int
    ttft_ms: Spread | None = None
    in_front_ms: Spread | None = None
    behind_ms: Spread | None = None
    missing_ms: Spread | None = None
    largest: str | None = None
    equal: bool | None = None
    verdict: str = ""


class Streams(Value):
    """Gaps between data events: of all answers; of those that fall between the first cold request of another load and the last
    cold first token (`loading`, at `loads_per_s` loads a second); of the others (`quiet`)."""

    gaps_ms: Spread
    loading_ms: Spread | None = None
    quiet_ms: Spread | None = None
    loads_per_s: float | None = None


class Moved(Value):
    """Requests on an alias that were sent after it was moved. `hot_ms` is the TTFT of the same load's before the first move was
    asked for."""

    requests: int
    engine_share: float | None = None
    ttft_ms: Spread | None = None
    hot_ms: Spread | None = None
    p99_over_hot: float | None = None


class RoundFigures(Value):
    """One start of a peer alone."""

    round: int
    planned: int
    ok: int
    failed: int
    lost: int
    wrong: int
    lag_p99_ms: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None
    answers_per_s: float | None = None


class LoadFigures(Value):
    """A stream of requests to one peer in one phase, all rounds together; `rounds` has each by itself. Latencies are those of
    good answers: neither failed nor wrong."""

    peer: str
    phase: str
    load: str
    counts: Counts
    schedule: Schedule | None = None
    ttft_ms: Spread | None = None
    total_ms: Spread | None = None
    splits: tuple[Split, ...] = ()
    streams: Streams | None = None
    loads: Loading | None = None
    answers_per_s: float | None = None
    account: Account | None = None
    fetch_over_bandwidth: Spread | None = None
    promote: Moved | None = None
    rounds: tuple[RoundFigures, ...] = ()


class Fetches(Value):
    """Reads of adapters' weights at the store, in all rounds; `max_per_adapter` in any one."""

    count: int
    max_per_round: int
    max_per_adapter: int
    bytes: int
    mb_per_s: Spread | None = None


class Changes(Value):
    """What was done to the registry beside the requests: `failed` times in vain, else it took `took_s`."""

    count: int
    failed: int
    took_s: Spread | None = None
    said: tuple[Said, ...] = ()


class Memory(Value):
    """Memory of one part of a server, of the round in which it grew most. `first_bytes` and `last_bytes` are medians of the first
    and the last quarter; the slope is that of the second half. `rests` is None where the phase is too short to say."""

    samples: int
    first_bytes: float
    last_bytes: float
    slope_bytes_per_h: float
    slope_low: float
    slope_high: float
    rests: bool | None = None


class PhaseFigures(Value):
    """A whole phase of one peer. `adapters` is the size of the pools that its loads draw from, `slots` the engine's places."""

    peer: str
    phase: str
    counts: Counts
    answers_per_s: float | None = None
    loads: Loading | None = None
    fetches: Fetches | None = None
    changes: dict[str, Changes] = {}
    memory: dict[str, Memory] = {}
    adapters: int = 0
    slots: int | None = None


class Ratio(Value):
    """A peer's TTFT over ours at the same load, of good answers only; both shares of failures stand beside it."""

    peer: str
    phase: str
    load: str
    stat: Literal["p50", "p95"]
    ratio: Estimate
    peer_failed_share: float
    our_failed_share: float


class AimResult(Value):
    """`value` and `met` are None where the figure was not measured."""

    aim: Aim
    value: float | None = None
    met: bool | None = None


class Mark(Value):
    """What a reader has to know before the figures: `where` is peer/phase/load, as far as it goes."""

    where: str
    what: str


class Summary(Value):
    schema_version: Literal[1] = 1
    scenario: Scenario
    environment: dict[str, Any] = Field(description="as the runner saw it: versions, machine, engine arguments")
    loads: tuple[LoadFigures, ...]
    phases: tuple[PhaseFigures, ...]
    beside: tuple[Ratio, ...] = ()
    aims: tuple[AimResult, ...] = ()
    marks: tuple[Mark, ...] = ()


def schema() -> str:
    return json.dumps(Summary.model_json_schema(mode="validation"), indent=1) + "\n"


def load_summary(path: Path) -> Summary:
    """From the file or the folder that holds it. Raises OSError and pydantic's ValidationError."""
    return Summary.model_validate_json((path / FILE if path.is_dir() else path).read_text())


def write_summary(path: Path, summary: Summary) -> None:
    """What is None is left out: absent, not null."""
    path.write_text(summary.model_dump_json(indent=1, exclude_none=True) + "\n")
