"""The JSON of the commands: one function a shape. adapters/README.md documents them, a test holds them; keys are only added."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from adapters.cli.shares import weights_of
from adapters.names import PRODUCTION, AdapterRef
from adapters.registry import aliases
from adapters.types import AdapterEntry, Head, HistoryRow, Manifest, PendingMove

CANARY = "canary"

LIVE = "live"
READY = "ready"
RETIRED = "retired"
COLLECTED = "collected"


def head_data(head: Head) -> dict[str, Any]:
    """Where an adapter's aliases stand: the answer of everything that moves one."""
    return {
        "base": head.base,
        "name": head.name,
        "revision": head.revision,
        "aliases": dict(sorted(head.aliases.items())),
        "weights": {alias: _numbered(weights) for alias, weights in sorted(head.weights.items())},
        "protected": sorted(head.protected),
        "retired": sorted(head.retired),
        "directives": [asdict(directive) for directive in head.directives],
        "pending": {alias: move_data(move) for alias, move in sorted(head.pending.items())},
    }


def adapter_data(entry: AdapterEntry) -> dict[str, Any]:
    """An adapter in a list."""
    versions = [
        {
            "version": number,
            "rank": version.rank,
            "size_bytes": version.size_bytes,
            "created_at": version.created_at,
            "digest": version.digest,
            "retired": version.retired,
            "collected": version.collected,
            "tags": version.tags,
        }
        for number, version in sorted(entry.versions.items())
    ]
    return {
        "base": entry.base,
        "name": entry.name,
        "revision": entry.revision,
        "production": entry.production,
        "latest": entry.latest,
        "aliases": dict(sorted(entry.aliases.items())),
        "weights": {alias: _numbered(weights) for alias, weights in sorted(entry.weights.items())},
        "versions": versions,
    }


def move_data(move: PendingMove) -> dict[str, Any]:
    names = ("id", "version", "min_ready", "deadline", "at", "who", "message")
    return {name: getattr(move, name) for name in names} | {"taken": move.taken_by is not None}


def manifest_data(manifest: Manifest) -> dict[str, Any]:
    """A version as it was published."""
    return {
        "ref": str(manifest.ref),
        "version": manifest.ref.version,
        "digest": manifest.digest,
        "size_bytes": manifest.size_bytes,
        "files": [asdict(file) for file in manifest.files],
        "rank": manifest.rank,
        "alpha": manifest.alpha,
        "modules": list(manifest.modules),
        "num_modules": manifest.num_modules,
        "base_fingerprint": manifest.base_fingerprint,
        "created_at": manifest.created_at,
        "who": manifest.who,
        "message": manifest.message,
        "source": manifest.source,
        "metrics": manifest.metrics,
        "rules": [asdict(rule) for rule in manifest.rules],
        "warnings": list(manifest.warnings),
    }


def version_data(manifest: Manifest, head: Head) -> dict[str, Any]:
    """A version with what has happened to it since."""
    number = manifest.ref.version
    now = {"state": state(head, number), "aliases": head.aliases_of(number), "tags": head.tags.get(number, {})}
    return manifest_data(manifest) | now


def row_data(row: HistoryRow) -> dict[str, Any]:
    return {
        "at": row.at,
        "kind": row.kind,
        "alias": row.alias,
        "from_version": row.from_version,
        "to_version": row.to_version,
        "weights": _numbered(row.weights) if row.weights else None,
        "who": row.who,
        "message": row.message,
    }


def state(head: Head, version: int) -> str:
    """One word. `live` is what production names, `canary` has a share of an alias or is named by `canary`, `ready` waits."""
    if version in head.collected:
        return COLLECTED
    if version in head.retired:
        return RETIRED
    if head.aliases.get(PRODUCTION) == version:
        return LIVE
    shared = any(version in weights for weights in head.weights.values())
    return CANARY if shared or head.aliases.get(CANARY) == version else READY


def since(head: Head, alias: str) -> HistoryRow | None:
    """The row that made the alias what it is."""
    return aliases.live_at(head, alias, "9999")


def alias_data(head: Head, alias: str) -> dict[str, Any]:
    """One alias: what it names, how it shares, since when, who moved it and why."""
    row = since(head, alias)
    return {
        "version": head.aliases.get(alias),
        "weights": _numbered(weights_of(head, alias)),
        "protected": alias in head.protected,
        "since": row.at if row else None,
        "who": row.who if row else None,
        "message": row.message if row else None,
    }


def ref_of(head: Head, version: int) -> str:
    return str(AdapterRef(head.base, head.name, version))


def _numbered(weights: dict[int, int]) -> dict[str, int]:
    return {str(version): weight for version, weight in sorted(weights.items())}
