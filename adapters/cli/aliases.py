"""Commands that move aliases."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from adapters.cli.options import Alias, AsJson, Base, Config, IfRevision, Message, Name
from adapters.cli.output import show as show_output
from adapters.cli.program import ALIASES, app
from adapters.cli.work import find_name, run, who
from adapters.names import PRODUCTION
from adapters.types import By


@app.command(rich_help_panel=ALIASES, epilog="Example: loramux promote parrot 2 -m 'better rhymes'")
def promote(
    name: Name,
    version: Annotated[int, typer.Argument(help="Version that the alias will name.")],
    alias: Alias = PRODUCTION,
    message: Message = None,
    revision: IfRevision = None,
    base: Base = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Move an alias to a version."""

    async def work(registry: Any) -> Any:
        where = await find_name(registry, name, base)
        return await registry.promote(where.base, where.adapter, alias, version, By(who(), message, revision))

    head = run(config, work)
    _moved(as_json, head, alias, "promoted", f"undo: loramux rollback {head.base}:{head.name}")


@app.command(rich_help_panel=ALIASES, epilog="Example: loramux rollback parrot")
def rollback(
    name: Name,
    to: Annotated[int | None, typer.Option(help="Version to go back to; the one that was live before by default.")] = None,
    alias: Alias = PRODUCTION,
    message: Message = None,
    revision: IfRevision = None,
    base: Base = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Move an alias back to a version that was live before."""

    async def work(registry: Any) -> Any:
        where = await find_name(registry, name, base)
        return await registry.rollback(where.base, where.adapter, alias, to=to, by=By(who(), message, revision))

    head = run(config, work)
    _moved(as_json, head, alias, "rolled back", f"see: loramux show {head.base}:{head.name}")


def _moved(as_json: bool, head: Any, alias: str, verb: str, following: str) -> None:
    text = f"{verb}: {alias} of {head.base}:{head.name} is now version {head.aliases[alias]} (revision {head.revision})"
    show_output(as_json, {"head": head}, text, following)
