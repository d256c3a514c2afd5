"""Times as the registry's documents hold them: ISO 8601 in UTC with microseconds, so that their texts sort as they do."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def unix_s(at: str) -> float:
    return datetime.fromisoformat(at).timestamp()
