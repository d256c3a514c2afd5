"""One phase on one running server: tiers, requests with what happens beside them, and the lines that this leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from loadtests.records import Event, MemorySample, Record, Tier
from loadtests.running.changes import Done, Step, carry_out, event_of, newcomers, steps_of, turns_of
from loadtests.running.clock import Clock
from loadtests.running.judging import Mark, Saying, record_of, sayings
from loadtests.running.shelf import Shelf
from loadtests.scenario import Phase, Scenario, StoreShape

if TYPE_CHECKING:
    from loadtests.material import Adapter
    from loadtests.peers import Peer
    from loadtests.sending import Sent
    from loadtests.shaping import Fetch, Store
    from loadtests.workload import Planned

UNSHAPED = StoreShape()


@dataclass(frozen=True)
class Place:
    """A running server and what belongs to it. `store` is None where the server brought its own."""

    peer: Peer
    round: int
    store: Store | None
    shelf: Shelf
    fresh: Callable[[Adapter, int], Adapter]
    send: Callable[..., Sequence[Sent]]
    plan: Callable[..., Sequence[Planned]]
    raw: Path


@dataclass(frozen=True)
class Lines:
    """What a phase leaves."""

    records: tuple[Record, ...] = ()
    events: tuple[Event, ...] = ()
    samples: tuple[MemorySample, ...] = ()


class LeftOut(Exception):
    """A phase that this peer does not take part in; says why."""


def run_phase(place: Place, scenario: Scenario, phase: Phase) -> Lines:
    """Raises LeftOut, and whatever stops the sender."""
    mark = Mark(place.peer.name, place.round, phase.name)
    shape = phase.store or scenario.store
    puts = put_pools(place, phase, shape)
    steps = steps_of(phase.changes, place.shelf)
    # The same plan for every peer of a round: what dice decide is never a difference between peers.
    seed = scenario.seed + place.round - 1
    planned = place.plan(phase, scenario.pools, seed)
    asked = {one.number: adapter_of(one, place.shelf, steps) for one in planned}
    clock = Clock()
    loads_before = place.peer.loads() if phase.count_loads else None
    if place.store:
        place.store.shape(shape, seed)
        place.store.fetches()  # those of putting are no part of the phase
    sent, done, samples = send_beside(place, place.raw / phase.name, planned, asked, steps, clock, scenario.memory_every_s)
    fetches = place.store.fetches() if place.store else ()
    events = [
        mark.event(0.0, "phase", wall_ns=clock.began_ns, planned=len(planned)),
        *(mark.event(clock.at(one.wall_ns), "put", None, one.took_s, pool=one.pool, tier=one.tier) for one in puts),
        *([mark.event(0.0, "store", **shape.model_dump(exclude_defaults=True))] if shape != UNSHAPED else []),
        *(event_of(mark, one) for one in done),
        *(fetched(mark, clock, place.peer, one) for one in fetches),
    ]
    if loads_before is not None:
        events.append(mark.event(clock.now_s(), "loads", count=(place.peer.loads() or 0) - loads_before))
    records = records_of(mark, phase, planned, sent, asked, done, place.shelf)
    place.shelf.note(done)
    return Lines(records, tuple(events), tuple(MemorySample(mark.peer, mark.round, mark.phase, *one) for one in samples))


def fetched(mark: Mark, clock: Clock, peer: Peer, fetch: Fetch) -> Event:
    return mark.event(clock.at(fetch.wall_ns), "fetch", peer.adapter_of(fetch.path), fetch.took_s, bytes=fetch.bytes)


# -- before ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Put:
    pool: str
    tier: Tier
    wall_ns: int
    took_s: float


def put_pools(place: Place, phase: Phase, shape: StoreShape) -> list[Put]:
    """Each pool into its tier, from a store that is quick and whole: putting is not what is measured. Raises LeftOut."""
    peer = place.peer
    if place.store:
        place.store.shape(UNSHAPED)
    elif shape != UNSHAPED:
        raise LeftOut("the store of a server that runs already can't be shaped")
    if cannot := sorted({tier for tier in phase.put.values() if not peer.can_put(tier)}):
        raise LeftOut(f"{peer.name} has no way to put adapters into: {', '.join(cannot)}")
    puts = []
    for pool, tier in sorted(phase.put.items(), key=lambda one: DEEPEST_FIRST.index(one[1])):
        wall_ns, began = time.time_ns(), time.perf_counter()
        try:
            if peer.needs_fresh(tier):
                renew(place, pool)
            peer.put(place.shelf.members(pool), tier)
        except Exception as error:
            raise LeftOut(f"{pool} did not get into the tier {tier}: {error}") from error
        puts.append(Put(pool, tier, wall_ns, time.perf_counter() - began))
    return puts


DEEPEST_FIRST: tuple[Tier, ...] = ("remote", "disk", "engine")  # what is put into the engine last is not pushed out by the rest


def renew(place: Place, pool: str) -> None:
    """Other names and bytes that say the same, for a peer that can't forget what it has seen."""
    variants = tuple(place.fresh(adapter, place.shelf.renewal()) for adapter in place.shelf.members(pool))
    for variant in variants:
        place.peer.add(variant)
    place.shelf.replace(pool, variants)


def adapter_of(planned: Planned, shelf: Shelf, steps: Sequence[Step]) -> Adapter | None:
    if planned.pool is None or planned.adapter_index is None:
        return None
    members = shelf.members(planned.pool)
    return (*members, *newcomers(steps, planned.pool))[planned.adapter_index]


# -- meanwhile ---------------------------------------------------------------------------------------------------------


def send_beside(
    place: Place,
    folder: Path,
    planned: Sequence[Planned],
    asked: Mapping[int, Adapter | None],
    steps: Sequence[Step],
    clock: Clock,
    memory_every_s: float | None,
) -> tuple[Sequence[Sent], list[Done], list[tuple[float, str, int]]]:
    """Sends all, while the steps are carried out and memory is looked at, all by one clock."""
    peer = place.peer
    coming = {step.adapter.name for step in steps if step.do == "publish"}
    models = {one.number: model_of(peer, asked[one.number], one.alias, coming) for one in planned}
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2, "beside") as pool:
        changing = pool.submit(carry_out, peer, steps, clock)
        sampling = pool.submit(sample_memory, peer, clock, memory_every_s)
        try:
            sent = place.send(peer.url, planned, models, folder, on_start=clock.begin)
            clock.begin(time.time_ns())  # a plan that holds no request leaves the changes to be made
            done = changing.result()
        finally:
            clock.stop()
        return sent, done, sampling.result()


def model_of(peer: Peer, adapter: Adapter | None, alias: str | None, coming: Collection[str]) -> str:
    """What is yet to be published has no version that could be asked for: its name has to do."""
    if adapter is None:
        return peer.base
    return peer.model(adapter, alias=alias or ("production" if adapter.name in coming else None))


def sample_memory(peer: Peer, clock: Clock, every_s: float | None) -> list[tuple[float, str, int]]:
    """Second, part and bytes, until the clock is stopped."""
    samples: list[tuple[float, str, int]] = []
    next_s = 0.0
    while every_s and clock.reached(next_s):
        at_s = clock.now_s()
        samples += [(at_s, part, uss_of(processes)) for part, processes in peer.processes().items()]
        next_s = max(next_s + every_s, clock.now_s())
    return samples


def uss_of(processes: Iterable[psutil.Process]) -> int:
    """Bytes that belong to these processes alone; one that ends meanwhile has none."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_full_info().uss
    return total


# -- after -------------------------------------------------------------------------------------------------------------


def records_of(
    mark: Mark,
    phase: Phase,
    planned: Sequence[Planned],
    sent: Sequence[Sent],
    asked: Mapping[int, Adapter | None],
    done: Sequence[Done],
    shelf: Shelf,
) -> tuple[Record, ...]:
    by_number = {one.number: one for one in sent}
    said = {adapter.name: adapter.sentence for adapter in asked.values() if adapter}
    turns = {adapter.name: turns_of(done, adapter) for adapter in asked.values() if adapter}
    aliases_said = {adapter.name: sayings(shelf.says(adapter), turns[adapter.name]) for adapter in asked.values() if adapter}

    def may_say(one: Planned, adapter: Adapter | None) -> tuple[Saying, ...]:
        if adapter is None or one.whole_length or one.images:  # only the sentence that is asked for by HELLO tells adapters apart
            return ()
        return aliases_said[adapter.name] if one.alias else sayings(said[adapter.name], ())

    def put(one: Planned, adapter: Adapter | None) -> Tier | None:
        """None for what came later than its pool was put, and for an alias that has moved since: nobody put its new version."""
        if adapter is None or one.pool is None or adapter not in shelf.members(one.pool):
            return None
        moved = one.alias and any(turn.began_s <= one.at_s for turn in turns[adapter.name])
        return None if moved else phase.put.get(one.pool)

    together = ((one, by_number[one.number], asked[one.number]) for one in planned)
    return tuple(record_of(mark, one, seen, adapter, put(one, adapter), may_say(one, adapter)) for one, seen, adapter in together)
