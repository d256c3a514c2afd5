"""`loramux ps`: what is loaded where, who uses it, and what could not be loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from adapters.cli.gateway import Gateway as Door
from adapters.cli.gateway import find_gateway, lower_of
from adapters.cli.options import AsJson, Config, Gateway, Quiet
from adapters.cli.output import Line, fail, show, size, table, warn
from adapters.cli.program import PLACES, app
from adapters.errors import LoraMuxError
from adapters.names import AdapterRef

READY, LOADING, FAILED = "ready", "loading", "failed"
STYLES = {READY: "", LOADING: "yellow", FAILED: "red"}
ANSWER_WITHIN_S = 10.0


@app.command(rich_help_panel=PLACES, epilog="Example: loramux ps --gateway http://127.0.0.1:8000")
def ps(gateway: Gateway = None, quiet: Quiet = False, config: Config = None, as_json: AsJson = False) -> None:
    """What is loaded where, who uses it now, what is pinned, and what could not be loaded."""
    door = find_gateway(gateway, config, ANSWER_WITHIN_S)
    try:
        seen = door.residency()
        rows = loaded(seen)
        known = {name: _known(door, *name) for name in {(row["base"], row["name"]) for row in rows}} if not quiet else {}
    except LoraMuxError as error:
        fail(error, as_json)
    for row in rows:
        row |= _facts(known.get((row["base"], row["name"])), row["version"], row["size_bytes"])
    if quiet:
        return show(False, None, *(row["ref"] for row in rows))
    bases = {base: _summary(view) for base, view in seen.items()}
    return show(as_json, {"bases": bases, "loaded": rows}, *_table(rows, bases), *map(_line, bases, bases.values()))


def loaded(residency: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each version that is somewhere, by ref. `tier` is the best one, `replicas` how many have it there."""
    rows = [_row(ref, held) for view in residency.values() for ref, held in _held(view).items()]
    return sorted(rows, key=lambda row: (row["base"], row["name"], row["version"]))


def _held(view: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """By ref: what each replica says of it; from a gateway that does not tell replicas apart, one row."""
    held: dict[str, list[dict[str, Any]]] = {}
    for report in view.get("replicas", ()):
        for ref, row in report.get("adapters", {}).items():
            held.setdefault(ref, []).append(row)
    if "replicas" not in view:
        for ref, users in view.get("resident", {}).items():
            held[ref] = [{"tier": "engine", "users": users, "state": READY}]
    return held


def _row(ref: str, held: list[dict[str, Any]]) -> dict[str, Any]:
    parsed = AdapterRef.parse(ref)
    tier = lower_of(row["tier"] for row in held)
    states = {row.get("state", READY) for row in held}
    return {
        "ref": ref,
        "base": parsed.base,
        "name": parsed.name,
        "version": parsed.version,
        "tier": tier,
        "replicas": sum(row["tier"] == tier for row in held),
        "pinned": any(row.get("pinned") for row in held),
        "uses": sum(row.get("users", 0) for row in held),
        "state": next(state for state in (FAILED, LOADING, READY) if state in states),
        "reason": next((row["reason"] for row in held if row.get("reason")), None),
        "size_bytes": next((row["size_bytes"] for row in held if row.get("size_bytes")), None),
    }


def _summary(view: dict[str, Any]) -> dict[str, Any]:
    replicas = view.get("replicas")
    return {
        "requests": view.get("requests"),
        "loaded": len(view.get("resident", {})),
        "replicas": None if replicas is None else len(replicas),
        "silent": sum(report.get("replica") is None for report in replicas or ()),
        "slots": view.get("slots"),
    }


def _line(base: str, facts: dict[str, Any]) -> str:
    where = f"; {facts['replicas']} replicas of {facts['slots']} slots" if facts["replicas"] is not None else ""
    silent = f", {facts['silent']} of them silent" if facts["silent"] else ""
    return f"{base}: {facts['loaded']} loaded, {facts['requests']} answers under way{where}{silent}"


def _table(rows: list[dict[str, Any]], bases: dict[str, dict[str, Any]]) -> list[Text]:
    header = ["REF", "TIER", "REPLICAS", "PINNED", "USES", "STATE", "SIZE", "ALIASES"]
    troubled = any(row["reason"] for row in rows)
    cells = [[*_cells(row, bases[row["base"]]["replicas"]), *([row["reason"] or ""] if troubled else [])] for row in rows]
    return table([*header, *(["REASON"] if troubled else [])], cells)


def _cells(row: dict[str, Any], live: int | None) -> Iterator[Line]:
    yield row["ref"]
    yield row["tier"]
    yield f"{row['replicas']}/{live}" if live is not None else str(row["replicas"])
    yield "yes" if row["pinned"] else "-"
    yield str(row["uses"])
    yield Text(row["state"], style=STYLES[row["state"]])
    yield size(row["size_bytes"]) if row["size_bytes"] is not None else "-"
    yield ", ".join(row["aliases"]) or "-"


def _known(door: Door, base: str, name: str) -> dict[str, Any] | None:
    try:
        return door.get("/registry/v1/versions", base=base, name=name)
    except LoraMuxError as error:
        warn(f"{base}:{name}: {error.message}")
        return None


def _facts(adapter: dict[str, Any] | None, version: int, size_bytes: int | None) -> dict[str, Any]:
    """Size and aliases of a version, out of what the gateway knows of its adapter."""
    if adapter is None:
        return {"size_bytes": size_bytes, "aliases": []}
    sizes = {row["version"]: row["size_bytes"] for row in adapter["versions"]}
    shares = adapter.get("weights", {})
    names = {alias for alias, named in adapter["aliases"].items() if named == version}
    names |= {alias for alias, weights in shares.items() if str(version) in weights}
    return {"size_bytes": size_bytes or sizes.get(version), "aliases": sorted(names)}
