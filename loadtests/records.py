"""What a run leaves, one line of JSON each: requests, events, samples of memory. Values only; times in their names' units.

All clocks are the client's. `at_s`, `planned_s` and `sent_s` count from the beginning of the phase, whose wall clock is in
its event `phase`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

Tier = Literal["remote", "disk", "engine"]
Outcome = Literal["ok", "failed", "lost", "wrong"]
REQUESTS, EVENTS, MEMORY = "requests.jsonl", "events.jsonl", "memory.jsonl"


@dataclass(frozen=True, slots=True)
class Record:
    """One planned request and what came of it.

    `number` counts within the phase's plan; `load` is the stream of requests that it belongs to, `pool` the set of adapters
    that its adapter was drawn from (both as the scenario names them; `adapter` is None for the base itself). `put` is the
    tier that the harness had set. `sent_s` is None for one that was lost: planned, and never seen again. `status` is 0
    without an answer. `ttft_ms` is from sending to the first data event, `gaps_ms` between data events. `right` says whether
    the text is the adapter's own sentence (None: it has none). `answered_by`, `tier`, `role` (leader, follower, none) and
    `stages_ms` are what the server said of itself, empty where it says nothing.
    """

    peer: str
    round: int
    phase: str
    load: str
    number: int
    adapter: str | None
    pool: str | None
    rank: int | None
    size_bytes: int | None
    put: Tier | None
    planned_s: float
    sent_s: float | None
    status: int = 0
    error: str = ""
    ttft_ms: float | None = None
    total_ms: float | None = None
    gaps_ms: tuple[float, ...] = ()
    tokens: int = 0
    text: str = ""
    right: bool | None = None
    answered_by: str = ""
    tier: str = ""
    role: str = ""
    stages_ms: dict[str, float] = field(default_factory=dict)

    @property
    def lag_ms(self) -> float | None:
        """How much later than planned it was sent."""
        return None if self.sent_s is None else (self.sent_s - self.planned_s) * 1e3

    @property
    def outcome(self) -> Outcome:
        """`wrong` is an answer that is not the adapter's own."""
        if self.sent_s is None:
            return "lost"
        if self.status != 200 or self.error or self.ttft_ms is None:
            return "failed"
        return "wrong" if self.right is False else "ok"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that the harness did or saw beside the requests.

    Kinds: `phase` (began; `details.wall_ns`, and how many requests are `planned`), `put` (a tier was set and checked), `publish`,
    `republish`, `promote`, `evict` (what a scenario's changes ask for; `took_s`, `details.failed` with the reason), `fetch` (a
    read of an adapter's weights at the store; `details.bytes`, `took_s`), `store` (the store's shape changed), `loads`
    (`details.count`: loads that the server counted in the phase, where its answers don't tell).
    """

    peer: str
    round: int
    phase: str
    at_s: float
    kind: str
    adapter: str | None = None
    took_s: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes that belong to the processes of one part of a server alone (USS)."""

    peer: str
    round: int
    phase: str
    at_s: float
    part: str
    uss_bytes: int


Row = TypeVar("Row", Record, Event, MemorySample)


def append(path: Path, rows: Iterable[Record | Event | MemorySample]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(row), separators=(",", ":")) + "\n" for row in rows)


def read(path: Path, kind: type[Row]) -> Iterator[Row]:
    """The rows of a file, none where there is no file. Raises TypeError for fields that `kind` does not have."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            fields = json.loads(line)
            if "gaps_ms" in fields:
                fields["gaps_ms"] = tuple(fields["gaps_ms"])
            yield kind(**fields)
