"""What the requests of one stream come to: counts, schedule, latencies, loads, gaps."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from loadtests.analysis.spread import percentile, rounded, spread
from loadtests.analysis.summary import Counts, Loading, RoundFigures, Said, Schedule, Split, Spread, Streams
from loadtests.records import Event, Record

COLD = ("remote", "disk")
LAG_LIMIT_MS = 50.0
SAID_MOST, SAID_LENGTH = 5, 160


class BadRun(Exception):
    """Records that can't be one run's."""


def completed(records: Sequence[Record], events: Iterable[Event] = ()) -> list[Record]:
    """The records, and a lost one for each number of a phase's plan that left no line at all.

    How long a plan is, its event `phase` says; without that it ends with the last number that anybody has. Every peer of a round
    gets the same plan, so another one's record says what the missing one was; where none has it, its load is unknown. Raises
    BadRun for two lines of one request.
    """
    plans: dict[tuple[int, str], dict[int, Record]] = defaultdict(dict)
    found: dict[tuple[str, int, str], set[int]] = defaultdict(set)
    told = {(event.peer, event.round, event.phase): event.details.get("planned", 0) for event in events if event.kind == "phase"}
    for key in told:
        found[key] = set()
    for record in records:
        plans[record.round, record.phase][record.number] = record
        there = found[record.peer, record.round, record.phase]
        if record.number in there:
            raise BadRun(f"request {record.number} of {record.peer}, round {record.round}, phase {record.phase}, is there twice")
        there.add(record.number)
    missing = [
        _lost(plans[round_, phase].get(number), peer, round_, phase, number)
        for (peer, round_, phase), there in found.items()
        for number in range(max(told.get((peer, round_, phase), 0), max(plans[round_, phase], default=-1) + 1))
        if number not in there
    ]
    return [*records, *missing]


def _lost(twin: Record | None, peer: str, round_: int, phase: str, number: int) -> Record:
    if twin is None:
        return Record(peer, round_, phase, "", number, None, None, None, None, None, 0.0, None)
    kept = {name: getattr(twin, name) for name in ("load", "adapter", "pool", "rank", "size_bytes", "put", "planned_s")}
    return Record(peer=peer, round=round_, phase=phase, number=number, sent_s=None, **kept)


def good(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if record.outcome == "ok"]


def ttfts(records: Iterable[Record]) -> list[float]:
    """Of good answers, in ms."""
    return [record.ttft_ms for record in good(records) if record.ttft_ms is not None]


def firsts(records: Iterable[Record]) -> list[Record]:
    """The first request of each adapter, in each round."""
    earliest: dict[tuple[str, int, str, str], Record] = {}
    for record in sorted((r for r in records if r.sent_s is not None and r.adapter), key=lambda r: (r.sent_s, r.number)):
        earliest.setdefault((record.peer, record.round, record.phase, str(record.adapter)), record)
    return list(earliest.values())


# -- counts and schedule -----------------------------------------------------------------------------------------------


def counts(records: Sequence[Record], first: Sequence[Record] = ()) -> Counts:
    """`first` are those of the records that are first requests of their adapters."""
    outcomes = Counter(record.outcome for record in records)
    told = [record for record in first if record.put and record.tier]
    return Counts(
        planned=len(records),
        sent=len(records) - outcomes["lost"],
        ok=outcomes["ok"],
        failed=outcomes["failed"],
        lost=outcomes["lost"],
        wrong=outcomes["wrong"],
        first=len(told),
        tier_other=sum(record.tier != record.put for record in told),
        said=said(reason(record) for record in records if record.outcome == "failed"),
    )


def reason(record: Record) -> str:
    """Why a request failed, in the words that were heard."""
    status = f"HTTP {record.status}" if record.status else "no answer"
    return f"{status}: {record.error}" if record.error else status if record.status != 200 else "an answer without content"


def said(texts: Iterable[str]) -> tuple[Said, ...]:
    short = Counter(" ".join(text.split())[:SAID_LENGTH] for text in texts)
    return tuple(Said(text=text, count=count) for text, count in short.most_common(SAID_MOST))


def schedule(records: Iterable[Record]) -> Schedule | None:
    lags = [record.lag_ms for record in records if record.lag_ms is not None]
    lag = spread(lags, intervals=False)
    if lag is None:
        return None
    off = percentile((abs(one) for one in lags), 0.99) or 0.0
    return Schedule(lag_ms=lag, kept=off <= LAG_LIMIT_MS, limit_ms=LAG_LIMIT_MS)


def answers_per_s(records: Sequence[Record]) -> float | None:
    """Good answers over the time from the first request sent to the last answer's end, waits between rounds left out."""
    answered, taken_s = 0, 0.0
    for of_round in by_round(records).values():
        ends = [
            record.sent_s + record.total_ms / 1e3 for record in good(of_round) if record.sent_s is not None and record.total_ms
        ]
        if ends:
            answered += len(ends)
            taken_s += max(ends) - min(record.sent_s for record in of_round if record.sent_s is not None)
    return rounded(answered / taken_s) if taken_s > 0 else None


def by_round(records: Iterable[Record]) -> dict[int, list[Record]]:
    rounds: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        rounds[record.round].append(record)
    return dict(sorted(rounds.items()))


def rounds(records: Sequence[Record]) -> tuple[RoundFigures, ...]:
    return tuple(_round(number, of_round) for number, of_round in by_round(records).items())


def _round(number: int, records: Sequence[Record]) -> RoundFigures:
    outcomes = Counter(record.outcome for record in records)
    first = ttfts(records)
    lag = percentile((record.lag_ms for record in records if record.lag_ms is not None), 0.99)
    p50, p95 = percentile(first, 0.5), percentile(first, 0.95)
    return RoundFigures(
        round=number,
        planned=len(records),
        ok=outcomes["ok"],
        failed=outcomes["failed"],
        lost=outcomes["lost"],
        wrong=outcomes["wrong"],
        lag_p99_ms=None if lag is None else rounded(lag),
        ttft_p50_ms=None if p50 is None else rounded(p50),
        ttft_p95_ms=None if p95 is None else rounded(p95),
        answers_per_s=answers_per_s(records),
    )


# -- latencies ---------------------------------------------------------------------------------------------------------


def splits(records: Sequence[Record]) -> tuple[Split, ...]:
    """By what the server told (tier, role), by rank, by the tier that was put; a kind with nothing told is left out."""
    return (
        *_split(records, "tier", lambda record: record.tier),
        *_split(records, "role", lambda record: record.role),
        *_split(records, "rank", lambda record: str(record.rank or "")),
        *_split(records, "put", lambda record: record.put or ""),
    )


def _split(records: Sequence[Record], by: str, key: Callable[[Record], str]) -> list[Split]:
    parts: dict[str, list[Record]] = defaultdict(list)
    for record in good(records):
        if key(record):
            parts[key(record)].append(record)
    found = []
    for value, of_part in sorted(parts.items(), key=lambda part: (len(part[0]), part[0])):
        lie = spread(ttfts(of_part))
        sizes = [record.size_bytes for record in of_part if by == "rank" and record.size_bytes]
        if lie is not None:
            found.append(Split(by=by, value=value, ttft_ms=lie, size_bytes=statistics.median(sizes) if sizes else None))
    return found


def fetch_over_bandwidth(records: Sequence[Record], mib_per_s: float | None) -> Spread | None:
    """How long leaders' fetches took over what their bytes take at the store's whole bandwidth; 1 is nothing but bytes."""
    if mib_per_s is None:
        return None
    return spread(
        record.stages_ms["fetch"] / 1e3 / (record.size_bytes / (mib_per_s * 2**20))
        for record in good(records)
        if record.role == "leader" and record.tier == "remote" and record.size_bytes and "fetch" in record.stages_ms
    )


# -- loads -------------------------------------------------------------------------------------------------------------


def loads(records: Sequence[Record], events: Sequence[Event]) -> Loading | None:
    """As answers tell that they led a load, else as the server counted (an event `loads`), else None."""
    told = [record for record in records if record.role and record.adapter]
    if told:
        return _loading(sum(record.role == "leader" for record in told), len(told), "answers")
    counted = [event.details.get("count") for event in events if event.kind == "loads"]
    asked = sum(record.sent_s is not None and record.adapter is not None for record in records)
    known = [int(count) for count in counted if count is not None]
    return _loading(sum(known), asked, "server") if known and asked else None


def _loading(count: int, requests: int, told_by: str) -> Loading:
    each = rounded(count / requests)
    return Loading(count=count, requests=requests, told_by=told_by, per_request=each, hit_rate=rounded(max(0.0, 1 - each)))


# -- gaps of streams ---------------------------------------------------------------------------------------------------


def streams(records: Sequence[Record], beside: Sequence[Record]) -> Streams | None:
    """`beside` are the requests of the other loads of the phase, whose cold ones part the gaps in two."""
    gaps = spread((gap for record in good(records) for gap in record.gaps_ms), intervals=False)
    if gaps is None:
        return None
    windows = {number: window for number, of_round in by_round(beside).items() if (window := _loading_window(of_round))}
    if not windows:
        return Streams(gaps_ms=gaps)
    loading, quiet = [], []
    for record in good(records):
        begin_s, end_s, _ = windows.get(record.round, (0.0, 0.0, 0))
        for at_s, gap_ms in zip(_gap_ends_s(record), record.gaps_ms, strict=True):
            (loading if begin_s < at_s and at_s - gap_ms / 1e3 < end_s else quiet).append(gap_ms)
    cold, taken_s = sum(window[2] for window in windows.values()), sum(window[1] - window[0] for window in windows.values())
    return Streams(
        gaps_ms=gaps,
        loading_ms=spread(loading, intervals=False),
        quiet_ms=spread(quiet, intervals=False),
        loads_per_s=rounded(cold / taken_s) if taken_s > 0 else None,
    )


def _gap_ends_s(record: Record) -> list[float]:
    first_s = (record.sent_s or 0.0) + (record.ttft_ms or 0.0) / 1e3
    return [first_s + passed / 1e3 for passed in accumulate(record.gaps_ms)]


def _loading_window(records: Sequence[Record]) -> tuple[float, float, int] | None:
    """From the first cold request to the last cold first token, and how many loads that were."""
    cold = [record for record in records if record.role in ("leader", "follower") and record.tier in COLD]
    led = [record for record in cold if record.role == "leader"]
    if not cold:
        cold = led = [record for record in firsts(records) if not record.role and record.put in COLD]
    ends = [record.sent_s + record.ttft_ms / 1e3 for record in cold if record.sent_s is not None and record.ttft_ms is not None]
    begins = [record.sent_s for record in cold if record.sent_s is not None]
    return (min(begins), max(ends), len(led)) if ends else None
