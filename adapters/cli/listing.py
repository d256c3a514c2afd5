"""Commands that look at adapters: list, show, history."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from adapters.cli import filters, shapes, times
from adapters.cli.completion import complete_alias
from adapters.cli.gateway import answering
from adapters.cli.options import AsJson, Base, Config, Gateway, Name, Quiet
from adapters.cli.output import Line, show, size, table
from adapters.cli.program import VERSIONS, app
from adapters.cli.shares import percentages, shown, weights_of
from adapters.cli.work import find_name, find_ref, read_view, run, usage
from adapters.names import PRODUCTION, AdapterRef
from adapters.registry import aliases
from adapters.types import AdapterEntry, Directive, Head, HistoryRow, Manifest

READS_AT_ONCE = 16
MARKS = {"live": "green", "canary": "yellow", "retired": "dim", "collected": "dim"}


@app.command("list", rich_help_panel=VERSIONS, epilog="Example: loramux list 'team/*' 'size>1MB rank>=16 age<7d' --sort size")
def list_adapters(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|FILTER]...", help="Globs of names; filters on size, rank, age, versions, newest, production."
        ),
    ] = None,
    base: Base = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="Only with this tag on a version: `k=v` or `k`.")] = None,
    alias: Annotated[
        str | None, typer.Option("--alias", help="Only where this alias names a version.", autocompletion=complete_alias)
    ] = None,
    sort: Annotated[
        str, typer.Option(help="name, size, rank, age, versions, newest or production; `-` turns it round.")
    ] = "name",
    limit: Annotated[int | None, typer.Option(min=1, help="Show that many at most.")] = None,
    gateway: Gateway = None,
    quiet: Quiet = False,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """List adapters: what is live, what is tried, how big, how old."""
    now = times.utc_now()
    wanted = usage(lambda: filters.wanted(words or (), base=base, tags=tag or (), alias=alias))
    usage(lambda: filters.ordered((), sort, now))

    async def work(registry: Any) -> list[AdapterEntry]:
        return list((await read_view(registry)).adapters())

    there = run(config, work, as_json)
    fitting = filters.ordered((entry for entry in there if wanted.lets_pass(entry, now)), sort, now)
    entries = fitting[:limit]
    tiers = answering(gateway, config, as_json) if not quiet else None
    if as_json:
        rows = [shapes.adapter_data(entry) | _tier_data(entry, tiers) for entry in entries]
        return show(True, {"adapters": rows, "total": len(fitting)})
    show(False, None, *_listed(entries, there, words, now, tiers, quiet))
    if len(entries) < len(fitting) and not quiet:
        show(False, None, f"{len(entries)} of {len(fitting)}; --limit shows more")


def _listed(
    entries: list[AdapterEntry],
    there: list[AdapterEntry],
    words: list[str] | None,
    now: datetime,
    tiers: dict[str, str] | None,
    quiet: bool,
) -> list[Line]:
    if quiet:
        return [f"{entry.base}:{entry.name}" for entry in entries]
    if not there:
        return ["no adapters yet; next: loramux publish FOLDER --name NAME --base BASE --promote"]
    if not entries:
        return [filters.nothing_fits(words or ())]
    header = ["ADAPTER", "PRODUCTION", "CANARY", "NEWEST", "VERSIONS", "RANK", "SIZE", "AGE"]
    rows = [[*_cells(entry, now), *([_tier(entry, tiers)] if tiers is not None else [])] for entry in entries]
    return list(table([*header, *(["TIER"] if tiers is not None else [])], rows))


def _cells(entry: AdapterEntry, now: datetime) -> list[Line]:
    newest = filters.newest_of(entry)
    return [
        f"{entry.base}:{entry.name}",
        Text(str(entry.production or "-"), style="green" if entry.production else ""),
        Text(_canary(entry), style="yellow"),
        str(newest.version),
        str(len(entry.versions)),
        str(newest.rank),
        size(newest.size_bytes),
        times.age(newest.created_at, now),
    ]


def _canary(entry: AdapterEntry) -> str:
    """`8 (10%)` for a share of production, else the version that `canary` names."""
    shares = percentages(entry.weights.get(PRODUCTION, {}))
    tried = [f"{version} ({shown(part)})" for version, part in shares.items() if version != entry.production]
    return ", ".join(tried) or str(entry.aliases.get(shapes.CANARY, "-"))


def _tier(entry: AdapterEntry, tiers: dict[str, str]) -> str:
    """Where production is; without one, where the newest version is."""
    version = entry.production or filters.newest_of(entry).version
    return tiers.get(str(AdapterRef(entry.base, entry.name, version)), "remote")


def _tier_data(entry: AdapterEntry, tiers: dict[str, str] | None) -> dict[str, Any]:
    return {} if tiers is None else {"tier": _tier(entry, tiers)}


# One adapter


@app.command("show", rich_help_panel=VERSIONS, epilog="Example: loramux show parrot")
def show_adapter(
    name: Name,
    base: Base = None,
    history: Annotated[int, typer.Option(min=0, help="Rows of the history to show.")] = 10,
    quiet: Quiet = False,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Show one adapter, or with `@` one version: aliases with weights, metrics, tags, who moved what."""

    async def work(registry: Any) -> tuple[Head, list[Manifest]]:
        if "@" in name:
            ref = await find_ref(registry, name, base)
            return await registry.head(ref.base, ref.name), [await registry.manifest(ref)]
        where = await find_name(registry, name, base)
        head = await registry.head(where.base, where.adapter)
        return head, await _manifests(registry, head)

    head, manifests = run(config, work, as_json)
    if quiet:
        return show(False, None, *(str(manifest.ref) for manifest in manifests))
    data = shapes.head_data(head) | {
        "alias_details": {alias: shapes.alias_data(head, alias) for alias in sorted(head.aliases)},
        "versions": [shapes.version_data(manifest, head) for manifest in manifests],
        "history": [shapes.row_data(row) for row in reversed(head.history)],
    }
    show(as_json, data, *_adapter_lines(head, manifests, history))


def _adapter_lines(head: Head, manifests: list[Manifest], rows: int) -> list[Line | None]:
    now = times.utc_now()
    versions = [_version_cells(manifest, head, now) for manifest in reversed(manifests)]
    header = ["VERSION", "STATE", "ALIASES", "RANK", "SIZE", "DIGEST", "AGE", "BY", "MESSAGE"]
    past = [_history_cells(row, now) for row in head.history[::-1][:rows]]
    return [
        Text.assemble((f"{head.base}:{head.name}", "bold"), f"  revision {head.revision}"),
        *(_indented(table(["ALIAS", "VERSION", "SINCE", "BY", "MESSAGE"], _alias_rows(head, now))) if head.aliases else ()),
        *_waiting(head),
        *_directed(head, now),
        "",
        *_indented(table(header, versions)),
        *_details(head, manifests),
        *(("", *_indented(table(HISTORY_HEADER, past))) if past else ()),
    ]


def _waiting(head: Head) -> list[Line]:
    """The moves that wait until their version is warm."""
    return [
        Text(f"  {alias} waits until version {move.version} is warm, at most until {times.short(move.deadline)}", style="yellow")
        for alias, move in sorted(head.pending.items())
    ]


def _directed(head: Head, now: datetime) -> list[Line]:
    """What replicas are asked to keep or to bring."""
    if not head.directives:
        return []
    rows = [
        [
            "pin" if asked.pin else "prewarm",
            asked.target,
            asked.tier,
            str(asked.replicas or "all"),
            _window(asked),
            f"{times.age(asked.at, now)} ago",
            asked.who or "",
            asked.message or "",
        ]
        for asked in head.directives
    ]
    return ["", *_indented(table(["ASKED", "TARGET", "TIER", "REPLICAS", "WHEN", "SINCE", "BY", "MESSAGE"], rows))]


def _window(asked: Directive) -> str:
    start = f"from {times.short(asked.start)}" if asked.start else ""
    until = f"until {times.short(asked.until)}" if asked.until else ""
    every = f"every {times.span(asked.every_s)}" if asked.every_s else ""
    return " ".join(filter(None, (start, until, every))) or "always"


def _alias_rows(head: Head, now: datetime) -> list[list[Line]]:
    rows: list[list[Line]] = []
    for alias in sorted(head.aliases):
        row = shapes.since(head, alias)
        label = Text(alias) + Text(" (protected)" if alias in head.protected else "", style="yellow")
        moved = (f"{times.age(row.at, now)} ago", row.who or "", row.message or "") if row else ("", "", "")
        rows.append([label, _shares(head, alias), *moved])
    return rows


def _shares(head: Head, alias: str) -> str:
    """`2`, or `1 (90%), 2 (10%)`."""
    weights = weights_of(head, alias)
    if len(weights) < 2:
        return str(head.aliases[alias])
    return ", ".join(f"{version} ({shown(part)})" for version, part in percentages(weights).items())


def _version_cells(manifest: Manifest, head: Head, now: datetime) -> list[Line]:
    number = manifest.ref.version
    state = shapes.state(head, number)
    return [
        str(number),
        Text(state, style=MARKS.get(state, "")),
        ", ".join(head.aliases_of(number)) or "-",
        str(manifest.rank),
        size(manifest.size_bytes),
        manifest.digest[:12],
        times.age(manifest.created_at, now),
        manifest.who or "",
        manifest.message or "",
    ]


def _details(head: Head, manifests: list[Manifest]) -> list[Line]:
    """What else is known of versions, newest first; only what is there."""
    lines = [line for manifest in reversed(manifests) for line in _facts(manifest, head.tags.get(manifest.ref.version, {}))]
    return ["", *lines] if lines else []


def _facts(manifest: Manifest, tags: dict[str, str]) -> list[Line]:
    facts = {
        "metrics": _pairs(manifest.metrics),
        "tags": _pairs(tags),
        "source": _pairs(manifest.source),
        "rules": ", ".join(f"{rule.name} ({rule.count}{', lossy' if rule.lossy else ''})" for rule in manifest.rules),
    }
    lines: list[Line] = [f"    {what:8}{text}" for what, text in facts.items() if text]
    lines += [Text(f"    warning {warning}", style="yellow") for warning in manifest.warnings]
    return [f"  version {manifest.ref.version}", *lines] if lines else []


def _pairs(values: dict[str, Any]) -> str:
    return "  ".join(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items())


def _indented(lines: list[Text]) -> list[Line]:
    return [Text("  ") + line for line in lines]


async def _manifests(registry: Any, head: Head) -> list[Manifest]:
    gate = asyncio.Semaphore(READS_AT_ONCE)

    async def read(number: int) -> Manifest:
        async with gate:
            return await registry.manifest(AdapterRef(head.base, head.name, number))

    return list(await asyncio.gather(*map(read, await registry.versions(head.base, head.name))))


# History

HISTORY_HEADER = ["WHEN", "AGE", "WHO", "WHAT", "ALIAS", "FROM", "TO", "MESSAGE"]


@app.command(rich_help_panel=VERSIONS, epilog="Example: loramux history parrot --alias production --at '2h ago'")
def history(
    name: Name,
    alias: Annotated[str | None, typer.Option("--alias", help="Only this alias.", autocompletion=complete_alias)] = None,
    at: Annotated[str | None, typer.Option("--at", help="What was live then: a date, a time (UTC) or `2h ago`.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Show that many rows at most.")] = None,
    base: Base = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Who moved what when and why; with --at, what was live then."""
    now = times.utc_now()
    then = usage(lambda: times.moment(at, now)) if at else None

    async def work(registry: Any) -> Head:
        where = await find_name(registry, name, base)
        return await registry.head(where.base, where.adapter)

    head: Head = run(config, work, as_json)
    where = {"base": head.base, "name": head.name}
    if then is not None:
        live = {known: lived_at(head, known, then) for known in ([alias] if alias else _ever(head))}
        data = {known: _lived_data(row) for known, row in live.items()}
        return show(as_json, where | {"at": then, "live": data}, *(_lived(known, row, then) for known, row in live.items()))
    rows = [row for row in reversed(head.history) if alias in (None, row.alias)][:limit]
    lines = table(HISTORY_HEADER, [_history_cells(row, now) for row in rows]) if rows else ["nothing has moved yet"]
    show(as_json, where | {"revision": head.revision, "history": [shapes.row_data(row) for row in rows]}, *lines)


def lived_at(head: Head, alias: str, at: str) -> HistoryRow | None:
    """The row that decided what was live at `at`. Where the history was cut off, the next move tells what it moved from."""
    row = aliases.live_at(head, alias, at)
    if row is not None:
        return row
    moves = [move for move in head.history if move.alias == alias]
    if moves and moves[0].at > at and moves[0].from_version is not None:
        return HistoryRow(alias, None, moves[0].from_version, at=head.history[0].at, kind="unknown")
    return None


def _ever(head: Head) -> list[str]:
    return sorted({row.alias for row in head.history if row.alias} | head.aliases.keys())


def _lived(alias: str, row: HistoryRow | None, at: str) -> str:
    if row is None:
        return f"{alias} named nothing at {times.short(at)}"
    weights = f" sharing {_weights(row.weights)}" if row.weights else ""
    if row.kind == "unknown":
        return f"{alias} was version {row.to_version} at {times.short(at)} (older than the history that is kept)"
    message = f": {row.message}" if row.message else ""
    return (
        f"{alias} was version {row.to_version}{weights} at {times.short(at)} "
        f"({row.kind} at {times.short(row.at)} by {row.who or 'unknown'}{message})"
    )


def _lived_data(row: HistoryRow | None) -> dict[str, Any] | None:
    if row is None:
        return None
    data = shapes.row_data(row)
    return {"version": row.to_version, "weights": data["weights"], "since": None if row.kind == "unknown" else row.at} | {
        key: data[key] for key in ("kind", "who", "message")
    }


def _history_cells(row: HistoryRow, now: datetime) -> list[Line]:
    to = _weights(row.weights) if row.weights else str(row.to_version or "-")
    about_version = row.alias is None
    return [
        times.short(row.at),
        times.age(row.at, now),
        row.who or "",
        row.kind,
        row.alias or "-",
        "-" if about_version else str(row.from_version or "-"),
        to,
        row.message or "",
    ]


def _weights(weights: dict[int, int] | None) -> str:
    return ", ".join(f"{version} ({shown(part)})" for version, part in percentages(weights or {}).items())
