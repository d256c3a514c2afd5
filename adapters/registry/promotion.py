"""A promotion that waits until its version is warm: what to do about it now, and what its steps make of a head. Pure functions.

A pending move is begun by whoever wants it, taken by the gateway that sees it first, and ended by whichever gateway decides
first, exactly once: the alias moves, or a row of the history says why it did not. Who finds it ended as wanted has succeeded.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass, replace

from adapters.errors import InvalidRequest, VersionConflict
from adapters.registry import aliases
from adapters.registry.moments import at_unix, unix_s
from adapters.types import By, Head, HistoryRow, PendingMove

MAX_TIMEOUT_S = 24 * 3600.0
MAX_MIN_READY = 10_000

# Deciding


@dataclass(frozen=True, slots=True)
class Wait:
    """Not yet: `ready` of the `needed` replicas hold the version."""

    ready: int
    needed: int


@dataclass(frozen=True, slots=True)
class Move:
    """The alias may move; `note` says what the history should know."""

    note: str | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """The alias stays; `reason` is for a person."""

    reason: str


def decide(
    move: PendingMove, ready: int, holders_of_old: int, live_replicas: int, failure: str | None, now_s: float
) -> Wait | Move | Fail:
    """What to do about a pending move at the Unix time `now_s`.

    `ready` replicas hold the version in their engines, `holders_of_old` hold what the alias names now, `failure` is why a replica
    could not load it. Needed are `min_ready`, or as many as hold the old one; never more than are live. Without a live replica
    there is nothing to wait for.
    """
    if live_replicas < 1:
        return Move("no replica was live, so nobody waited")
    needed = replicas_needed(move, holders_of_old, live_replicas)
    if ready >= needed:
        return Move()
    if failure is not None:
        return Fail(failure)
    if now_s >= unix_s(move.deadline):
        waited_s = unix_s(move.deadline) - unix_s(move.at)
        return Fail(f"{ready} of {needed} replicas had it in their engines after {waited_s:.0f} s")
    return Wait(ready, needed)


def replicas_needed(move: PendingMove, holders_of_old: int, live_replicas: int) -> int:
    """At least one, at most all that are live."""
    wanted = holders_of_old if move.min_ready is None else move.min_ready
    return max(1, min(wanted, live_replicas))


def outcome(head: Head, move_id: str) -> HistoryRow | None:
    """The row with which a move ended; its kind is `promote_failed` if the alias did not move. None while it is pending, or if
    the history does not hold it any more."""
    return next((row for row in reversed(head.history) if row.move_id == move_id), None)


def check_moved(head: Head, move: PendingMove) -> None:
    """Raises VersionConflict with reason `promote_failed` if the move ended without moving the alias."""
    row = outcome(head, move.id)
    if row is not None and row.kind == aliases.PROMOTE_FAILED:
        named = head.aliases.get(move.alias)
        stays = f"stays at version {named}" if named is not None else "names nothing yet"
        raise VersionConflict(
            f"`{move.alias}` of `{head.name}` {stays}; {row.message}",
            reason="promote_failed",
            value=move.version,
            hint="mend what the reason says, or move it without waiting: `now`, --now",
        )


# On a head


def new_move(alias: str, version: int, by: By, at: str, *, min_ready: int | None, timeout_s: float) -> PendingMove:
    """Raises InvalidRequest."""
    if min_ready is not None and not (type(min_ready) is int and 1 <= min_ready <= MAX_MIN_READY):
        raise InvalidRequest(
            f"`min_ready` is {min_ready}; a whole number from 1 to {MAX_MIN_READY} is needed",
            limit=1 if min_ready < 1 else MAX_MIN_READY,
            value=min_ready,
            param="min_ready",
        )
    if not (math.isfinite(timeout_s) and 0 < timeout_s <= MAX_TIMEOUT_S):
        raise InvalidRequest(
            f"`timeout_s` is {timeout_s}; above 0 and at most {MAX_TIMEOUT_S:.0f} are taken",
            limit=MAX_TIMEOUT_S,
            value=timeout_s if math.isfinite(timeout_s) else str(timeout_s),
            param="timeout_s",
        )
    deadline = at_unix(unix_s(at) + timeout_s)
    return PendingMove(uuid.uuid4().hex, alias, version, min_ready, deadline, at, by.who, by.message)


def begun(head: Head, move: PendingMove, by: By) -> Head | None:
    """The move is pending; one to another version is ended, one to the same version that has time left is joined instead.

    Nothing is left to do where the alias names the version alone. Raises VersionRetired, Forbidden, InvalidRequest.
    """
    row = HistoryRow(None, None, None, move.at, by.who, by.message, aliases.PROMOTE)
    if aliases.names_alone(head, move.alias, move.version):
        return aliases.moved(head, move.alias, move.version, row, by)
    aliases.check_live(head, move.version)
    aliases.check_unlocked(head, move.alias, by)
    aliases.check_room(head, move.alias)
    waiting = head.pending.get(move.alias)
    if waiting is not None and waiting.version == move.version and move.at <= waiting.deadline:
        return None
    reason = "the time ran out" if waiting and waiting.version == move.version else f"superseded by version {move.version}"
    head = aliases.ended(head, move.alias, reason, row)
    return replace(head, pending={**head.pending, move.alias: move})


def taken(head: Head, alias: str, move_id: str, who: str) -> Head | None:
    """Somebody looks after the move. The first stays; a move that ended meanwhile is nobody's."""
    move = head.pending.get(alias)
    if move is None or move.id != move_id or move.taken_by is not None:
        return None
    return replace(head, pending={**head.pending, alias: replace(move, taken_by=who)})


def finished(head: Head, alias: str, move_id: str, row: HistoryRow, note: str | None = None) -> Head | None:
    """The alias moved, in the name of who began the move; None if it did already.

    Raises VersionConflict if the move ended otherwise, and what `aliases.moved` raises.
    """
    move = _pending(head, alias, move_id)
    if move is None:
        _check_outcome(head, move_id, moved=True)
        return None
    message = "; ".join(text for text in (move.message, note) if text)[: aliases.MAX_MESSAGE_CHARS]
    row = replace(row, who=move.who, message=message or None)
    # whoever began it was allowed to, and protecting the alias since then would have ended it
    return aliases.moved(head, alias, move.version, row, By(unlock=True))


def failed(head: Head, alias: str, move_id: str, reason: str, row: HistoryRow) -> Head | None:
    """The move ended and the alias stays; None if it did already. Raises VersionConflict if the alias moved."""
    if _pending(head, alias, move_id) is None:
        _check_outcome(head, move_id, moved=False)
        return None
    return aliases.ended(head, alias, reason, row)


def _pending(head: Head, alias: str, move_id: str) -> PendingMove | None:
    move = head.pending.get(alias)
    return move if move is not None and move.id == move_id else None


def _check_outcome(head: Head, move_id: str, *, moved: bool) -> None:
    row = outcome(head, move_id)
    if row is None:
        raise VersionConflict(f"no such move of `{head.name}` is pending or remembered", reason="no_such_move", param="move_id")
    has_moved = row.kind != aliases.PROMOTE_FAILED
    if has_moved != moved:
        told = f"`{row.alias}` moved to version {row.to_version}" if has_moved else f"the move failed: {row.message}"
        raise VersionConflict(told, reason="move_done" if has_moved else "move_failed", value=head.revision)
