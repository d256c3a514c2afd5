"""A promotion that waits, as the command sees it: gateways end it, the command looks on, and steps in where nobody is there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.cli.gateway import GLANCE_TIMEOUT_S, known_gateway
from adapters.cli.output import err
from adapters.errors import LoraMuxError, StoreError, VersionConflict
from adapters.names import AdapterRef
from adapters.registry.moments import unix_s
from adapters.registry.promotion import check_moved, outcome, replicas_needed
from adapters.registry.standing import standing
from adapters.types import By, Head, PendingMove

TAKEN_WITHIN_S = 5.0
OVERDUE_S = 15.0
LOOK_EVERY_S = 0.3
DEFAULT_TIMEOUT = "5min"

Watch = Callable[[Head, PendingMove], None]


@dataclass(frozen=True, slots=True)
class Waited:
    """How a move ended. `note` is what the history says beside its message; `by_gateway` is false where none was there, or none
    was needed."""

    head: Head
    waited_s: float = 0.0
    note: str | None = None
    by_gateway: bool = False


async def promoted(
    registry: Any, ref: AdapterRef, alias: str, caller: By, watch: Watch, *, min_ready: int | None = None, timeout_s: float
) -> Waited:
    """Wants the alias to name `ref`'s version, and waits until it does. Raises what `Registry.begin_move` and `carried` raise."""
    head = await registry.begin_move(ref.base, ref.name, alias, ref.version, caller, min_ready=min_ready, timeout_s=timeout_s)
    move = head.pending.get(alias)
    return Waited(head) if move is None else await carried(registry, head, move, watch)


async def carried(registry: Any, head: Head, move: PendingMove, watch: Watch) -> Waited:
    """Waits until the alias has moved. Raises VersionConflict with reason `promote_failed` if it did not."""
    began_s = time.monotonic()
    by_gateway = True
    while (waiting := head.pending.get(move.alias)) is not None and waiting.id == move.id:
        unattended = waiting.taken_by is None and time.monotonic() - began_s >= TAKEN_WITHIN_S
        try:
            if unattended:
                head, by_gateway = await _moved(registry, head, move), False
                break
            if time.time() > unix_s(move.deadline) + OVERDUE_S:
                await _given_up(registry, head, move)
            await asyncio.to_thread(watch, head, move)
            await asyncio.sleep(LOOK_EVERY_S)
            head = await registry.head(head.base, head.name)
        except StoreError:
            if time.time() > unix_s(move.deadline) + OVERDUE_S:
                raise
            await asyncio.sleep(LOOK_EVERY_S)
        except VersionConflict:  # it ended in this moment
            head = await registry.head(head.base, head.name)
    check_moved(head, move)
    return Waited(head, time.monotonic() - began_s, _note(head, move), by_gateway)


async def _moved(registry: Any, head: Head, move: PendingMove) -> Head:
    note = f"no gateway took it within {TAKEN_WITHIN_S:g} s, so nobody waited"
    return await registry.finish_move(head.base, head.name, move.alias, move.id, note=note)


async def _given_up(registry: Any, head: Head, move: PendingMove) -> None:
    await registry.fail_move(head.base, head.name, move.alias, move.id, "the gateway that took it did not end it in time")


def _note(head: Head, move: PendingMove) -> str | None:
    row = outcome(head, move.id)
    if row is None or row.message == move.message:
        return None
    return (row.message or "").removeprefix(f"{move.message}; ")


@contextlib.contextmanager
def watching(url: str | None, config: Path | None, wanted: bool) -> Iterator[Watch]:
    """On a terminal: something that moves and says how many replicas have it, where a gateway tells."""
    if not wanted or not err.is_terminal:
        yield lambda head, move: None
        return
    door = known_gateway(url, config, GLANCE_TIMEOUT_S)
    with err.status("") as status:

        def watch(head: Head, move: PendingMove) -> None:
            status.update(stage(head, move, None if door is None else _replicas(door, head.base), time.time()))

        yield watch


def stage(head: Head, move: PendingMove, replicas: list[dict[str, Any]] | None, now_s: float) -> str:
    """One line: who has it, and how long it may still take."""
    left = f"{max(0, unix_s(move.deadline) - now_s):.0f} s left"
    ref = AdapterRef(head.base, head.name, move.version)
    if replicas is None:
        return f"{ref} is being warmed, {left}"
    found = standing(replicas, head, move)
    return (
        f"{found.ready} of {replicas_needed(move, found.holders_of_old, found.live)} replicas have {ref} in their engines, {left}"
    )


def _replicas(door: Any, base: str) -> list[dict[str, Any]] | None:
    try:
        return door.residency().get(base, {}).get("replicas")
    except LoraMuxError:
        return None
