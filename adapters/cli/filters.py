"""Which adapters `loramux list` shows, and in which order: globs, and expressions such as `size>1GB rank>=16 age<7d`. Pure."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from adapters.cli.times import duration_s, seconds_since
from adapters.errors import InvalidRequest
from adapters.types import AdapterEntry, VersionEntry

COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}
SIZES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
FIELDS = ("size", "rank", "age", "versions", "newest", "production")

_EXPRESSION = re.compile(r"([a-z]+)(>=|<=|!=|>|<|=)(.+)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


@dataclass(frozen=True, slots=True)
class Filter:
    """One expression: a field of an adapter against a value (bytes, seconds or a whole number)."""

    field: str
    compare: str
    value: float

    def lets_pass(self, entry: AdapterEntry, now: datetime) -> bool:
        found = field_of(entry, self.field, now)
        return found is not None and COMPARE[self.compare](found, self.value)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to show. All that is set must hold; `globs` are one of several. `tags` maps to a value, or None for any."""

    base: str | None = None
    globs: tuple[str, ...] = ()
    filters: tuple[Filter, ...] = ()
    tags: tuple[tuple[str, str | None], ...] = ()
    alias: str | None = None

    def lets_pass(self, entry: AdapterEntry, now: datetime) -> bool:
        return (
            self.base in (None, entry.base)
            and (not self.globs or any(_fits(entry, glob) for glob in self.globs))
            and (self.alias is None or entry.version_of(self.alias) is not None)
            and all(_has_tag(entry, key, value) for key, value in self.tags)
            and all(one.lets_pass(entry, now) for one in self.filters)
        )


def wanted(words: Iterable[str], *, base: str | None = None, tags: Iterable[str] = (), alias: str | None = None) -> Wanted:
    """The words of a command line: what holds a comparison is an expression, the rest are globs. Raises InvalidRequest."""
    parts = [part for word in words for part in word.split()]
    expressions = [part for part in parts if re.search("[<>=!]", part)]
    return Wanted(
        base,
        tuple(part for part in parts if part not in expressions),
        tuple(parse_filter(part) for part in expressions),
        tuple(_tag(text) for text in tags),
        alias,
    )


def parse_filter(text: str) -> Filter:
    """Raises InvalidRequest."""
    found = _EXPRESSION.fullmatch(text)
    if found is None or found[1] not in FIELDS:
        raise InvalidRequest(
            f"`{text[:60]}` is no filter",
            hint=f"write a field ({', '.join(FIELDS)}), one of {' '.join(COMPARE)} and a value: `size>1GB`, `rank>=16`, `age<7d`",
        )
    field, compare, value = found.groups()
    return Filter(field, compare, _value(field, value))


def field_of(entry: AdapterEntry, field: str, now: datetime) -> float | None:
    """Of the newest version where it is a version's: bytes, rank, seconds since its publication."""
    newest = newest_of(entry)
    values: dict[str, float | None] = {
        "size": newest.size_bytes,
        "rank": newest.rank,
        "age": seconds_since(newest.created_at, now),
        "versions": len(entry.versions),
        "newest": newest.version,
        "production": entry.production,
    }
    return values[field]


def newest_of(entry: AdapterEntry) -> VersionEntry:
    """The newest version that is not retired, or else the newest."""
    return entry.versions[entry.latest or max(entry.versions)]


def ordered(entries: Iterable[AdapterEntry], sort: str, now: datetime) -> list[AdapterEntry]:
    """By name, or by a field: the largest first, the youngest first for `age`; `-` before it turns that round.

    Raises InvalidRequest.
    """
    field, backwards = sort.removeprefix("-"), sort.startswith("-")
    rows = sorted(entries, key=lambda entry: (entry.base, entry.name))
    if field == "name":
        return rows[::-1] if backwards else rows
    if field not in FIELDS:
        raise InvalidRequest(f"`{sort[:40]}` is nothing to sort by", hint=f"name, {', '.join(FIELDS)}, with `-` to turn round")
    largest_first = (field != "age") != backwards
    return sorted(rows, key=lambda entry: field_of(entry, field, now) or 0, reverse=largest_first)


def nothing_fits(words: Sequence[str]) -> str:
    return f"no adapter fits {' '.join(words)}" if words else "no adapter fits"


def parse_size(text: str) -> float:
    """`500MB`, `1.5GB`, `2GiB` or a number, in bytes. Raises InvalidRequest."""
    return _value("size", text)


def _value(field: str, text: str) -> float:
    if field == "age":
        return duration_s(text)
    found = _SIZE.fullmatch(text.strip().lower())
    unit = found[2] if found else None
    if found is None or unit not in SIZES or (field != "size" and unit):
        takes = "`500MB`, `1.5GB` or `2GiB`" if field == "size" else "a number"
        raise InvalidRequest(f"`{text[:40]}` is no value for `{field}`", hint=f"write {takes}")
    return float(found[1]) * SIZES[unit]


def _fits(entry: AdapterEntry, glob: str) -> bool:
    return fnmatch.fnmatchcase(f"{entry.base}:{entry.name}" if ":" in glob else entry.name, glob)


def _has_tag(entry: AdapterEntry, key: str, value: str | None) -> bool:
    found = [version.tags[key] for version in entry.versions.values() if key in version.tags]
    return bool(found) if value is None else value in found


def _tag(text: str) -> tuple[str, str | None]:
    key, equals, value = text.partition("=")
    return key, value if equals else None
