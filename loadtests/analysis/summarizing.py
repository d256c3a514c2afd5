"""From a run's records to its summary. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtests.analysis import requests, surroundings
from loadtests.analysis.account import account
from loadtests.analysis.figures import aims, figures
from loadtests.analysis.spread import ratio, spread
from loadtests.analysis.summary import Estimate, LoadFigures, Mark, Memory, PhaseFigures, Ratio, Summary
from loadtests.records import Event, MemorySample, Record
from loadtests.scenario import OURS, Load, Phase, Scenario

TOO_FEW = 0.99  # a peer with fewer good answers shows its latencies beside its failures
MIB = 2**20


@dataclass
class Part:
    """What one peer did in one phase."""

    peer: str
    phase: Phase
    records: list[Record] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    samples: list[MemorySample] = field(default_factory=list)

    def of_load(self, load: Load) -> list[Record]:
        return [record for record in self.records if record.load == load.name]


def summarize(
    scenario: Scenario,
    environment: Mapping[str, Any],
    records: Iterable[Record],
    events: Iterable[Event],
    samples: Iterable[MemorySample],
) -> Summary:
    """Raises BadRun for records that can't be one run's, UnknownFigure for an aim about a figure that there can't be."""
    events = list(events)
    parts = _parts(scenario, requests.completed(list(records), events), events, samples)
    measured = [part for part in parts if part.records]
    loads = tuple(_load(scenario, part, load) for part in measured for load in part.phase.loads if part.of_load(load))
    phases = tuple(_phase(scenario, environment, part) for part in measured)
    found = Summary(
        scenario=scenario,
        environment=dict(environment),
        loads=loads,
        phases=phases,
        beside=tuple(_beside(measured)),
        marks=tuple(_all_marks(scenario, parts, loads, phases)),
    )
    return found.model_copy(update={"aims": aims(scenario, figures(found))})


def _parts(scenario: Scenario, records: Iterable[Record], events: Iterable[Event], samples: Iterable[MemorySample]) -> list[Part]:
    """One for each peer of each phase that it is meant for, in the scenario's order."""
    parts = {(peer, phase.name): Part(peer, phase) for phase in scenario.phases for peer in scenario.peers if peer in phase.only}
    for record in records:
        _of(parts, record).records.append(record)
    for event in events:
        if (event.peer, event.phase) in parts:
            _of(parts, event).events.append(event)
    for sample in samples:
        if (sample.peer, sample.phase) in parts:
            _of(parts, sample).samples.append(sample)
    return list(parts.values())


def _of(parts: Mapping[tuple[str, str], Part], row: Record | Event | MemorySample) -> Part:
    try:
        return parts[row.peer, row.phase]
    except KeyError:
        raise requests.BadRun(f"the scenario has no phase {row.phase} for {row.peer}") from None


def _load(scenario: Scenario, part: Part, load: Load) -> LoadFigures:
    records = part.of_load(load)
    first = [record for record in requests.firsts(part.records) if record.load == load.name]
    store = part.phase.store or scenario.store
    return LoadFigures(
        peer=part.peer,
        phase=part.phase.name,
        load=load.name,
        counts=requests.counts(records, first),
        schedule=requests.schedule(records),
        ttft_ms=spread(requests.ttfts(records)),
        total_ms=spread(record.total_ms for record in requests.good(records) if record.total_ms is not None),
        splits=requests.splits(records),
        streams=requests.streams(records, [record for record in part.records if record.load != load.name]),
        loads=requests.loads(records, part.events if len(part.phase.loads) == 1 else ()),
        answers_per_s=requests.answers_per_s(records),
        account=account(records),
        fetch_over_bandwidth=requests.fetch_over_bandwidth(records, store.total_mib_per_s),
        promote=surroundings.moved(records, part.events) if load.alias else None,
        rounds=requests.rounds(records),
    )


def _phase(scenario: Scenario, environment: Mapping[str, Any], part: Part) -> PhaseFigures:
    pools = {load.pool for load in part.phase.loads if load.pool}
    return PhaseFigures(
        peer=part.peer,
        phase=part.phase.name,
        counts=requests.counts(part.records, requests.firsts(part.records)),
        answers_per_s=requests.answers_per_s(part.records),
        loads=requests.loads(part.records, part.events),
        fetches=surroundings.fetches(part.events),
        changes=surroundings.changes(part.events),
        memory=surroundings.memory(part.samples),
        adapters=sum(scenario.pools[pool].count for pool in pools),
        slots=_slots(scenario, environment),
    )


def _slots(scenario: Scenario, environment: Mapping[str, Any]) -> int | None:
    engine = environment.get("engine")
    known = {**(engine if isinstance(engine, Mapping) else {}), **scenario.engine}
    slots = known.get("max_cpu_loras")
    return int(slots) if slots else None


# -- peers side by side ------------------------------------------------------------------------------------------------


def _beside(parts: Sequence[Part]) -> Iterator[Ratio]:
    """Each peer over ours, wherever both have good answers."""
    ours = {part.phase.name: part for part in parts if part.peer == OURS}
    for part in parts:
        if part.peer != OURS and part.phase.name in ours:
            yield from _over(part, ours[part.phase.name])


def _over(peer: Part, ours: Part) -> Iterator[Ratio]:
    for load in peer.phase.loads:
        theirs, own = peer.of_load(load), ours.of_load(load)
        for stat, share in (("p50", 0.5), ("p95", 0.95)):
            found = ratio(requests.ttfts(theirs), requests.ttfts(own), share)
            if found is not None:
                yield _ratio(peer.peer, peer.phase.name, load.name, stat, found, theirs, own)


def _ratio(
    peer: str, phase: str, load: str, stat: str, found: Estimate, theirs: Sequence[Record], own: Sequence[Record]
) -> Ratio:
    shares = {"peer_failed_share": _failed_share(theirs), "our_failed_share": _failed_share(own)}
    return Ratio(peer=peer, phase=phase, load=load, stat=stat, ratio=found, **shares)


def _failed_share(records: Sequence[Record]) -> float:
    return 1 - len(requests.good(records)) / len(records) if records else 0.0


# -- marks -------------------------------------------------------------------------------------------------------------


def _all_marks(
    scenario: Scenario, parts: Sequence[Part], loads: Sequence[LoadFigures], phases: Sequence[PhaseFigures]
) -> Iterator[Mark]:
    yield from _left_out(scenario, parts)
    for load in loads:
        yield from _marks(load)
    for phase in phases:
        yield from _phase_marks(phase)
    for peer in scenario.peers:
        yield from _untold(load for load in loads if load.peer == peer)


def _left_out(scenario: Scenario, parts: Iterable[Part]) -> Iterator[Mark]:
    for part in parts:
        where = f"{part.peer}/{part.phase.name}"
        rounds = {record.round for record in part.records}
        reasons = [str(event.details["failed"]) for event in part.events if event.kind == "put" and event.details.get("failed")]
        why = f": {reasons[0]}" if reasons else ""
        if not rounds:
            yield Mark(where=where, what=f"not measured{why}")
        elif len(rounds) < scenario.rounds:
            yield Mark(where=where, what=f"{len(rounds)} of {scenario.rounds} rounds were measured{why}")
        if unknown := sum(not record.load for record in part.records):
            yield Mark(where=where, what=f"requests of the plan that left no line, of which load nobody knows: {unknown}")


def _marks(load: LoadFigures) -> Iterator[Mark]:
    where = f"{load.peer}/{load.phase}/{load.load}"
    counts = load.counts
    if load.schedule and not load.schedule.kept:
        lag = load.schedule.lag_ms
        yield Mark(
            where=where,
            what=f"did not keep its schedule: p99 of the lag {lag.p99.value:.0f} ms, limit {load.schedule.limit_ms:g} ms",
        )
    if counts.lost:
        yield Mark(where=where, what=f"{counts.lost} of {counts.planned} requests were planned and never seen again")
    if counts.failed:
        yield Mark(where=where, what=f"{counts.failed} of {counts.planned} requests failed; most said: {counts.said[0].text}")
    if counts.wrong:
        yield Mark(
            where=where, what=f"answers that are not those of the adapter that was asked: {counts.wrong} of {counts.planned}"
        )
    if counts.tier_other:
        yield Mark(
            where=where, what=f"{counts.tier_other} of {counts.first} adapters were answered from another tier than the one put"
        )


def _untold(loads: Iterable[LoadFigures]) -> Iterator[Mark]:
    """The load of one peer whose clocks leave most of the client's TTFT untold."""
    unequal = [load for load in loads if load.account and load.account.equal is False and load.account.missing_ms]
    if unequal:
        most = max(unequal, key=lambda load: abs(load.account.missing_ms.p50.value))
        yield Mark(
            where=f"{most.peer}/{most.phase}/{most.load}",
            what=f"the server's clocks don't add up to the client's in {len(unequal)} loads; most here: {most.account.verdict}",
        )


def _phase_marks(phase: PhaseFigures) -> Iterator[Mark]:
    where = f"{phase.peer}/{phase.phase}"
    for kind, done in phase.changes.items():
        if done.failed:
            yield Mark(where=where, what=f"{kind} failed {done.failed} of {done.count} times: {done.said[0].text}")
    for part, memory in phase.memory.items():
        if memory.rests is False:
            yield Mark(where=where, what=_growing(part, memory))


def _growing(part: str, memory: Memory) -> str:
    return (
        f"memory of {part} does not rest: {memory.slope_bytes_per_h / MIB:.0f} MiB an hour, of {memory.last_bytes / MIB:.0f} MiB"
    )
