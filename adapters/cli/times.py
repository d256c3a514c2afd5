"""Times as people write and read them. Pure functions; a moment is what the registry writes: ISO 8601, UTC, microseconds."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from adapters.errors import InvalidRequest

UNITS_S = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|m|min|h|d|w)")
_STEPS = (
    (86400.0 * 14, 604800.0, "w"),
    (86400.0 * 2, 86400.0, "d"),
    (7200.0, 3600.0, "h"),
    (120.0, 60.0, "min"),
    (0.0, 1.0, "s"),
)
_TAKES = "a date, a time (`2026-11-01T12:00`, UTC unless it says otherwise) or `2h ago`"


def duration_s(text: str) -> float:
    """`90s`, `15min`, `2h`, `7d`, `1.5w` in seconds. Raises InvalidRequest."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise InvalidRequest(f"`{text[:40]}` is no duration", hint="write `90s`, `15min`, `2h`, `7d` or `1w`")
    return float(found[1]) * UNITS_S[found[2]]


def moment(text: str, now: datetime) -> str:
    """What somebody wrote as a time; a date means its first moment. Raises InvalidRequest."""
    words = text.strip()
    if words == "now":
        return stamp(now)
    if _DURATION.fullmatch(words.removesuffix("ago").strip()):
        return stamp(now - timedelta(seconds=duration_s(words.removesuffix("ago"))))
    try:
        at = datetime.fromisoformat(words)
    except ValueError:
        raise InvalidRequest(f"`{text[:40]}` is no time; {_TAKES} is taken", param="at") from None
    return stamp(at if at.tzinfo else at.replace(tzinfo=UTC))


def ahead(text: str, now: datetime) -> str:
    """What somebody wrote as a time to come: `2h` is in two hours. Raises InvalidRequest."""
    if _DURATION.fullmatch(text.strip()):
        return stamp(now + timedelta(seconds=duration_s(text)))
    return moment(text, now)


def stamp(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def seconds_since(at: str, now: datetime) -> float:
    """Never below 0: clocks of two machines differ."""
    return max(0.0, (now - datetime.fromisoformat(at)).total_seconds())


def span(seconds: float) -> str:
    """`12 s`, `5 min`, `3 h`, `9 d`, `6 w`: one number, rounded down."""
    for from_s, unit_s, unit in _STEPS:
        if seconds >= from_s:
            return f"{int(seconds / unit_s)} {unit}"
    return "0 s"


def age(at: str, now: datetime) -> str:
    return span(seconds_since(at, now))


def short(at: str) -> str:
    """To the second, for lines that people read."""
    return datetime.fromisoformat(at).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def utc_now() -> datetime:
    return datetime.now(UTC)
