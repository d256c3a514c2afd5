"""What alias moves mean, as pure functions on a head: promote, roll back, retire, restore.

Each returns the changed head, or None if there is nothing to do.
"""

from __future__ import annotations

from dataclasses import replace

from adapters.errors import InvalidRequest, VersionRetired
from adapters.types import AliasMove, Head

MAX_HISTORY = 1000  # moves; a head stays well under a megabyte
PROMOTE = "promote"
ROLLBACK = "rollback"


def moved(head: Head, move: AliasMove) -> Head | None:
    """The head after a move. Raises VersionRetired."""
    check_live(head, move.to_version)
    if head.aliases.get(move.alias) == move.to_version:
        return None
    move = replace(move, from_version=head.aliases.get(move.alias))
    return replace(head, aliases={**head.aliases, move.alias: move.to_version}, history=(*head.history, move)[-MAX_HISTORY:])


def check_live(head: Head, version: int) -> None:
    """Raises VersionRetired."""
    if version in head.retired:
        raise VersionRetired(f"version {version} of `{head.name}` is retired", value=version, hint="restore it first")


def rollback_target(head: Head, alias: str, to: int | None = None) -> int:
    """The version that a rollback of `alias` goes to. Raises InvalidRequest if there is none, VersionRetired for `to`."""
    if to is not None:
        _check_was_live(head, alias, to)
        check_live(head, to)
        return to
    for version in reversed(live_before(head, alias)):
        if version not in head.retired:
            return version
    raise InvalidRequest(f"`{alias}` of `{head.name}` has no earlier version to go back to", reason="nothing_to_roll_back")


def live_before(head: Head, alias: str) -> list[int]:
    """The versions that `alias` named before the one it names now, oldest first. A rollback takes what it left off the list,
    so that a second one goes further back instead of toggling."""
    trail: list[int] = []
    for move in head.history:
        if move.alias != alias:
            continue
        if not trail and move.from_version is not None:  # the history was cut
            trail.append(move.from_version)
        if move.kind == ROLLBACK and move.to_version in trail:
            del trail[_last(trail, move.to_version) + 1 :]
        else:
            trail.append(move.to_version)
    current = head.aliases.get(alias)
    return [version for version in trail[:-1] if version != current]


def _last(trail: list[int], version: int) -> int:
    return len(trail) - 1 - trail[::-1].index(version)


def _check_was_live(head: Head, alias: str, version: int) -> None:
    lived = {move.to_version for move in head.history if move.alias == alias}
    if version not in lived:
        shown = ", ".join(str(number) for number in sorted(lived)) or "none"
        raise InvalidRequest(
            f"version {version} of `{head.name}` was never live under `{alias}`; these were: {shown}",
            reason="never_live",
            value=version,
            param="to",
        )


def retired(head: Head, version: int) -> Head | None:
    """The head with `version` retired. Raises InvalidRequest while an alias names it."""
    for alias, named in head.aliases.items():
        if named == version:
            raise InvalidRequest(
                f"version {version} of `{head.name}` is what `{alias}` names; move it first", reason="in_use", value=version
            )
    return None if version in head.retired else replace(head, retired=head.retired | {version})


def restored(head: Head, version: int) -> Head | None:
    """The head with `version` back."""
    return replace(head, retired=head.retired - {version}) if version in head.retired else None
