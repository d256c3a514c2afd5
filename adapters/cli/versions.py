"""Commands that look at adapters and their versions."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from adapters.cli.options import AsJson, Base, Config, Name
from adapters.cli.output import show as show_output
from adapters.cli.output import size
from adapters.cli.program import VERSIONS, app
from adapters.cli.work import find_name, read_view, run
from adapters.names import AdapterRef


@app.command("list", rich_help_panel=VERSIONS, epilog="Example: loramux list --json")
def list_adapters(base: Base = None, config: Config = None, as_json: AsJson = False) -> None:
    """List adapters with their production versions."""

    async def work(registry: Any) -> Any:
        view = await read_view(registry)
        return [entry for entry in view.adapters() if base in (None, entry.base)]

    entries = run(config, work)
    table = Table("ADAPTER", "PRODUCTION", "NEWEST", "VERSIONS", "RANK", "SIZE", box=None, pad_edge=False)
    for entry in entries:
        newest = entry.versions[max(entry.versions)]
        table.add_row(
            f"{entry.base}:{entry.name}",
            str(entry.production or "-"),
            str(newest.version),
            str(len(entry.versions)),
            str(newest.rank),
            size(newest.size_bytes),
        )
    empty = "no adapters yet; next: loramux publish FOLDER --name NAME --base BASE --promote"
    show_output(as_json, {"adapters": entries}, table if entries else empty)


@app.command(rich_help_panel=VERSIONS, epilog="Example: loramux show parrot")
def show(name: Name, base: Base = None, config: Config = None, as_json: AsJson = False) -> None:
    """Show one adapter: versions, aliases and who moved them."""

    async def work(registry: Any) -> Any:
        where = await find_name(registry, name, base)
        head = await registry.head(where.base, where.adapter)
        versions = await registry.versions(where.base, where.adapter)
        manifests = [await registry.manifest(AdapterRef(where.base, where.adapter, number)) for number in versions]
        return head, manifests

    head, manifests = run(config, work)
    table = Table("VERSION", "ALIASES", "RANK", "SIZE", "DIGEST", "PUBLISHED", "BY", "MESSAGE", box=None, pad_edge=False)
    for manifest in reversed(manifests):
        number = manifest.ref.version
        aliases = [alias for alias, version in head.aliases.items() if version == number]
        aliases += ["retired"] if number in head.retired else []
        table.add_row(
            str(number),
            ", ".join(aliases),
            str(manifest.rank),
            size(manifest.size_bytes),
            manifest.digest[:12],
            manifest.created_at,
            manifest.who or "",
            manifest.message or "",
        )
    history = [
        f"{move.at}  {move.alias}: {move.from_version or '-'} -> {move.to_version}  {move.kind}  {move.who or ''}"
        f"  {move.message or ''}"
        for move in reversed(head.history)
    ]
    show_output(
        as_json, {"head": head, "versions": manifests}, f"{head.base}:{head.name}  revision {head.revision}", table, *history
    )
