"""The server's clocks beside the client's: where a first token's time went, and what no clock has seen.

`resolve` is the gateway's, from the body to the ref. `relay` is the gateway's too, from dispatch to the first bytes: it contains
the replica's stages, each with a clock of its own, `fetch`, `stage`, `queue`, `load`, `engine` (to the first bytes). No stage is
a remainder, so what is missing shows:

    in front of the door   client's TTFT - resolve - relay: connection, proxy, reading the body, the way of the first bytes back
    behind the door        relay - fetch - stage - queue - load - engine: choosing a replica, the way there and back
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtests.analysis.requests import good
from loadtests.analysis.spread import spread
from loadtests.analysis.summary import Account, Spread
from loadtests.records import Record

STAGES = ("resolve", "relay", "fetch", "stage", "queue", "load", "engine")
BEHIND = STAGES[2:]
EQUAL_MS = 5.0
IN_FRONT, BEHIND_DOOR = "in front of the door", "behind the door"


def account(records: Sequence[Record]) -> Account | None:
    """None where no answer told its stages."""
    told = [record for record in good(records) if record.stages_ms and record.role != "follower"]
    if not told:
        return None
    names = dict.fromkeys([*STAGES, *(name for record in told for name in record.stages_ms)])
    lie = {name: spread(record.stages_ms[name] for record in told if name in record.stages_ms) for name in names}
    stages = {name: found for name, found in lie.items() if found is not None}
    parts = {name: found for name, found in stages.items() if name != "relay"}
    largest = max(parts, key=lambda name: parts[name].mean.value) if parts else None
    judged = [record for record in told if {"resolve", "relay"} <= record.stages_ms.keys()]
    if not judged:
        return Account(stages_ms=stages, judged=0, largest=largest, verdict="no answer told resolve and relay")
    front, behind = [in_front_ms(record) for record in judged], [behind_ms(record) for record in judged]
    front_ms, behind_door_ms, missing_ms = (
        spread(front),
        spread(behind),
        spread(a + b for a, b in zip(front, behind, strict=True)),
    )
    assert front_ms is not None and behind_door_ms is not None and missing_ms is not None
    return Account(
        stages_ms=stages,
        judged=len(judged),
        ttft_ms=spread(record.ttft_ms for record in judged if record.ttft_ms is not None),
        in_front_ms=front_ms,
        behind_ms=behind_door_ms,
        missing_ms=missing_ms,
        largest=largest,
        equal=abs(missing_ms.p50.value) <= EQUAL_MS,
        verdict=verdict(front_ms, behind_door_ms, missing_ms),
    )


def in_front_ms(record: Record) -> float:
    return (record.ttft_ms or 0.0) - record.stages_ms["resolve"] - record.stages_ms["relay"]


def behind_ms(record: Record) -> float:
    return record.stages_ms["relay"] - sum(ms for stage, ms in record.stages_ms.items() if stage not in ("resolve", "relay"))


def verdict(front: Spread, behind: Spread, missing: Spread) -> str:
    """In words: equal, or how much is missing and on which side of the door."""
    p50 = missing.p50.value
    if abs(p50) <= EQUAL_MS:
        return f"equal: {p50:.1f} ms of the client's TTFT are on no clock (p50; p95 {missing.p95.value:.1f} ms)"
    sides = f"{front.p50.value:.1f} ms {IN_FRONT}, {behind.p50.value:.1f} ms {BEHIND_DOOR}"
    if p50 < 0:
        return f"the stages claim {-p50:.1f} ms more than the client waited (p50): {sides}"
    return f"{p50:.1f} ms are missing (p50; p95 {missing.p95.value:.1f} ms): {sides}"
