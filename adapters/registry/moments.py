"""Times as the registry's documents hold them: ISO 8601 in UTC with microseconds, so that their texts sort as they do."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> str:
    return _text(datetime.now(UTC))


def unix_s(at: str) -> float:
    return datetime.fromisoformat(at).timestamp()


def at_unix(at_s: float) -> str:
    """The inverse of `unix_s`. Raises OverflowError and ValueError for times that no calendar has."""
    return _text(datetime.fromtimestamp(at_s, UTC))


def normal(at: str) -> str:
    """Any ISO 8601 time with a zone as the documents hold it. Raises ValueError, OverflowError."""
    moment = datetime.fromisoformat(at)
    if moment.tzinfo is None:
        raise ValueError("a time needs a zone")
    return _text(moment.astimezone(UTC))


def _text(moment: datetime) -> str:
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
