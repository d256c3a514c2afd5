"""How far replicas are with a pending move: what they report of themselves, counted. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from adapters.names import AdapterRef
from adapters.types import AdapterEntry, Head, PendingMove


@dataclass(frozen=True, slots=True)
class Standing:
    """How far the live replicas of a base are with a move; `failure` is why one of them could not load the version, `silent` how
    many did not say in time what they hold."""

    ready: int
    holders_of_old: int
    live: int
    failure: str | None
    silent: int = 0


def standing(replicas: Iterable[Mapping[str, Any]], adapter: AdapterEntry | Head, move: PendingMove) -> Standing:
    """`replicas` are the rows of a residency (gateway/README.md). Only a failure that belongs to this very move counts: an older
    one may have been mended."""
    new = _ref(adapter, move.version)
    named = {adapter.aliases.get(move.alias), *adapter.weights.get(move.alias, {})} - {None, move.version}
    olds = {_ref(adapter, version) for version in named}
    reports = list(replicas)
    held = [report.get("adapters", {}) for report in reports]
    rows = [adapters[new] for adapters in held if new in adapters]
    failures = (row.get("reason") or "load_failed" for row in rows if row["state"] == "failed" and row.get("move_id") == move.id)
    return Standing(
        ready=sum(map(_in_engine, rows)),
        holders_of_old=sum(any(_in_engine(adapters[old]) for old in olds & adapters.keys()) for adapters in held),
        live=len(held),
        failure=next(failures, None),
        silent=sum(report.get("replica") is None for report in reports),
    )


def _ref(adapter: AdapterEntry | Head, version: int) -> str:
    return str(AdapterRef(adapter.base, adapter.name, version))


def _in_engine(row: Mapping[str, Any]) -> bool:
    return row["tier"] == "engine" and row["state"] == "ready"
