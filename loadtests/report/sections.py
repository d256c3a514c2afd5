"""A summary as the sections of a report. Decides what is said; how it looks is the templates'."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loadtests.analysis.account import STAGES
from loadtests.analysis.figures import is_late
from loadtests.analysis.summary import AimResult, LoadFigures, PhaseFigures, Ratio, Summary
from loadtests.analysis.surroundings import CHANGES
from loadtests.report.parts import Plot, Report, Section, Table
from loadtests.report.words import LATE, NOTHING, estimate, figure, given, mib, named, number, p50, places, share, size
from loadtests.scenario import Burst, Change, Gamma, Load, Scenario, StoreShape

LATE_NOTE = f"{LATE} did not keep its schedule: its requests did not leave when they were planned."
TOLD_FIRST = ("date", "when", "commit", "machine", "system", "cpu", "cores", "memory_bytes", "gpu", "versions", "engine")


def report(summary: Summary, plots: Mapping[str, Plot]) -> Report:
    """`plots` by name; those that are not there are left out."""

    def drawn(*names: str) -> tuple[Plot, ...]:
        return tuple(plots[name] for name in plots if name.startswith(names))

    sections = (
        Section("What came out", tables=_tables(aims_table(summary)), said=_no_aims(summary)),
        Section("What is marked", said=_no_marks(summary), tables=_tables(_marks(summary))),
        Section("What was run", tables=_tables(_phases(summary.scenario))),
        Section("Where", tables=_tables(_environment(summary.environment))),
        Section("Requests", tables=_tables(requests_table(summary), _more(summary), _said(summary)), said=_rule()),
        Section("Peers side by side", tables=_tables(_beside(summary)), plots=drawn("peers"), said=_beside_said(summary)),
        Section("First tokens by tier", tables=_tables(_splits(summary)), plots=drawn("tiers")),
        Section(
            "Where the time goes",
            tables=_tables(_stages(summary), _accounts(summary)),
            plots=drawn("stages"),
            said=_clocks(summary),
        ),
        Section("Running streams while adapters load", tables=_tables(_streams(summary))),
        Section("Loads, evictions, changes", tables=_tables(_loads(summary), _changes(summary)), plots=drawn("timeline", "hits")),
        Section("The store", tables=_tables(_fetches(summary))),
        Section("Memory", tables=_tables(_memory(summary)), plots=drawn("memory"), said=_memory_said(summary)),
        Section("Did the sender keep its schedule", tables=_tables(_schedule(summary))),
    )
    return Report(
        title=summary.scenario.name,
        about=summary.scenario.about,
        verdict=_verdict(summary.aims),
        sections=tuple(section for section in sections if section.tables or section.plots or section.title.startswith("What")),
    )


def _tables(*tables: Table | None) -> tuple[Table, ...]:
    return tuple(table.filled() for table in tables if table is not None and table.rows)


# -- the beginning -----------------------------------------------------------------------------------------------------


def _verdict(aims: Sequence[AimResult]) -> str:
    missed = [one for one in aims if one.met is False]
    unmeasured = [one for one in aims if one.met is None]
    if not aims:
        return "The scenario has no aims."
    told = f"{sum(one.met is True for one in aims)} of {places(len(aims), 'aim', 'aims')} met"
    told += f", {len(missed)} missed" if missed else ""
    return told + (f", {len(unmeasured)} not measured" if unmeasured else "") + "."


def aims_table(summary: Summary) -> Table:
    late = is_late(summary)
    rows = [
        (
            one.aim.name + (f" {LATE}" if late(one.aim.figure) else ""),
            f"`{one.aim.figure}`",
            {True: "met", False: "missed", None: "not measured"}[one.met],
            figure(one.value),
            f"{'≤' if one.aim.bound == '<=' else '≥'} {given(one.aim.limit)}",
        )
        for one in summary.aims
    ]
    note = LATE_NOTE if any(LATE in row[0] for row in rows) else ""
    return Table(("aim", "figure", "verdict", "value", "limit"), tuple(rows), texts=3, note=note)


def _no_aims(summary: Summary) -> tuple[str, ...]:
    return () if summary.aims else ("No aims: the figures stand for themselves.",)


def _marks(summary: Summary) -> Table:
    return Table(("where", "what"), tuple((mark.where, mark.what) for mark in summary.marks), texts=2)


def _no_marks(summary: Summary) -> tuple[str, ...]:
    if summary.marks:
        return ("Read the figures with this in mind.",)
    return ("Nothing: every request left on time and was answered, by the right adapter, from the tier that was set.",)


def _phases(scenario: Scenario) -> Table:
    rows = [
        (
            phase.name,
            "; ".join(f"{pool}: {tier}" for pool, tier in phase.put.items()) or NOTHING,
            "; ".join(_load_in_words(scenario, load) for load in phase.loads),
            "; ".join(map(_change_in_words, phase.changes)) or NOTHING,
            _store_in_words(phase.store or scenario.store),
            ", ".join(peer for peer in scenario.peers if peer in phase.only),
        )
        for phase in scenario.phases
    ]
    rounds = places(scenario.rounds, "round", "rounds")
    note = f"{rounds}, each peer started anew in each, in alternating order; seed {scenario.seed}."
    return Table(("phase", "put", "requests", "changes", "store", "peers"), tuple(rows), texts=6, note=note)


def _load_in_words(scenario: Scenario, load: Load) -> str:
    arrivals = load.arrivals
    if isinstance(arrivals, Burst):
        when = f"{arrivals.count} at once"
    elif isinstance(arrivals, Gamma):
        when = f"{given(arrivals.rate_per_s)} a second for {given(arrivals.duration_s)} s, cv {given(arrivals.cv)}"
    else:
        when = f"{arrivals.count}, one every {given(arrivals.every_s)} s"
    if load.pool is None:
        return f"{load.name}: {when}, on the base"
    pool = scenario.pools[load.pool]
    drawn = f"by a power law, alpha {given(load.popularity.alpha)}" if load.popularity.kind == "power" else "each in turn"
    ranks = "/".join(map(str, pool.ranks))
    alias = f" by the alias {load.alias}" if load.alias else ""
    return f"{load.name}: {when}, over {places(pool.count, 'adapter', 'adapters')} of rank {ranks}{alias}, {drawn}"


def _change_in_words(change: Change) -> str:
    again = f", then every {given(change.every_s)} s, {change.count} in all" if change.every_s else ""
    return f"{change.do} {change.pool} at {given(change.at_s)} s{again}"


def _store_in_words(store: StoreShape) -> str:
    told = [f"{given(store.latency_ms)} ms more" if store.latency_ms else ""]
    told.append(f"{given(store.connection_mib_per_s)} MiB/s a connection" if store.connection_mib_per_s else "")
    told.append(f"{given(store.total_mib_per_s)} MiB/s in all" if store.total_mib_per_s else "")
    told += [f"{fault.kind} {share(fault.share)}" for fault in store.faults]
    return ", ".join(one for one in told if one) or NOTHING


def _environment(environment: Mapping[str, Any]) -> Table:
    names = [*(name for name in TOLD_FIRST if name in environment), *(name for name in environment if name not in TOLD_FIRST)]
    rows = [named(name, environment[name]) for name in names if environment[name] not in (None, {}, [], "")]
    return Table(("", ""), tuple(rows), texts=2)


# -- requests ----------------------------------------------------------------------------------------------------------


def _who(load: LoadFigures) -> tuple[str, str]:
    late = load.schedule is not None and not load.schedule.kept
    return f"{load.phase} / {load.load}", load.peer + (f" {LATE}" if late else "")


def by_load(loads: Iterable[LoadFigures]) -> list[LoadFigures]:
    """The peers of a load beside each other, in the scenario's order."""
    ordered = list(loads)
    places_ = list(dict.fromkeys((load.phase, load.load) for load in ordered))
    return sorted(ordered, key=lambda load: places_.index((load.phase, load.load)))


def _of_loads(summary: Summary, head: tuple[str, ...], cells: Any) -> Table:
    """A row for each load of each peer for which `cells` has any."""
    rows = [(*_who(load), *found) for load in by_load(summary.loads) if (found := cells(load)) is not None]
    note = LATE_NOTE if any(LATE in row[1] for row in rows) else ""
    return Table(("phase / load", "peer", *head), _grouped(rows), texts=2, note=note)


def _grouped(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """The first cell only where it changes."""
    return tuple((row[0] if n == 0 or rows[n - 1][0] != row[0] else "", *row[1:]) for n, row in enumerate(rows))


def _rule() -> tuple[str, ...]:
    return (
        "Latencies in ms, of good answers only: a failed, lost or wrong one counts in its column and nowhere else. In brackets: "
        "95 % intervals of the bootstrap over requests, all rounds together.",
    )


def requests_table(summary: Summary) -> Table:
    def cells(load: LoadFigures) -> tuple[str, ...]:
        counts, ttft = load.counts, load.ttft_ms
        bad = tuple(str(count) for count in (counts.failed, counts.lost, counts.wrong))
        lies = (estimate(ttft.p50), estimate(ttft.p95), number(ttft.p99.value), number(ttft.max)) if ttft else (NOTHING,) * 4
        return (str(counts.planned), str(counts.ok), *bad, *lies)

    return _of_loads(summary, ("planned", "good", "failed", "lost", "wrong", "TTFT p50", "p95", "p99", "max"), cells)


def _more(summary: Summary) -> Table:
    def cells(load: LoadFigures) -> tuple[str, ...] | None:
        if load.total_ms is None:
            return None
        gaps = load.streams.gaps_ms if load.streams else None
        other = f"{load.counts.tier_other} of {load.counts.first}" if load.counts.first else NOTHING
        of_rounds = " · ".join(number(one.ttft_p50_ms) for one in load.rounds) if len(load.rounds) > 1 else NOTHING
        found = (number(load.answers_per_s), number(load.total_ms.p50.value), number(load.total_ms.p95.value))
        of_gaps = (number(gaps.p50.value), number(gaps.p99.value), number(gaps.max)) if gaps else (NOTHING,) * 3
        return (*found, *of_gaps, other, of_rounds)

    head = ("answers/s", "whole answer p50", "p95", "gap p50", "p99", "max", "other tier than put", "TTFT p50 by round")
    return _of_loads(summary, head, cells)


def _said(summary: Summary) -> Table:
    rows = [
        (*_who(load), f"{one.count} of {load.counts.planned}", one.text)
        for load in by_load(summary.loads)
        for one in load.counts.said
    ]
    return Table(("phase / load", "peer", "failed", "what was said"), _grouped(rows), texts=4)


def _schedule(summary: Summary) -> Table:
    def cells(load: LoadFigures) -> tuple[str, ...] | None:
        if load.schedule is None:
            return None
        lag = load.schedule.lag_ms
        kept = "yes" if load.schedule.kept else f"no, limit {given(load.schedule.limit_ms)} ms"
        return (number(lag.p50.value), number(lag.p99.value), number(lag.max), kept)

    return _of_loads(summary, ("lag p50, ms", "p99", "max", "kept"), cells)


# -- peers, tiers ------------------------------------------------------------------------------------------------------


def _beside_said(summary: Summary) -> tuple[str, ...]:
    return ("TTFT of a peer over ours: above 1 the peer is slower. Of good answers only, so read it beside the failures.",)


def _beside(summary: Summary) -> Table:
    late = is_late(summary)
    found: dict[tuple[str, str, str], dict[str, Ratio]] = {}
    for one in summary.beside:
        found.setdefault((one.phase, one.load, one.peer), {})[one.stat] = one
    order = list(dict.fromkeys((phase, load) for phase, load, _ in found))
    rows = []
    for (phase, load, peer), stats in sorted(found.items(), key=lambda item: order.index(item[0][:2])):
        mark = f" {LATE}" if late(f"{peer}/{phase}/{load}/") or late(f"loramux/{phase}/{load}/") else ""
        one = next(iter(stats.values()))
        ratios = (estimate(stats[stat].ratio) if stat in stats else NOTHING for stat in ("p50", "p95"))
        rows.append((f"{phase} / {load}", peer + mark, *ratios, share(one.peer_failed_share), share(one.our_failed_share)))
    head = ("phase / load", "peer", "TTFT p50 over ours", "p95 over ours", "not good: peer", "ours")
    note = LATE_NOTE if any(LATE in row[1] for row in rows) else ""
    return Table(head, _grouped(rows), texts=2, note=note)


def _splits(summary: Summary) -> Table:
    rows = [
        (
            *_who(load),
            f"{split.by} {split.value}" + (f" ({size(split.size_bytes)})" if split.size_bytes else ""),
            str(split.ttft_ms.count),
            estimate(split.ttft_ms.p50),
            number(split.ttft_ms.p95.value),
            number(split.ttft_ms.max),
        )
        for load in by_load(summary.loads)
        for split in load.splits
        if _tells(load, split.by)
    ]
    told = [(row[0], "" if n and rows[n - 1][:2] == rows[n][:2] else row[1], *row[2:]) for n, row in enumerate(_grouped(rows))]
    return Table(("phase / load", "peer", "of", "answers", "TTFT p50", "p95", "max"), tuple(told), texts=3)


def _tells(load: LoadFigures, by: str) -> bool:
    """Whether a split has anything to say: a tier that was told, a leader beside its followers, several parts."""
    values = {split.value for split in load.splits if split.by == by}
    return by == "tier" or ({"leader", "follower"} <= values if by == "role" else len(values) > 1)


# -- stages ------------------------------------------------------------------------------------------------------------


def _clocks(summary: Summary) -> tuple[str, ...]:
    return (
        "Each stage has a clock of its own and none is a remainder. `relay` is from dispatch to the first bytes and "
        "contains fetch, stage, queue, load and engine. In front of the door: the client's TTFT less resolve and relay, "
        "which is the connection, the proxy, reading the body and the way of the first bytes back. Behind the door: relay "
        "less the stages in it, which is choosing a replica and the way there and back. Requests that followed another's "
        "load are left out.",
    )


def _stages(summary: Summary) -> Table:
    def cells(load: LoadFigures) -> tuple[str, ...] | None:
        if load.account is None:
            return None
        found = load.account.stages_ms
        return tuple(f"{p50(found[name])} / {number(found[name].p95.value)}" if name in found else NOTHING for name in STAGES)

    return _of_loads(summary, tuple(f"{name} p50 / p95" if n == 0 else name for n, name in enumerate(STAGES)), cells)


def _accounts(summary: Summary) -> Table:
    def cells(load: LoadFigures) -> tuple[str, ...] | None:
        account = load.account
        if account is None or account.ttft_ms is None or account.in_front_ms is None or account.behind_ms is None:
            return None
        sides = (f"{p50(lie)} / {number(lie.p95.value)}" for lie in (account.in_front_ms, account.behind_ms))
        return (str(account.judged), p50(account.ttft_ms), *sides, f"{account.verdict}; most goes into {account.largest}")

    table = _of_loads(summary, ("answers", "TTFT p50", "in front p50 / p95", "behind", "verdict"), cells)
    return Table(
        (*table.head[:2], "verdict", *table.head[2:6]), tuple((*r[:2], r[6], *r[2:6]) for r in table.rows), 3, table.note
    )


def _streams(summary: Summary) -> Table:
    def cells(load: LoadFigures) -> tuple[str, ...] | None:
        streams = load.streams
        if streams is None or streams.loading_ms is None:
            return None
        quiet, loading = streams.quiet_ms, streams.loading_ms
        over = number(loading.p99.value / quiet.p99.value) if quiet and quiet.p99.value else NOTHING
        of_quiet = (number(quiet.p99.value), number(quiet.max)) if quiet else (NOTHING, NOTHING)
        return (number(streams.loads_per_s), *of_quiet, number(loading.p99.value), number(loading.max), over)

    head = ("loads/s beside it", "quiet: gap p99", "max", "loading: gap p99", "max", "p99 over quiet")
    return _of_loads(summary, head, cells)


# -- phases ------------------------------------------------------------------------------------------------------------


def by_phase(phases: Iterable[PhaseFigures]) -> list[PhaseFigures]:
    ordered = list(phases)
    names = list(dict.fromkeys(phase.phase for phase in ordered))
    return sorted(ordered, key=lambda phase: names.index(phase.phase))


def _loads(summary: Summary) -> Table:
    rows = [
        (
            phase.phase,
            phase.peer,
            str(phase.adapters),
            str(phase.slots) if phase.slots else NOTHING,
            str(phase.loads.count),
            number(phase.loads.per_request),
            share(phase.loads.hit_rate),
            number(phase.answers_per_s),
        )
        for phase in by_phase(summary.phases)
        if phase.loads
    ]
    head = ("phase", "peer", "adapters", "slots", "loads", "a request", "hit rate", "answers/s")
    note = (
        "Hit rate: the share of requests that began no load. Loads as answers tell that they led one, else as the server counts."
    )
    return Table(head, _grouped(rows), texts=2, note=note)


def _changes(summary: Summary) -> Table:
    rows = [
        (
            phase.phase,
            phase.peer,
            kind,
            str(done.count),
            str(done.failed) if done.failed else NOTHING,
            number(done.took_s.p50.value) if done.took_s else NOTHING,
            number(done.took_s.max) if done.took_s else NOTHING,
            *_after(summary, phase, kind),
        )
        for phase in by_phase(summary.phases)
        for kind, done in phase.changes.items()
    ]
    head = (
        "phase",
        "peer",
        "change",
        "times",
        "failed",
        "took p50, s",
        "max",
        "requests after it",
        "tier engine",
        "TTFT p99 over hot",
    )
    return Table(head, _grouped(rows), texts=3)


def _after(summary: Summary, phase: PhaseFigures, kind: str) -> tuple[str, str, str]:
    if kind == CHANGES[2]:
        for load in summary.loads:
            if (load.peer, load.phase) == (phase.peer, phase.phase) and load.promote:
                return str(load.promote.requests), share(load.promote.engine_share), number(load.promote.p99_over_hot)
    return NOTHING, NOTHING, NOTHING


def _fetches(summary: Summary) -> Table:
    ratios = {(load.peer, load.phase): load.fetch_over_bandwidth for load in summary.loads if load.fetch_over_bandwidth}
    rows = [
        (
            phase.phase,
            phase.peer,
            str(phase.fetches.count),
            str(phase.fetches.max_per_round),
            str(phase.fetches.max_per_adapter),
            size(phase.fetches.bytes),
            p50(phase.fetches.mb_per_s),
            p50(ratios.get((phase.peer, phase.phase))),
        )
        for phase in by_phase(summary.phases)
        if phase.fetches
    ]
    head = (
        "phase",
        "peer",
        "fetches",
        "most a round",
        "most an adapter",
        "bytes",
        "MB/s p50",
        "fetch stage over bytes / bandwidth",
    )
    return Table(head, _grouped(rows), texts=2, note="Counted by the proxy in front of the store: reads of adapters' weights.")


def _memory_said(summary: Summary) -> tuple[str, ...]:
    return (
        "Memory that belongs to the processes of a part alone (USS), of the round in which it grew most. The slope is the "
        "median slope between all pairs of points of the second half. A part rests where the interval of its slope does not "
        "lie above 0, or where it grows by less than 1 % of its size an hour.",
    )


def _memory(summary: Summary) -> Table:
    rows = [
        (
            phase.phase,
            phase.peer,
            part,
            {True: "yes", False: "no", None: "too short to say"}[memory.rests],
            mib(memory.first_bytes),
            mib(memory.last_bytes),
            f"{mib(memory.slope_bytes_per_h)} ({number(memory.slope_low / 2**20)}–{number(memory.slope_high / 2**20)})",
        )
        for phase in by_phase(summary.phases)
        for part, memory in phase.memory.items()
    ]
    head = ("phase", "peer", "part", "rests", "first quarter", "last quarter", "an hour")
    return Table(head, _grouped(rows), texts=4)
