"""`loramux rollout`: the tree of an adapter's aliases, their weights, versions, and where each is loaded."""

from __future__ import annotations

import contextlib
import json
import time
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from adapters.cli import shapes, times
from adapters.cli.gateway import answering
from adapters.cli.options import AsJson, Base, Config, Gateway, Name
from adapters.cli.output import out, show
from adapters.cli.program import ALIASES, app
from adapters.cli.shares import percentages, shown, weights_of
from adapters.cli.work import find_name, run
from adapters.types import Head


@app.command(rich_help_panel=ALIASES, epilog="Example: loramux rollout parrot --watch")
def rollout(
    name: Name,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep drawing until Ctrl-C; with --json a line for each change.")
    ] = False,
    interval_s: Annotated[float, typer.Option("--interval-s", min=0.2, help="How often --watch looks.")] = 1.0,
    base: Base = None,
    gateway: Gateway = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Where an adapter's traffic goes: aliases, weights, versions, and where each is loaded."""

    async def work(registry: Any) -> Head:
        where = await find_name(registry, name, base)
        return await registry.head(where.base, where.adapter)

    def look() -> dict[str, Any]:
        return rollout_data(run(config, work, as_json), answering(gateway, config, as_json))

    first = look()
    if not watch:
        return show(as_json, first, *tree(first, times.utc_now()))
    with contextlib.suppress(KeyboardInterrupt):
        if out.is_terminal and not as_json:
            _watch_live(first, look, interval_s)
        _watch_lines(first, look, interval_s, as_json)


def rollout_data(head: Head, tiers: dict[str, str] | None) -> dict[str, Any]:
    """The tree as data. `tier` is null without a gateway."""

    def version_of(version: int, percent: float) -> dict[str, Any]:
        ref = shapes.ref_of(head, version)
        tier = None if tiers is None else tiers.get(ref, "remote")
        return {"version": version, "ref": ref, "percent": percent, "state": shapes.state(head, version), "tier": tier}

    trees = {}
    for alias in sorted(head.aliases.keys() | head.pending.keys()):
        details = shapes.alias_data(head, alias)
        shares = [version_of(version, percent) for version, percent in percentages(weights_of(head, alias)).items()]
        move = head.pending.get(alias)
        told = {key: details[key] for key in ("protected", "since", "who", "message")}
        trees[alias] = told | {"versions": shares, "pending": None if move is None else shapes.move_data(move)}
    return {"base": head.base, "name": head.name, "revision": head.revision, "aliases": trees}


def tree(data: dict[str, Any], now: datetime) -> list[Text]:
    """The tree for people."""
    lines = [Text.assemble((f"{data['base']}:{data['name']}", "bold"), f"  revision {data['revision']}")]
    if not data["aliases"]:
        lines.append(Text(f"no alias yet; next: loramux promote {data['base']}:{data['name']} VERSION"))
    for number, (alias, facts) in enumerate(data["aliases"].items(), 1):
        last = number == len(data["aliases"])
        lines.append(Text.assemble("└─ " if last else "├─ ", (alias, "cyan"), *_about(facts, now)))
        leaves = [*map(_version, facts["versions"]), *([_waiting(facts["pending"], now)] if facts["pending"] else [])]
        for count, leaf in enumerate(leaves, 1):
            stem = "   " if last else "│  "
            branch = "└─ " if count == len(leaves) else "├─ "
            lines.append(Text.assemble(stem, branch, *leaf))
    return lines


def _about(facts: dict[str, Any], now: datetime) -> list[Any]:
    parts: list[Any] = [(" (protected)", "yellow")] if facts["protected"] else []
    if facts["since"]:
        parts.append(f"  for {times.age(facts['since'], now)}, by {facts['who'] or 'unknown'}")
    return [*parts, f": {facts['message']}"] if facts["message"] else parts


def _version(version: dict[str, Any]) -> list[Any]:
    bar = "█" * round(version["percent"] / 10)
    where = f"  {version['tier']}" if version["tier"] else ""
    return [f"@{version['version']}  {shown(version['percent']):>5}  ", (f"{bar:10}", "green"), f"  {version['state']}{where}"]


def _waiting(move: dict[str, Any], now: datetime) -> list[Any]:
    left_s = max(0.0, (datetime.fromisoformat(move["deadline"]) - now).total_seconds())
    return [f"@{move['version']}  ", ("waits until it is warm", "yellow"), f", {times.span(left_s)} left"]


def _watch_live(data: dict[str, Any], look: Any, interval_s: float) -> None:
    from rich.console import Group
    from rich.live import Live

    with Live(Group(*tree(data, times.utc_now())), console=out, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            data = look()
            live.update(Group(*tree(data, times.utc_now())), refresh=True)


def _watch_lines(data: dict[str, Any], look: Any, interval_s: float, as_json: bool) -> None:
    """Where nobody looks at a screen: the whole tree again each time something changed."""
    seen = ""
    while True:
        if json.dumps(data) != seen:
            seen = json.dumps(data)
            show(as_json, data, *tree(data, times.utc_now()))
            out.file.flush()
        time.sleep(interval_s)
        data = look()
