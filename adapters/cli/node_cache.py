"""`loramux cache`: what lies in this node's cache, whether it is whole, and making room in it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from adapters.cli import times
from adapters.cli.filters import parse_size
from adapters.cli.options import AsJson, Config, Quiet, Yes
from adapters.cli.output import Line, fail, progress_bar, show, size, table
from adapters.cli.program import UPKEEP, app
from adapters.cli.work import read_cache_settings, read_view, usage
from adapters.errors import LoraMuxError
from adapters.names import AdapterRef
from adapters.settings import CacheSettings
from adapters.types import FileDigest, content_digest


class Action(StrEnum):
    LS = "ls"
    VERIFY = "verify"
    PRUNE = "prune"


@app.command(rich_help_panel=UPKEEP, epilog="Example: loramux cache prune --unused 7d --yes")
def cache(
    action: Annotated[Action, typer.Argument(help="ls shows, verify hashes every file, prune makes room.")] = Action.LS,
    unused: Annotated[str | None, typer.Option(help="prune: what nobody used for so long, `7d`.")] = None,
    to: Annotated[str | None, typer.Option(help="prune: down to this size, least recently used first, `10GB`.")] = None,
    yes: Yes = False,
    quiet: Quiet = False,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """This node's cache of adapter files. Only with --yes something is removed, and never what is in use."""
    from adapters.cache.folder import CacheFolder

    unused_s = usage(lambda: times.duration_s(unused)) if unused else None
    to_bytes = usage(lambda: parse_size(to)) if to else None
    if action is Action.PRUNE and unused is None and to is None:
        raise typer.BadParameter("prune what? --unused 7d, --to 10GB, or both")
    try:
        settings = read_cache_settings(config)
        rows = _rows(settings, config)
        folder = CacheFolder(settings.dir, settings.budget_bytes) if rows else None
    except LoraMuxError as error:
        fail(error, as_json)
    if action is Action.VERIFY:
        _verify(settings.dir, rows, not as_json)
    doomed = {Action.LS: [], Action.VERIFY: [row for row in rows if row["damaged"]]}.get(action)
    if doomed is None:
        doomed = to_prune(rows, unused_s, to_bytes)
    for row in rows:
        row["removed"] = bool(yes and row in doomed and folder and folder.remove(row["digest"]))
    used = sum(row["size_bytes"] for row in rows)
    data = {"dir": str(settings.dir), "budget_bytes": settings.budget_bytes, "used_bytes": used, "entries": rows}
    data |= {"chosen": [row["digest"] for row in doomed], "bytes_freed": sum(row["size_bytes"] for row in rows if row["removed"])}
    show(as_json, data, *([row["digest"] for row in rows] if quiet else _lines(action, rows, doomed, settings, yes)))
    sys.exit(1 if action is Action.VERIFY and any(not row["removed"] for row in doomed) else 0)


def to_prune(rows: list[dict[str, Any]], unused_s: float | None, to_bytes: float | None) -> list[dict[str, Any]]:
    """What goes: all that is unused for longer, then the least recently used until the rest fits."""
    oldest_first = sorted(rows, key=lambda row: (-row["unused_s"], row["digest"]))
    chosen = [row for row in oldest_first if unused_s is not None and row["unused_s"] > unused_s]
    left = sum(row["size_bytes"] for row in rows) - sum(row["size_bytes"] for row in chosen)
    for row in oldest_first:
        if to_bytes is not None and left > to_bytes and row not in chosen:
            chosen.append(row)
            left -= row["size_bytes"]
    return chosen


def _rows(settings: CacheSettings, config: Path | None) -> list[dict[str, Any]]:
    from adapters.cache.folder import CacheFolder

    if not settings.dir.is_dir():
        return []
    now_s = times.utc_now().timestamp()
    entries = CacheFolder(settings.dir, settings.budget_bytes).entries()
    known = _known(config) if entries else {}
    return [
        {
            "digest": entry.digest,
            "size_bytes": entry.size_bytes,
            "unused_s": max(0.0, round(now_s - entry.last_used, 1)),
            "refs": known.get(entry.digest, []),
            "damaged": None,
        }
        for entry in sorted(entries, key=lambda entry: (-entry.last_used, entry.digest))
    ]


def _known(config: Path | None) -> dict[str, list[str]]:
    """Digest to refs; nothing while the registry can't be read, for the cache is there all the same."""
    import asyncio

    from adapters.registry import Registry
    from adapters.settings import read_registry_settings
    from adapters.store import open_store

    async def look() -> dict[str, list[str]]:
        settings = read_registry_settings(config).model_copy(update={"retry_timeout_s": 0.0})
        found: dict[str, list[str]] = {}
        for entry in (await read_view(Registry(open_store(settings)))).adapters():
            for number, version in entry.versions.items():
                found.setdefault(version.digest, []).append(str(AdapterRef(entry.base, entry.name, number)))
        return found

    try:
        return asyncio.run(look())
    except LoraMuxError:
        return {}


def _verify(root: Path, rows: list[dict[str, Any]], bar: bool) -> None:
    total, done = sum(row["size_bytes"] for row in rows), 0
    with progress_bar("hashing", bar) as progress:
        for row in rows:
            row["damaged"] = not is_whole(root / row["digest"])
            done += row["size_bytes"]
            if progress:
                progress(done, total)


def is_whole(folder: Path) -> bool:
    """Whether the files make the digest that the folder is named by. One that is gone meanwhile is nobody's trouble."""
    try:
        files = tuple(_digest(path) for path in sorted(folder.iterdir()))
    except FileNotFoundError:
        return True
    return content_digest(files) == folder.name


def _digest(path: Path) -> FileDigest:
    with path.open("rb") as file:
        return FileDigest(path.name, path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _lines(
    action: Action, rows: list[dict[str, Any]], doomed: list[dict[str, Any]], settings: CacheSettings, yes: bool
) -> Iterable[Line]:
    shown = doomed if action is Action.PRUNE else rows
    if shown:
        cells = [(row["digest"][:12], size(row["size_bytes"]), times.span(row["unused_s"]), _what(row)) for row in shown]
        yield from table(["DIGEST", "SIZE", "UNUSED", "ADAPTER"], cells)
    used = sum(row["size_bytes"] for row in rows)
    yield f"{len(rows)} adapters, {size(used)} of {size(settings.budget_bytes)}"
    if not doomed:
        yield {Action.LS: "next: loramux cache verify", Action.VERIFY: "all whole", Action.PRUNE: "nothing to remove"}[action]
    elif yes:
        gone = [row for row in doomed if row["removed"]]
        in_use = f", {len(doomed) - len(gone)} in use stay" if len(gone) < len(doomed) else ""
        yield f"removed: {len(gone)} adapters, {size(sum(row['size_bytes'] for row in gone))}{in_use}"
    else:
        yield f"{len(doomed)} would go ({size(sum(row['size_bytes'] for row in doomed))}); next: the same command with --yes"


def _what(row: dict[str, Any]) -> str:
    refs = ", ".join(row["refs"]) or "-"
    return f"DAMAGED {refs}" if row["damaged"] else refs
