"""What the publisher tells of its work. All of it can be written as JSON."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """The export of `step` is the version `ref`; `created` is False if its content was one already."""

    step: int
    ref: str
    created: bool


@dataclass(frozen=True, slots=True)
class Judged:
    """What the gate said of `ref`. `codes` and `reasons` go together and are empty where `alias` moved to it; `note` is what
    the history says of how it moved."""

    step: int
    ref: str
    alias: str
    promoted: bool
    codes: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    note: str | None = None


@dataclass(frozen=True, slots=True)
class PublishTrouble:
    """An export could not be published for now and is tried again, and those of later steps wait behind it. Told at its first
    failed attempt, when the reason changes, and at attempts 2, 4, 8, ..."""

    step: int
    reason: str
    error: str
    attempts: int


@dataclass(frozen=True, slots=True)
class PublishRefused:
    """An export that will never be a version as it is: the contract's own `reason`, or `gone`."""

    step: int
    reason: str
    error: str


@dataclass(frozen=True, slots=True)
class Unpublished:
    """What the publisher left when it was closed. The export stays where it is, and a scan finds it."""

    step: int
    folder: str
    reason: str
