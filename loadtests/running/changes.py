"""What is done to registry and store beside the requests, at its time, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadtests.records import Event, Tier
from loadtests.running.clock import Clock
from loadtests.running.judging import Mark, Turn
from loadtests.running.shelf import NEEDS_CONTENT, Shelf
from loadtests.scenario import Change

if TYPE_CHECKING:
    from loadtests.material import Adapter
    from loadtests.peers import Peer

AT_ONCE = 8  # one that takes long must not put off those after it
REASON_LENGTH = 500


@dataclass(frozen=True, slots=True)
class Step:
    """One change: to `adapter`, with the bytes and the sentence of `content` where it needs other ones."""

    at_s: float
    do: str
    pool: str
    adapter: Adapter
    content: Adapter | None = None
    tier: Tier = "remote"


@dataclass(frozen=True, slots=True)
class Done:
    """`failed` is the reason, empty where it was done."""

    step: Step
    began_s: float
    took_s: float
    failed: str = ""


def steps_of(changes: Iterable[Change], shelf: Shelf) -> tuple[Step, ...]:
    """Every change in the order of time. Adapters that are published are taken from what the shelf has left."""
    planned = [
        (change.at_s + number * (change.every_s or 0), number, change) for change in changes for number in range(change.count)
    ]
    return tuple(_step(at_s, number, change, shelf) for at_s, number, change in sorted(planned, key=lambda one: one[0]))


def _step(at_s: float, number: int, change: Change, shelf: Shelf) -> Step:
    content = shelf.spare(change.pool) if change.do in NEEDS_CONTENT else None
    members = shelf.members(change.pool)
    adapter = {"publish": content, "promote": members[0]}.get(change.do) or members[number % len(members)]
    return Step(at_s, change.do, change.pool, adapter, content, change.tier)


def newcomers(steps: Iterable[Step], pool: str) -> tuple[Adapter, ...]:
    return tuple(step.adapter for step in steps if step.do == "publish" and step.pool == pool)


def carry_out(peer: Peer, steps: Sequence[Step], clock: Clock) -> list[Done]:
    """Each step at its time, none waiting for another; ends early when the clock is stopped."""
    running = []
    with ThreadPoolExecutor(AT_ONCE, "change") as pool:
        for step in steps:
            if not clock.reached(step.at_s):
                break
            running.append(pool.submit(_carry_out, peer, step, clock))
    return [one.result() for one in running]


def _carry_out(peer: Peer, step: Step, clock: Clock) -> Done:
    began_s, began = clock.now_s(), time.perf_counter()
    try:
        told_s = _apply(peer, step)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what came of the change, and the requests go on
        return Done(step, began_s, time.perf_counter() - began, f"{type(error).__name__}: {error}"[:REASON_LENGTH])
    took_s = time.perf_counter() - began
    return Done(step, began_s, took_s) if told_s is None else Done(step, began_s + took_s - told_s, told_s)


def _apply(peer: Peer, step: Step) -> float | None:
    """Seconds that the last part of the call took, where that part alone is the change; None where all of it is."""
    if step.do == "publish":
        return peer.add(step.adapter)
    if step.do == "evict":
        return peer.evict(step.adapter, step.tier)
    change = peer.republish if step.do == "republish" else peer.promote
    return change(step.adapter, step.content)


def event_of(mark: Mark, done: Done) -> Event:
    reason = {"failed": done.failed} if done.failed else {}
    return mark.event(done.began_s, done.step.do, done.step.adapter.name, done.took_s, pool=done.step.pool, **reason)


def turns_of(done: Iterable[Done], adapter: Adapter) -> list[Turn]:
    """How what the adapter's alias says changed."""
    return [
        Turn(one.began_s, None if one.failed else one.began_s + one.took_s, one.step.content.sentence)
        for one in done
        if one.step.do in ("republish", "promote") and one.step.adapter.name == adapter.name and one.step.content
    ]
