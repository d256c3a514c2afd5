"""Directives: where versions should be before anybody asks for them. What is allowed, when one holds, and for which versions.

Pure functions. The registry keeps directives, replicas follow them; times are Unix seconds here and ISO 8601 in the head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from adapters.errors import InvalidRequest
from adapters.names import LATEST, check_alias
from adapters.registry.moments import at_unix, normal, unix_s
from adapters.types import AdapterEntry, By, Directive, Head

MAX_DIRECTIVES = 64
MAX_REPLICAS = 10_000
MIN_EVERY_S = 60
PREWARM_LIFE_S = 3600.0  # of a prewarm that names a number and no end: long enough for every replica that is just starting
LOOK_AHEAD_S = 7 * 24 * 3600.0
MAX_STARTS = 50  # of one schedule that are looked at for pins that meet

Key = tuple[str, bool, str]


def key_of(directive: Directive) -> Key:
    """What makes two directives the same one: the newer takes the older's place."""
    return directive.target, directive.pin, directive.tier


# When


def active(directive: Directive, now_s: float) -> bool:
    """Whether its window is open."""
    start_s, end_s = _window(directive)
    if now_s < start_s:
        return False
    if directive.every_s and end_s is not None:
        return (now_s - start_s) % directive.every_s < end_s - start_s
    return end_s is None or now_s < end_s


def expired(directive: Directive, now_s: float) -> bool:
    """Whether its window closed for good; a schedule's never does."""
    return not directive.every_s and directive.until is not None and now_s >= unix_s(directive.until)


def unexpired(directives: Iterable[Directive], now_s: float) -> tuple[Directive, ...]:
    return tuple(directive for directive in directives if not expired(directive, now_s))


def _window(directive: Directive) -> tuple[float, float | None]:
    """Start and end of the (first) window."""
    begun = directive.start or directive.at
    return unix_s(begun) if begun else 0.0, unix_s(directive.until) if directive.until is not None else None


# Which versions


def number_of(target: str) -> int | None:
    """The version that a target names by its number; None for an alias."""
    return int(target) if target.isascii() and target.isdigit() else None


def versions_of(target: str, entry: AdapterEntry) -> tuple[int, ...]:
    """The versions that a target means now, ascending: all that share the traffic of an alias. None that is retired."""
    number = number_of(target)
    named = {number} if number is not None else {entry.version_of(target), *entry.weights.get(target, {})}
    return tuple(sorted(v for v in named if v is not None and v in entry.versions and not entry.versions[v].retired))


def versions_held(head: Head, now_s: float, *, pin: bool) -> set[int]:
    """The versions that directives of a head name, by number or through an alias; expired ones hold nothing."""
    held: set[int] = set()
    for directive in unexpired(head.directives, now_s):
        if directive.pin == pin:
            number = number_of(directive.target)
            named = [number] if number is not None else [head.aliases.get(directive.target)]
            held |= {version for version in (*named, *head.weights.get(directive.target, {})) if version is not None}
    return held


# What is allowed


def checked(directive: Directive, by: By, at: str) -> Directive:
    """The directive as a head holds it: times in one form, `at`, `who` and `message` of this change, an end where it needs one.

    Raises InvalidRequest.
    """
    number = number_of(directive.target)
    target = str(number) if number is not None else _alias(directive.target)
    if directive.tier not in ("engine", "disk"):
        raise InvalidRequest(f"`{directive.tier}` is no tier to warm; it is `engine` or `disk`", param="tier")
    _check_between("replicas", directive.replicas, 1, MAX_REPLICAS)
    checked = replace(directive, target=target, at=at, who=by.who, message=by.message)
    checked = replace(checked, start=_moment("start", directive.start), until=_moment("until", directive.until))
    if checked.every_s is not None:
        checked = replace(checked, start=checked.start or at)
    elif checked.until is None and number is not None and not checked.pin:
        checked = replace(checked, until=at_unix(unix_s(checked.start or at) + PREWARM_LIFE_S))
    _check_window(checked, unix_s(at))
    return checked


def _alias(target: str) -> str:
    return target if target == LATEST else check_alias(target)


def _moment(name: str, at: str | None) -> str | None:
    try:
        return None if at is None else normal(at)
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"`{name}` is a time with its zone, like 2026-11-29T12:00:00Z", param=name, value=at[:40] if at else at
        ) from None


def _check_between(name: str, value: int | None, least: int, most: int | None = None) -> None:
    if value is not None and (type(value) is not int or value < least or (most is not None and value > most)):
        upto = f"from {least} to {most}" if most is not None else f"of at least {least}"
        limit = least if most is None or value < least else most
        raise InvalidRequest(f"`{name}` is {value}; a whole number {upto} is needed", limit=limit, value=value, param=name)


def _check_window(directive: Directive, now_s: float) -> None:
    start_s, end_s = _window(directive)
    if directive.every_s is not None:
        _check_between("every_s", directive.every_s, MIN_EVERY_S)
        if end_s is None:
            raise InvalidRequest("a schedule needs the end of its window too", param="until", hint="say `until` beside `every_s`")
        if end_s - start_s >= directive.every_s:
            raise InvalidRequest(
                f"the window has {end_s - start_s:.0f} s and comes back every {directive.every_s} s; it must end before",
                limit=directive.every_s,
                value=round(end_s - start_s),
                param="every_s",
            )
    if end_s is not None and end_s <= start_s:
        raise InvalidRequest("`until` is not after the start", param="until", value=directive.until)
    if expired(directive, now_s):
        raise InvalidRequest("`until` is past already", param="until", value=directive.until)


# On a head


def directed(head: Head, directive: Directive, now_s: float) -> Head | None:
    """The directive is among the head's, in the place of the same one. A pin that is there already changes nothing; a
    prewarm that is asked for again is a new one. Raises InvalidRequest for an alias that is not there and for too many."""
    if number_of(directive.target) is None and directive.target != LATEST and directive.target not in head.aliases:
        shown = ", ".join(f"`{alias}`" for alias in sorted(head.aliases)) or "none"
        raise InvalidRequest(
            f"`{head.name}` has no alias `{directive.target}`; it has {shown}", reason="no_such_alias", param="target"
        )
    old = next((known for known in head.directives if key_of(known) == key_of(directive)), None)
    if old is not None and directive.pin and _bare(old) == _bare(directive):
        return None
    others = tuple(known for known in unexpired(head.directives, now_s) if key_of(known) != key_of(directive))
    if len(others) >= MAX_DIRECTIVES:
        raise InvalidRequest(
            f"`{head.name}` has {len(others)} directives; at most {MAX_DIRECTIVES} are kept",
            reason="too_many_directives",
            limit=MAX_DIRECTIVES,
            value=len(others),
            hint="take some away: loramux unpin",
        )
    return replace(head, directives=(*others, directive))


def undirected(head: Head, target: str, pin: bool | None = None) -> Head | None:
    """The head without the directives on `target`; with `pin` only without those that pin, or those that don't."""
    kept = tuple(known for known in head.directives if known.target != target or pin not in (None, known.pin))
    return None if kept == head.directives else replace(head, directives=kept)


def _bare(directive: Directive) -> Directive:
    return replace(directive, at="", who=None, message=None)


# Pins and slots


def check_pins(
    entries: Iterable[AdapterEntry], base: str, name: str, directive: Directive, *, slots: int, replicas: int, now_s: float
) -> None:
    """Whether `directive` on that adapter leaves the engines a place for everybody else.

    `entries` are the adapters as they are, `slots` those of one replica, `replicas` how many are live. A replica pins all its
    slots but one; what counts is the moment, within a week, at which the most are pinned. Raises InvalidRequest with reason
    `too_many_pins`, the places that there are as limit and those that are needed as value. Without a replica nothing is known,
    so nothing refused.
    """
    if not (directive.pin and directive.tier == "engine") or replicas < 1:
        return
    pins = [pin for entry in entries if entry.base == base for pin in _pins(entry, name, directive)]
    limit = replicas * max(0, slots - 1)
    needed = max((_places(pins, moment_s, replicas) for moment_s in _moments(pins, now_s)), default=0)
    if needed > limit:
        raise InvalidRequest(
            f"pins would take {needed} places in the engines of `{base}`; {limit} can be pinned (replicas: {replicas}, slots of "
            f"each: {slots}, one of which stays free)",
            reason="too_many_pins",
            limit=limit,
            value=needed,
            param="replicas",
            hint="take a pin away, pin on fewer replicas, or raise `max_cpu_loras` of this base",
        )


_Pin = tuple[str, tuple[int, ...], Directive]


def _pins(entry: AdapterEntry, name: str, new: Directive) -> Iterator[_Pin]:
    known = entry.directives
    if entry.name == name:
        known = (*(old for old in known if key_of(old) != key_of(new)), new)
    for directive in known:
        if directive.pin and directive.tier == "engine":
            yield entry.name, versions_of(directive.target, entry), directive


def _moments(pins: Iterable[_Pin], now_s: float) -> set[float]:
    """When the most can be pinned at once: now, and where a window opens."""
    moments = {now_s}
    for _, _, directive in pins:
        start_s, _ = _window(directive)
        every_s = directive.every_s
        if every_s and start_s < now_s:
            start_s += -(-(now_s - start_s) // every_s) * every_s
        for number in range(MAX_STARTS if every_s else 1):
            at_s = start_s + number * (every_s or 0)
            if now_s < at_s < now_s + LOOK_AHEAD_S:
                moments.add(at_s)
    return moments


def _places(pins: Iterable[_Pin], at_s: float, replicas: int) -> int:
    """The places that are pinned at a moment; one that several directives ask for counts once."""
    most: dict[tuple[str, int], int] = {}
    for name, versions, directive in pins:
        if active(directive, at_s):
            for version in versions:
                asked = replicas if directive.replicas is None else min(directive.replicas, replicas)
                most[name, version] = max(asked, most.get((name, version), 0))
    return sum(most.values())
