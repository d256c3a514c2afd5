"""A scenario from beginning to end: rounds, peers one after another, phases; lines are written as soon as a phase is over."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtests import records
from loadtests.records import Event, Record
from loadtests.running.judging import Mark
from loadtests.running.phase import LeftOut, Lines, Place, run_phase
from loadtests.running.shelf import Shelf, needed, used
from loadtests.scenario import Phase, Pool, Scenario

if TYPE_CHECKING:
    from loadtests.material import Base, Material
    from loadtests.peers import Peer
    from loadtests.shaping import Store

SCENARIO, ENVIRONMENT, RAW, LOGS = "scenario.json", "environment.json", "raw", "logs"


@dataclass(frozen=True)
class Running:
    """A server that answers, and the store in front of which it runs; None where it brought its own."""

    peer: Peer
    store: Store | None


@dataclass(frozen=True)
class Tools:
    """What a run uses, so that tests can use something else. `make` gives a base and the adapters of some pools; `start` a server
    by its name, for that base and the engine's arguments, with a folder for its logs; `send` and `plan` are those of `sending`
    and `workload`."""

    make: Callable[[Mapping[str, Pool]], Material]
    start: Callable[[str, Base, Mapping[str, Any], Path], AbstractContextManager[Running]]
    engine: Callable[[Scenario], dict[str, Any]]
    warm_up: Callable[[Peer, Sequence[str]], None]
    plan: Callable[..., Any]
    send: Callable[..., Any]
    describe: Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """Where the lines lie, and the peers that did not run, with the reason."""

    folder: Path
    failed: Mapping[str, str]


def run(scenario: Scenario, out: Path, tools: Tools, say: Callable[[str], None] = print) -> Outcome:
    """Runs all of it and leaves its lines in `out`. A peer that does not start, or breaks, leaves the others their turn."""
    out.mkdir(parents=True, exist_ok=True)
    for name in (records.REQUESTS, records.EVENTS, records.MEMORY):
        (out / name).unlink(missing_ok=True)
    engine = tools.engine(scenario)
    (out / SCENARIO).write_text(scenario.model_dump_json(indent=1) + "\n")
    (out / ENVIRONMENT).write_text(json.dumps(tools.describe(engine), indent=1) + "\n")
    say("base and adapters (made the first time)")
    material = tools.make(needed(scenario))
    failed: dict[str, str] = {}
    for number, name in turns(scenario):
        say(f"round {number} of {scenario.rounds}: {name} starts")
        phases = tuple(phase for phase in scenario.phases if name in phase.only)
        left = list(phases)
        try:
            with tools.start(name, material.base, engine, (out / LOGS / f"{number}-{name}").resolve()) as running:
                place = prepare(running, number, scenario, phases, material, tools, out)
                while left:
                    one_phase(place, scenario, left[0], out, say)
                    left.pop(0)
        except Exception as error:  # noqa: BLE001 - whatever befalls one server is a line of the report, and the next one has its turn
            reason = f"{type(error).__name__}: {error}"
            say(f"   {name} failed: {reason}")
            failed[name] = reason
            records.append(out / records.EVENTS, [left_out(name, number, phase, reason) for phase in left])
    return Outcome(out, failed)


def turns(scenario: Scenario) -> Iterator[tuple[int, str]]:
    """Round and peer: every second round backwards, so that no peer has the warmer or the fuller machine each time."""
    for number in range(1, scenario.rounds + 1):
        for name in scenario.peers if number % 2 else reversed(scenario.peers):
            yield number, name


def prepare(
    running: Running, number: int, scenario: Scenario, phases: Sequence[Phase], material: Material, tools: Tools, out: Path
) -> Place:
    """Adapters where the server finds them, and a few answers of each kind, so that no first use of anything is measured."""
    shelf, peer = Shelf(scenario.pools, material.pools), running.peer
    members = [adapter for pool in sorted(used(phases)) for adapter in shelf.members(pool)]
    for adapter in members:
        peer.add(adapter)
    first_of_rank = {adapter.rank: adapter for adapter in reversed(members)}
    tools.warm_up(peer, [peer.base, *(peer.model(adapter) for adapter in first_of_rank.values())])
    return Place(
        peer=peer,
        round=number,
        store=running.store,
        shelf=shelf,
        fresh=material.fresh,
        send=tools.send,
        plan=tools.plan,
        raw=out / RAW / f"{number}-{peer.name}",
    )


def one_phase(place: Place, scenario: Scenario, phase: Phase, out: Path, say: Callable[[str], None]) -> None:
    try:
        lines = run_phase(place, scenario, phase)
    except LeftOut as reason:
        say(f"   {phase.name}: left out: {reason}")
        lines = Lines(events=(left_out(place.peer.name, place.round, phase, str(reason)),))
    else:
        say(f"   {phase.name}: {told(lines.records)}")
    records.append(out / records.REQUESTS, lines.records)
    records.append(out / records.EVENTS, lines.events)
    records.append(out / records.MEMORY, lines.samples)


def left_out(peer: str, number: int, phase: Phase, reason: str) -> Event:
    return Mark(peer, number, phase.name).event(0.0, "put", failed=reason)


def told(rows: Sequence[Record]) -> str:
    outcomes = [row.outcome for row in rows]
    bad = [f"{outcomes.count(kind)} {kind}" for kind in ("failed", "lost", "wrong") if kind in outcomes]
    return ", ".join([f"{len(rows)} requests", *bad]) + ("" if bad else ", all well")
