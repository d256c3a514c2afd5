"""What a replica should hold before anybody asks. Pure: rows of the registry in, wishes out; `resident` fulfils them.

Every replica decides for itself from the same rows, so nobody hands out work. Requests come first: at most all places but one are
held, what is too much stays on the disk, and a wish without a hold is fulfilled once and competes like any other then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from adapters.names import AdapterRef
from adapters.registry.directives import active, versions_of
from adapters.registry.moments import unix_s
from adapters.types import AdapterEntry, Directive, PendingMove, ResolvedAdapter, WarmTier
from serve_app.routing.placement import assigned

Cause = Literal["promote", "pin", "prewarm", "use", "publish"]
CAUSES: tuple[Cause, ...] = ("promote", "pin", "prewarm", "use", "publish")  # the most urgent first

TOO_MANY_PINS = "too_many_pins"
NO_SLOT = "no_slot"


@dataclass(frozen=True, slots=True)
class Seat:
    """Which of a base's replicas this is, and how many adapters its engine takes."""

    rank: int
    world_size: int
    slots: int


@dataclass(frozen=True, slots=True)
class Wish:
    """An adapter that should be in `tier`, and stay there while the wish stands if it is `held`.

    `key` is the reason as a text: a wish without a hold is fulfilled once for each key, and a new key forgets old failures.
    `move_id` is set while a promotion waits for it, `short` where there was no room for what was asked (TOO_MANY_PINS, NO_SLOT).
    """

    adapter: ResolvedAdapter
    tier: WarmTier
    held: bool
    cause: Cause
    key: str
    at: str = ""
    move_id: str | None = None
    short: str | None = None

    @property
    def ref(self) -> AdapterRef:
        return self.adapter.ref


Wanted = dict[tuple[AdapterRef, WarmTier], Wish]


def wishes_of(entry: AdapterEntry, seat: Seat, resident: Iterable[AdapterRef], now_s: float) -> list[Wish]:
    """What the directives and pending moves of one adapter ask of this replica at `now_s` (Unix seconds). `resident` is what its
    engine holds: a promotion warms the new version where the old one is."""
    wishes = [wish for move in entry.pending.values() if (wish := _of_move(entry, move, seat, resident))]
    for directive in entry.directives:
        if active(directive, now_s):
            wishes += _of_directive(entry, directive, seat, now_s)
    return wishes


def of_publication(entry: AdapterEntry, adapter: ResolvedAdapter, seat: Seat, resident: Iterable[AdapterRef]) -> Wish | None:
    """A version that was published just now comes to the disk of its owner, which a first request would be sent to, and of those
    that hold another version of the adapter, since its aliases may move there."""
    held_here = any(ref.name == entry.name for ref in resident)
    if not held_here and not _is_assigned(adapter.ref, 1, seat):
        return None
    return Wish(adapter, "disk", False, "publish", f"publish {adapter.ref}")


def of_use(adapter: ResolvedAdapter) -> Wish:
    """An adapter that was busy in the replica's last run comes back."""
    return Wish(adapter, "engine", False, "use", f"use {adapter.ref}")


def choose(wishes: Iterable[Wish], slots: int) -> Wanted:
    """One wish for each adapter and tier, with room for all in the engine: the most urgent cause first, then the oldest.

    At most `slots - 1` are held in the engine, so that one place is left for requests. A pin too many is held on the disk
    instead, other wishes too many stay on the disk; `short` says so.
    """
    wanted: Wanted = {}
    held = placed = 0
    for wish in sorted(wishes, key=_urgency):
        if (wish.ref, wish.tier) in wanted:
            continue  # a more urgent one is there; none of these is held where that one is not
        if wish.tier == "engine":
            wish = _fitted(wish, may_hold=held < slots - 1, may_load=placed < slots)
            placed += wish.tier == "engine"
            held += wish.tier == "engine" and wish.held
        wanted.setdefault((wish.ref, wish.tier), wish)
    return wanted


def _fitted(wish: Wish, *, may_hold: bool, may_load: bool) -> Wish:
    """A promotion only needs to be warm once; a pin that competed with requests for ever would starve them."""
    if wish.held and not may_hold and wish.cause != "promote":
        return replace(wish, tier="disk", short=TOO_MANY_PINS)
    if not may_load:
        return replace(wish, tier="disk", held=False, short=NO_SLOT)
    return replace(wish, held=wish.held and may_hold)


def _urgency(wish: Wish) -> tuple[int, bool, str, AdapterRef]:
    return CAUSES.index(wish.cause), wish.tier != "engine", wish.at, wish.ref


def _of_move(entry: AdapterEntry, move: PendingMove, seat: Seat, resident: Iterable[AdapterRef]) -> Wish | None:
    adapter = _resolved(entry, move.version)
    if adapter is None:
        return None
    before = {AdapterRef(entry.base, entry.name, version) for version in versions_of(move.alias, entry)}
    if before.isdisjoint(resident) and not _is_assigned(adapter.ref, move.min_ready or 1, seat):
        return None
    return Wish(adapter, "engine", True, "promote", f"move {move.id}", move.at, move_id=move.id)


def _of_directive(entry: AdapterEntry, directive: Directive, seat: Seat, now_s: float) -> list[Wish]:
    cause: Cause = "pin" if directive.pin else "prewarm"
    wishes = []
    for version in versions_of(directive.target, entry):
        adapter = _resolved(entry, version)
        if adapter is None or not assigned(directive, str(adapter.ref), seat.rank, seat.world_size):
            continue
        key = f"{cause} {directive.target} {directive.tier} {directive.at} {_occurrence(directive, now_s)}"
        wishes.append(Wish(adapter, directive.tier, directive.pin, cause, key, directive.at))
    return wishes


def _is_assigned(ref: AdapterRef, replicas: int, seat: Seat) -> bool:
    anywhere = Directive(target=str(ref.version), tier="engine", pin=False, replicas=replicas)
    return assigned(anywhere, str(ref), seat.rank, seat.world_size)


def _occurrence(directive: Directive, now_s: float) -> int:
    """Which window of a schedule is open: each is fulfilled anew."""
    if not directive.every_s or directive.start is None:
        return 0
    return int((now_s - unix_s(directive.start)) // directive.every_s)


def _resolved(entry: AdapterEntry, number: int) -> ResolvedAdapter | None:
    """The version as a request would get it; None if it is not there or was taken out of service."""
    version = entry.versions.get(number)
    if version is None or version.retired:
        return None
    ref = AdapterRef(entry.base, entry.name, number)
    return ResolvedAdapter(ref, version.digest, version.files, version.rank, version.num_modules)
