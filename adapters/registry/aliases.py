"""What a change of an adapter means, as pure functions on its head: promote, roll back, share, protect, retire, collect, tag.

Each returns the changed head, or None if there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from adapters.errors import Forbidden, InvalidRequest, VersionRetired
from adapters.registry import directives
from adapters.registry.moments import unix_s
from adapters.types import By, Head, HistoryRow

MAX_HISTORY = 1000  # rows; a head stays well under a megabyte
MAX_ALIASES = 64
MAX_TAGS = 32
MAX_TAG_CHARS = 256
MAX_MESSAGE_CHARS = 1000

PROMOTE = "promote"
ROLLBACK = "rollback"
WEIGHTS = "weights"
UNSET = "unset"
PROTECT = "protect"
UNPROTECT = "unprotect"
RETIRE = "retire"
RESTORE = "restore"
COLLECT = "collect"
PROMOTE_FAILED = "promote_failed"
UNMOVED = frozenset(
    {PROTECT, UNPROTECT, PROMOTE_FAILED}
)  # rows about an alias that tell of no move; `to_version` is where it stays

K = TypeVar("K")
V = TypeVar("V")


def recorded(head: Head, row: HistoryRow) -> Head:
    """The head with one row more; the oldest go when there are too many."""
    return replace(head, history=(*head.history, row)[-MAX_HISTORY:])


# Aliases


def moved(head: Head, alias: str, version: int, row: HistoryRow, by: By) -> Head | None:
    """The alias names `version` alone. A pending move to it is done then, one to another version ended.

    Raises VersionRetired, Forbidden.
    """
    check_live(head, version)
    is_there = names_alone(head, alias, version)
    if is_there and alias not in head.pending:
        return None
    check_unlocked(head, alias, by)
    check_room(head, alias)
    waiting = head.pending.get(alias)
    if waiting is not None and waiting.version == version:
        head, row = replace(head, pending=_without(head.pending, alias)), replace(row, move_id=waiting.id)
    head = ended(head, alias, f"superseded by version {version}", row)
    if is_there:
        return head
    row = replace(row, alias=alias, from_version=head.aliases.get(alias), to_version=version)
    return recorded(replace(head, aliases={**head.aliases, alias: version}, weights=_without(head.weights, alias)), row)


def shared(head: Head, alias: str, weights: Mapping[int, int], row: HistoryRow, by: By) -> Head | None:
    """The alias shares its traffic by `weights`; the version that it names stays if it has a share, else the largest share's
    is named. Raises VersionRetired, Forbidden."""
    for version in weights:
        check_live(head, version)
    if len(weights) == 1:
        return moved(head, alias, next(iter(weights)), row, by)
    if head.weights.get(alias) == dict(weights):
        return None
    check_unlocked(head, alias, by)
    check_room(head, alias)
    head = ended(head, alias, "its traffic is shared now", row)
    now = head.aliases.get(alias)
    main = now if now in weights else min(weights, key=lambda version: (-weights[version], version))
    row = replace(row, alias=alias, from_version=now, to_version=main, kind=WEIGHTS, weights=dict(weights))
    changed = replace(head, aliases={**head.aliases, alias: main}, weights={**head.weights, alias: dict(weights)})
    return recorded(changed, row)


def unset(head: Head, alias: str, row: HistoryRow, by: By) -> Head | None:
    """The alias is gone, and with it its pending move and the directives on it. Raises Forbidden."""
    if alias not in head.aliases and alias not in head.pending:
        return None
    check_unlocked(head, alias, by)
    head = ended(head, alias, "the alias was taken away", row)
    head = directives.undirected(head, alias) or head
    if alias not in head.aliases:
        return head
    row = replace(row, alias=alias, from_version=head.aliases[alias], to_version=None, kind=UNSET)
    return recorded(replace(head, aliases=_without(head.aliases, alias), weights=_without(head.weights, alias)), row)


def protected(head: Head, alias: str, on: bool, row: HistoryRow) -> Head | None:
    """The alias moves only for a caller that says so, or like any other again. Protection ends a pending move."""
    if (alias in head.protected) == on:
        return None
    head = ended(head, alias, "the alias was protected", row) if on else head
    named = head.aliases.get(alias)
    row = replace(row, alias=alias, from_version=named, to_version=named, kind=PROTECT if on else UNPROTECT)
    return recorded(replace(head, protected=head.protected | {alias} if on else head.protected - {alias}), row)


def ended(head: Head, alias: str, reason: str, row: HistoryRow) -> Head:
    """The alias has no pending move any more. If it had one, a row of kind `promote_failed` says which, and why it ended."""
    move = head.pending.get(alias)
    if move is None:
        return head
    named = head.aliases.get(alias)
    told = f"version {move.version}: {reason}"[:MAX_MESSAGE_CHARS]
    who = row.who or move.who
    failed = HistoryRow(alias, named, named, row.at, who, told, PROMOTE_FAILED, head.weights.get(alias), move.id)
    return recorded(replace(head, pending=_without(head.pending, alias)), failed)


def names_alone(head: Head, alias: str, version: int) -> bool:
    return head.aliases.get(alias) == version and alias not in head.weights


def check_unlocked(head: Head, alias: str, by: By) -> None:
    """Raises Forbidden."""
    if alias in head.protected and not by.unlock:
        raise Forbidden(
            f"`{alias}` of `{head.name}` is protected",
            reason="alias_protected",
            value=alias,
            param="alias",
            hint="say that you mean it: --unlock, or `unlock` in the body",
        )


def check_room(head: Head, alias: str) -> None:
    """Raises InvalidRequest."""
    if alias not in head.aliases and len(head.aliases) >= MAX_ALIASES:
        raise InvalidRequest(
            f"`{head.name}` has {len(head.aliases)} aliases; at most {MAX_ALIASES} are kept",
            limit=MAX_ALIASES,
            value=len(head.aliases),
            param="alias",
        )


# Going back


def rollback_target(head: Head, alias: str, to: int | None = None) -> int:
    """The version that a rollback of `alias` goes to. While its traffic is shared, back is to the version that it names.

    Raises InvalidRequest if there is none, VersionRetired for `to`.
    """
    if to is not None:
        _check_was_live(head, alias, to)
        check_live(head, to)
        return to
    if alias in head.weights and head.aliases[alias] not in head.retired:
        return head.aliases[alias]
    for version in reversed(live_before(head, alias)):
        if version not in head.retired:
            return version
    raise InvalidRequest(f"`{alias}` of `{head.name}` has no earlier version to go back to", reason="nothing_to_roll_back")


def live_before(head: Head, alias: str) -> list[int]:
    """The versions that `alias` named before the one it names now, oldest first. A rollback takes what it left off the list,
    so that a second one goes further back instead of toggling."""
    trail: list[int] = []
    for move in head.history:
        if move.alias != alias or move.to_version is None or move.kind in UNMOVED:
            continue
        if not trail and move.from_version is not None:  # the history was cut
            trail.append(move.from_version)
        if move.kind == ROLLBACK and move.to_version in trail:
            del trail[_last(trail, move.to_version) + 1 :]
        elif trail[-1:] != [move.to_version]:
            trail.append(move.to_version)
    current = head.aliases.get(alias)
    return [version for version in trail[:-1] if version != current]


def were_live(head: Head, alias: str) -> list[int]:
    """The versions that `alias` has ever named and that can come back, ascending."""
    lived = {move.to_version for move in head.history if move.alias == alias and move.to_version is not None}
    return sorted(lived - head.retired)


def _last(trail: list[int], version: int) -> int:
    return len(trail) - 1 - trail[::-1].index(version)


def _check_was_live(head: Head, alias: str, version: int) -> None:
    lived = {move.to_version for move in head.history if move.alias == alias and move.to_version is not None}
    if version not in lived:
        shown = ", ".join(str(number) for number in sorted(lived)) or "none"
        raise InvalidRequest(
            f"version {version} of `{head.name}` was never live under `{alias}`; these were: {shown}",
            reason="never_live",
            value=version,
            param="to",
        )


def live_at(head: Head, alias: str, at: str) -> HistoryRow | None:
    """The row that decided what `alias` named at the time `at` (ISO 8601, UTC), or None if it named nothing yet."""
    rows = [row for row in head.history if row.alias == alias and row.at <= at and row.kind not in UNMOVED]
    return rows[-1] if rows and rows[-1].to_version is not None else None


# Versions


def check_live(head: Head, version: int) -> None:
    """Raises VersionRetired."""
    if version in head.collected:
        raise VersionRetired(
            f"version {version} of `{head.name}` was collected: its files are gone",
            reason="collected",
            value=version,
            hint="publish the same content again to bring it back",
        )
    if version in head.retired:
        raise VersionRetired(f"version {version} of `{head.name}` is retired", value=version, hint="restore it first")


def retired(head: Head, version: int, row: HistoryRow) -> Head | None:
    """`version` answers no more, and what was to prewarm it is dropped. Raises InvalidRequest while an alias sends requests to
    it, a pin holds it, or an alias is about to move to it."""
    if version in head.retired:
        return None
    check_free(head, version, row.at)
    head = directives.undirected(head, str(version)) or head
    row = replace(row, from_version=version, to_version=version, kind=RETIRE)
    return recorded(replace(head, retired=head.retired | {version}), row)


def restored(head: Head, version: int, row: HistoryRow) -> Head | None:
    """`version` answers again. Raises VersionRetired if it was collected."""
    if version in head.collected:
        check_live(head, version)
    if version not in head.retired:
        return None
    row = replace(row, from_version=version, to_version=version, kind=RESTORE)
    return recorded(replace(head, retired=head.retired - {version}), row)


def collected(head: Head, version: int, row: HistoryRow) -> Head | None:
    """`version` is given up: it answers no more, and its files may go. Raises InvalidRequest where `retired` does."""
    if version in head.collected:
        return None
    check_free(head, version, row.at)
    head = directives.undirected(head, str(version)) or head
    row = replace(row, from_version=version, to_version=version, kind=COLLECT)
    changed = replace(head, retired=head.retired | {version}, collected={**head.collected, version: row.at})
    return recorded(changed, row)


def republished(head: Head, version: int, row: HistoryRow) -> Head | None:
    """A collected version whose content was published again is back; one that was only retired stays so."""
    if version not in head.collected:
        return None
    row = replace(row, from_version=version, to_version=version, kind=RESTORE)
    return recorded(replace(head, retired=head.retired - {version}, collected=_without(head.collected, version)), row)


def check_free(head: Head, version: int, at: str) -> None:
    """Raises InvalidRequest while an alias names `version` (`in_use`), a pin holds it (`pinned`) or an alias is to move to it
    (`pending`). A move whose deadline passed holds nothing: if it is decided after all, it fails."""
    named = head.aliases_of(version)
    if named:
        raise _held(f"{_listed(named)} of `{head.name}` names version {version}; move it first", "in_use", version)
    if version in directives.versions_held(head, unix_s(at), pin=True):
        raise _held(f"version {version} of `{head.name}` is pinned; unpin it first", "pinned", version)
    waiting = awaited(head, version, at)
    if waiting:
        told = f"{_listed(waiting)} of `{head.name}` is about to move to version {version}; promote another version first"
        raise _held(told, "pending", version)


def awaited(head: Head, version: int, at: str) -> list[str]:
    """The aliases that have a pending move to `version` whose deadline is not past at the time `at`."""
    return sorted(alias for alias, move in head.pending.items() if move.version == version and at <= move.deadline)


def _held(message: str, reason: str, version: int) -> InvalidRequest:
    return InvalidRequest(message, reason=reason, value=version, param="version")


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# Words


def tagged(head: Head, version: int, tags: Mapping[str, str | None]) -> Head | None:
    """The tags of `version` with `tags` over them; None takes one away. Raises InvalidRequest."""
    old = head.tags.get(version, {})
    new = {key: value for key, value in sorted({**old, **tags}.items()) if value is not None}
    if new == old:
        return None
    if len(new) > MAX_TAGS:
        raise InvalidRequest(
            f"version {version} would have {len(new)} tags; at most {MAX_TAGS} are kept",
            limit=MAX_TAGS,
            value=len(new),
            param="tags",
        )
    everything = _without(head.tags, version)
    return replace(head, tags={**everything, version: new} if new else everything)


def _without(mapping: Mapping[K, V], key: K) -> dict[K, V]:
    return {known: value for known, value in mapping.items() if known != key}
