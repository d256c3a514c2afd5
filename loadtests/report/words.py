"""Figures as a reader sees them: digits that count, units, intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadtests.analysis.summary import Estimate, Spread

NOTHING = "–"
LATE = "†"
MIB = 2**20


def number(value: float | None) -> str:
    """Three digits that count; whole from 100 on."""
    if value is None:
        return NOTHING
    size = abs(value)
    if not size:
        return "0"
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 3
    return f"{value:,.{digits}f}".replace(",", " ")


def given(value: float) -> str:
    """As somebody wrote it: 4, not 4.00."""
    return f"{value:,g}".replace(",", " ") if abs(value) < 1e6 else number(value)


def figure(value: float | None) -> str:
    """A figure that may be a count: 1, not 1.00."""
    return given(value) if value is not None and value == round(value) else number(value)


def estimate(found: Estimate | None) -> str:
    """The value, and its interval in brackets."""
    if found is None:
        return NOTHING
    if found.low is None or found.high is None:
        return number(found.value)
    return f"{number(found.value)} ({number(found.low)}–{number(found.high)})"


def p50(found: Spread | None) -> str:
    return NOTHING if found is None else number(found.p50.value)


def share(value: float | None) -> str:
    """In per cent; never 0 % or 100 % for what is merely near."""
    if value is None:
        return NOTHING
    if 0 < value < 0.001 or 0.999 < value < 1:
        return f"{value:.2%}".replace("%", " %")
    return f"{value * 100:.0f} %" if value in (0, 1) else f"{value * 100:.1f} %"


def size(value: float | None) -> str:
    """Bytes, in decimal units."""
    if value is None:
        return NOTHING
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= least:
            return f"{number(value / least)} {unit}"
    return f"{number(value)} B"


def mib(value: float) -> str:
    return f"{number(value / MIB)} MiB"


def places(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"


def plain(value: Any) -> str:
    """A value of the environment or of a scenario, nested ones in one line."""
    if isinstance(value, Mapping):
        return ", ".join(" ".join(named(str(key), one)) for key, one in value.items() if one is not None)
    if isinstance(value, list | tuple):
        return ", ".join(plain(one) for one in value)
    if value is None:
        return NOTHING
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def named(key: str, value: Any) -> tuple[str, str]:
    """A value beside its name; sizes with their unit."""
    if key.endswith("_bytes") and isinstance(value, int):
        return key.removesuffix("_bytes"), size(value)
    return key, plain(value)
