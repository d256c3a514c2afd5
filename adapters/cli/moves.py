"""Commands that move aliases: promote, rollback, abort, unset-alias, protect, unprotect."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
from rich.text import Text

from adapters.cli import shapes, times
from adapters.cli.completion import complete_ref
from adapters.cli.options import Alias, AsJson, Base, Config, Gateway, IfRevision, Message, Name, Unlock, Yes
from adapters.cli.output import err, is_terminal, show, table, warn
from adapters.cli.program import ALIASES, app
from adapters.cli.shares import newcomer, percentages, shown, weights_of, with_share
from adapters.cli.telling import changing, tell
from adapters.cli.waiting import DEFAULT_TIMEOUT, Waited, promoted, watching
from adapters.cli.work import by, find_name, find_ref, named, run, usage
from adapters.errors import InvalidRequest, VersionConflict
from adapters.names import PRODUCTION, AdapterRef
from adapters.registry import aliases
from adapters.types import By, Head

ATTEMPTS = 5


@app.command(rich_help_panel=ALIASES, epilog="Example: loramux promote parrot 2 --weight 10 -m 'one in ten'")
def promote(
    name: Annotated[
        str, typer.Argument(help="Adapter, or version: `name`, `name@canary`, `base:name@7`.", autocompletion=complete_ref)
    ],
    version: Annotated[int | None, typer.Argument(help="Version that the alias will name; or `name@7` says it.")] = None,
    alias: Alias = PRODUCTION,
    weight: Annotated[
        float | None, typer.Option("--weight", help="Send this percentage there; the rest stays where it is.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="All traffic; without a version, to the one that is tried out.")] = False,
    at_once: Annotated[bool, typer.Option("--now", help="Move it at once, warm or not; a share always moves at once.")] = False,
    min_ready: Annotated[
        int | None,
        typer.Option(min=1, help="Replicas that must have it first; as many as have the version before without it."),
    ] = None,
    timeout: Annotated[str, typer.Option(help="The move fails after so long: `90s`, `5min`.")] = DEFAULT_TIMEOUT,
    message: Message = None,
    unlock: Unlock = False,
    if_revision: IfRevision = None,
    base: Base = None,
    gateway: Gateway = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Move an alias to a version, as soon as replicas have it in their engines; or a share of its traffic, at once."""
    _check_usage(name, version, weight, full)
    timeout_s, caller = usage(lambda: times.duration_s(timeout)), by(message, if_revision, unlock)

    async def work(registry: Any) -> tuple[Head, Waited]:
        ref = await _meant(registry, name, version, base, alias)
        before = await registry.head(ref.base, ref.name)
        if weight is not None:
            return before, Waited(await _share(registry, ref, alias, weight, caller))
        if at_once:
            return before, Waited(await registry.promote(ref.base, ref.name, alias, ref.version, caller))
        return before, await promoted(registry, ref, alias, caller, watch, min_ready=min_ready, timeout_s=timeout_s)

    async def told(registry: Any) -> tuple[Head, Waited]:
        before, waited = await work(registry)
        if not waited.by_gateway:
            await tell(config, before, waited.head)
        return before, waited

    try:
        with watching(gateway, config, not as_json) as watch:
            before, waited = run(config, told, as_json)
    except KeyboardInterrupt:
        warn(f"the move stays pending, and a gateway will end it; see: loramux rollout {name.partition('@')[0]}")
        sys.exit(1)
    if waited.note:
        warn(f"cold: {waited.note}")
    _moved(as_json, before, waited.head, alias, "promoted", {"waited_s": round(waited.waited_s, 3), "note": waited.note})


def _check_usage(name: str, version: int | None, weight: float | None, full: bool) -> None:
    if weight is not None and full:
        raise typer.BadParameter("--weight and --full exclude each other")
    if version is None and "@" not in name and not full:
        raise typer.BadParameter("which version? `promote NAME VERSION`, `promote NAME@canary` or `promote NAME --full`")
    if version is not None and "@" in name:
        raise typer.BadParameter("the version is there twice: `NAME@...` and VERSION")


async def _meant(registry: Any, name: str, version: int | None, base: str | None, alias: str) -> AdapterRef:
    if "@" in name:
        return await find_ref(registry, name, base)
    where = await find_name(registry, name, base)
    if version is not None:
        return AdapterRef(where.base, where.adapter or "", version)
    head = await registry.head(where.base, where.adapter)
    tried = newcomer(head, alias)
    if tried is None:
        raise _not_shared(head, alias, f"name the version: loramux promote {name} VERSION")
    return AdapterRef(head.base, head.name, tried)


async def _share(registry: Any, ref: AdapterRef, alias: str, percent: float, caller: By) -> Head:
    """The weights follow from what is there, so they are computed again when somebody else wrote meanwhile."""
    for attempt in range(ATTEMPTS):
        head = await registry.head(ref.base, ref.name)
        weights = with_share(weights_of(head, alias), ref.version, percent)
        expected = caller.expected_revision if caller.expected_revision is not None else head.revision
        try:
            at = By(caller.who, caller.message, expected, caller.unlock)
            return await registry.set_weights(ref.base, ref.name, alias, weights, at)
        except VersionConflict:
            if caller.expected_revision is not None or attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("the loop returns or raises")


@app.command(rich_help_panel=ALIASES, epilog="Example: loramux rollback parrot --to 1 -m 'rhymes got worse'")
def rollback(
    name: Name,
    to: Annotated[int | None, typer.Option(help="Version to go back to; it must have been live.")] = None,
    alias: Alias = PRODUCTION,
    message: Message = None,
    unlock: Unlock = False,
    if_revision: IfRevision = None,
    yes: Yes = False,
    base: Base = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Move an alias back to a version that was live before. On a terminal it offers the list."""

    async def work(registry: Any) -> tuple[Head, Head]:
        where = await find_name(registry, name, base)
        before = await registry.head(where.base, where.adapter)
        target = to
        if target is None and is_terminal() and not (yes or as_json):
            target = _picked(before, alias)
        return before, await registry.rollback(where.base, where.adapter, alias, to=target, by=by(message, if_revision, unlock))

    before, head = changing(config, work, as_json)
    _moved(as_json, before, head, alias, "rolled back")


def _picked(head: Head, alias: str) -> int:
    """Asks; Enter takes what a plain rollback would. Raises InvalidRequest where there is nothing to pick."""
    target = aliases.rollback_target(head, alias)
    now = times.utc_now()
    choices = [version for version in aliases.were_live(head, alias) if version != head.aliases.get(alias) or version == target]
    rows = [[str(version), *_last_live(head, alias, version, now)] for version in reversed(choices)]
    err.print(f"{alias} of {head.base}:{head.name} is version {named(head, alias)}; these were live before:")
    for line in table(["VERSION", "LAST MOVED THERE", "BY", "MESSAGE"], rows):
        err.print(Text("  ") + line)
    picked = typer.prompt("back to", default=target, type=int, err=True)
    if picked not in choices:
        raise InvalidRequest(f"version {picked} is not in the list", value=picked, limit=", ".join(map(str, choices)))
    return picked


def _last_live(head: Head, alias: str, version: int, now: Any) -> list[str]:
    moves = (row for row in reversed(head.history) if row.alias == alias and row.kind not in aliases.UNMOVED)
    row = next((row for row in moves if row.to_version == version), None)
    if row is None:  # older than the history that is kept
        return ["", "", ""]
    return [f"{times.age(row.at, now)} ago", row.who or "", row.message or ""]


@app.command(rich_help_panel=ALIASES, epilog="Example: loramux abort parrot -m 'too many errors'")
def abort(
    name: Name,
    alias: Alias = PRODUCTION,
    message: Message = None,
    unlock: Unlock = False,
    if_revision: IfRevision = None,
    base: Base = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """End a canary: all traffic goes back to the version that the alias names."""

    async def work(registry: Any) -> tuple[Head, Head]:
        where = await find_name(registry, name, base)
        before = await registry.head(where.base, where.adapter)
        if alias not in before.weights:
            raise _not_shared(before, alias, f"to go back further: loramux rollback {before.name}")
        expected = if_revision if if_revision is not None else before.revision
        return before, await registry.rollback(where.base, where.adapter, alias, by=by(message, expected, unlock))

    before, head = changing(config, work, as_json)
    _moved(as_json, before, head, alias, "aborted")


@app.command("unset-alias", rich_help_panel=ALIASES, epilog="Example: loramux unset-alias parrot canary")
def unset_alias(
    name: Name,
    alias: Annotated[str, typer.Argument(help="Alias to take away.")],
    message: Message = None,
    unlock: Unlock = False,
    if_revision: IfRevision = None,
    base: Base = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Take an alias away; its versions stay."""

    async def work(registry: Any) -> tuple[Head, Head]:
        where = await find_name(registry, name, base)
        before = await registry.head(where.base, where.adapter)
        named(before, alias)
        return before, await registry.unset(where.base, where.adapter, alias, by(message, if_revision, unlock))

    before, head = changing(config, work, as_json)
    text = f"unset: {alias} of {head.base}:{head.name} named version {before.aliases[alias]} (revision {head.revision})"
    again = f"undo: loramux promote {head.base}:{head.name} {before.aliases[alias]} --alias {alias}"
    show(as_json, _move_data(before, head, alias), text, again)


@app.command(rich_help_panel=ALIASES, epilog="Example: loramux protect parrot")
def protect(
    name: Name,
    alias: Alias = PRODUCTION,
    message: Message = None,
    base: Base = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Protect an alias: it moves only for those who say --unlock."""
    _protect(True, name, alias, message, base, config, as_json)


@app.command(rich_help_panel=ALIASES, epilog="Example: loramux unprotect parrot")
def unprotect(
    name: Name,
    alias: Alias = PRODUCTION,
    message: Message = None,
    base: Base = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Let a protected alias move like any other again."""
    _protect(False, name, alias, message, base, config, as_json)


def _protect(on: bool, name: str, alias: str, message: str | None, base: str | None, config: Path | None, as_json: bool) -> None:
    async def work(registry: Any) -> tuple[Head, Head]:
        where = await find_name(registry, name, base)
        before = await registry.head(where.base, where.adapter)
        return before, await registry.protect(where.base, where.adapter, alias, on, by(message))

    before, head = changing(config, work, as_json)
    ref = f"{head.base}:{head.name}"
    text = f"{alias} of {ref} is {'protected' if on else 'not protected'} now (revision {head.revision})"
    following = f"to move it: loramux promote {ref} VERSION --unlock" if on else f"undo: loramux protect {ref}"
    show(as_json, _move_data(before, head, alias), text, following + ("" if alias == PRODUCTION else f" --alias {alias}"))


def _moved(
    as_json: bool, before: Head, head: Head, alias: str, verb: str, more: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """What is now true, and the next command."""
    data = _move_data(before, head, alias) | dict(more)
    ref, option = f"{head.base}:{head.name}", "" if alias == PRODUCTION else f" --alias {alias}"
    option += " --unlock" if alias in head.protected else ""
    if before.revision == head.revision:
        state = f"unchanged: {alias} of {ref} is version {head.aliases[alias]} already (revision {head.revision})"
        return show(as_json, data, state)
    if alias in head.weights:
        parts = ", ".join(f"{shown(part)} to version {version}" for version, part in percentages(head.weights[alias]).items())
        lines = (f"{verb}: {alias} of {ref} sends {parts} (revision {head.revision})",)
        lines += (f"next: loramux promote {ref} --full{option}   or: loramux abort {ref}{option}",)
        return show(as_json, data, *lines)
    lines = (f"{verb}: {alias} of {ref} is now version {head.aliases[alias]} (revision {head.revision})",)
    lines += (f"undo: loramux rollback {ref}{option}" if verb == "promoted" else f"see: loramux history {ref}{option}",)
    return show(as_json, data, *lines)


def _move_data(before: Head, head: Head, alias: str) -> dict[str, Any]:
    changed = before.revision != head.revision
    return shapes.head_data(head) | {"alias": alias, "version": head.aliases.get(alias), "changed": changed}


def _not_shared(head: Head, alias: str, hint: str) -> InvalidRequest:
    return InvalidRequest(
        f"`{alias}` of `{head.base}:{head.name}` doesn't share its traffic", reason="not_shared", param="alias", hint=hint
    )
