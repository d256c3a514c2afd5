"""Commands about where versions should be: pin, unpin, prewarm, evict."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from adapters.cli import shapes, times
from adapters.cli.gateway import GLANCE_TIMEOUT_S, find_gateway, known_gateway
from adapters.cli.options import AsJson, Base, Config, Gateway, IfRevision, Message, Ref
from adapters.cli.output import fail, show, warn
from adapters.cli.program import PLACES, app
from adapters.cli.work import by, find_name, find_ref, read_view, run, usage
from adapters.errors import LoraMuxError
from adapters.names import PRODUCTION, ModelName
from adapters.registry.directives import check_pins
from adapters.registry.directives import checked as checked_directive
from adapters.registry.moments import now as moment_now
from adapters.registry.moments import unix_s
from adapters.types import By, Directive, Head, WarmTier

Target = Annotated[
    str,
    typer.Argument(
        help="What: `name@7`, or `name@canary` to follow the alias; `name` follows production. `base:` may stand before it."
    ),
]
Tier = Annotated[WarmTier, typer.Option("--tier", help="engine, or disk for its files alone.")]
Replicas = Annotated[int | None, typer.Option("--replicas", min=1, help="On so many replicas; on all without it.")]
Start = Annotated[str | None, typer.Option("--start", help="From then on: a time (UTC), or `2h` for in two hours.")]
Until = Annotated[str | None, typer.Option("--until", help="Only until then: a time (UTC), or `2h` for in two hours.")]
Every = Annotated[str | None, typer.Option("--every", help="The window comes back: `1d`, `1w`.")]


@app.command(rich_help_panel=PLACES, epilog="Example: loramux pin parrot --replicas 2 -m 'the busiest of all'")
def pin(
    target: Target,
    tier: Tier = "engine",
    replicas: Replicas = None,
    start: Start = None,
    until: Until = None,
    every: Every = None,
    message: Message = None,
    if_revision: IfRevision = None,
    base: Base = None,
    gateway: Gateway = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Keep a version on replicas, loaded and never evicted. Engines keep one slot free: more pins are refused."""
    window = _window(start, until, every, times.utc_now())
    slots = _slots(gateway, config)

    async def work(registry: Any) -> tuple[Head, Head, ModelName]:
        caller = by(message, if_revision)
        model = await find_name(registry, target, base)
        before = await registry.head(model.base, model.adapter)
        wanted = checked_directive(Directive(_text(model), tier, True, replicas, *window), caller, moment_now())
        if slots is not None:
            await _check_room(registry, model, wanted, slots)
        return before, await registry.direct(model.base, model.adapter, wanted, caller), model

    before, head, model = run(config, work, as_json)
    if slots is None and tier == "engine":
        warn("no gateway said what room its engines have, so nobody checked that the pin fits")
    kept = "kept in engines" if tier == "engine" else "kept on disks"
    _directed(as_json, before, head, model, True, "pinned", kept, f"undo: loramux unpin {_shown(model)}")


@app.command(rich_help_panel=PLACES, epilog="Example: loramux unpin parrot")
def unpin(
    target: Target,
    message: Message = None,
    if_revision: IfRevision = None,
    base: Base = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """End the pins on a version or an alias. What they kept stays until its place is needed."""
    before, head, model = _take_back(config, target, base, by(message, if_revision), True, as_json)
    _directed(as_json, before, head, model, True, "unpinned", "", f"again: loramux pin {_shown(model)}")


@app.command(rich_help_panel=PLACES, epilog="Example: loramux prewarm parrot@7 --replicas 2")
def prewarm(
    target: Target,
    tier: Tier = "engine",
    replicas: Replicas = None,
    start: Start = None,
    until: Until = None,
    every: Every = None,
    off: Annotated[bool, typer.Option("--off", help="Take prewarms of it back.")] = False,
    message: Message = None,
    if_revision: IfRevision = None,
    base: Base = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Bring a version to replicas before anybody asks; on an alias, after each move. It competes like any other then."""
    window = _window(start, until, every, times.utc_now())
    caller = by(message, if_revision)
    if off:
        before, head, model = _take_back(config, target, base, caller, False, as_json)
        return _directed(as_json, before, head, model, False, "not prewarmed any more", "", None)

    async def work(registry: Any) -> tuple[Head, Head, ModelName]:
        model = await find_name(registry, target, base)
        before = await registry.head(model.base, model.adapter)
        wanted = Directive(_text(model), tier, False, replicas, *window)
        return before, await registry.direct(model.base, model.adapter, wanted, caller), model

    before, head, model = run(config, work, as_json)
    brought = "replicas bring it into their engines" if tier == "engine" else "replicas bring it to their disks"
    return _directed(as_json, before, head, model, False, "prewarmed", brought, "see: loramux ps")


@app.command(rich_help_panel=PLACES, epilog="Example: loramux evict parrot@7 --tier remote")
def evict(
    ref: Ref,
    tier: Annotated[
        Literal["disk", "remote"], typer.Option("--tier", help="disk keeps the files on the nodes, remote gives them up too.")
    ] = "disk",
    base: Base = None,
    gateway: Gateway = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Make replicas give a version up. Where a request uses it, it stays."""
    found = run(config, lambda registry: find_ref(registry, ref, base), as_json)
    door = find_gateway(gateway, config)
    try:
        said = door.post("/registry/v1/evict", {"base": found.base, "name": found.name, "version": found.version, "tier": tier})
    except LoraMuxError as error:
        fail(error, as_json)
    gone = [row for row in said["replicas"] if row["reason"] is None]
    stays = [
        f"  {row['replica']}: still {row['tier']} ({row['reason']})" for row in said["replicas"] if row["reason"] is not None
    ]
    text = f"evicted: {found} from {len(gone)} of {len(said['replicas'])} replicas, down to {tier}"
    show(as_json, said, text, *stays, f"again: loramux prewarm {found}")


def _take_back(
    config: Path | None, target: str, base: str | None, caller: By, pinned: bool, as_json: bool
) -> tuple[Head, Head, ModelName]:
    async def work(registry: Any) -> tuple[Head, Head, ModelName]:
        model = await find_name(registry, target, base)
        before = await registry.head(model.base, model.adapter)
        return before, await registry.undirect(model.base, model.adapter, _text(model), caller, pin=pinned), model

    return run(config, work, as_json)


def _directed(
    as_json: bool, before: Head, head: Head, model: ModelName, pinned: bool, verb: str, what: str, following: str | None
) -> None:
    changed = before.revision != head.revision
    data = shapes.head_data(head) | {"target": _text(model), "pin": pinned, "changed": changed}
    state = f"{verb}: {_shown(model)}" if changed else f"unchanged: {_shown(model)}"
    show(as_json, data, f"{state}{f', {what}' if what else ''} (revision {head.revision})", following)


def _text(model: ModelName) -> str:
    """A directive's target."""
    return str(model.version) if model.version is not None else model.alias or PRODUCTION


def _shown(model: ModelName) -> str:
    return f"{model.base}:{model.adapter}@{_text(model)}"


def _window(start: str | None, until: str | None, every: str | None, now: datetime) -> tuple[str | None, str | None, int | None]:
    """`start`, `until`, `every_s` of a directive."""

    def moment(text: str | None) -> str | None:
        return None if text is None else usage(lambda: times.ahead(text, now))

    return moment(start), moment(until), None if every is None else round(usage(lambda: times.duration_s(every)))


def _slots(gateway: str | None, config: Path | None) -> dict[str, list[int]] | None:
    """The slots of each live replica, by base; 0 for one that does not say. None where no gateway answers."""
    door = known_gateway(gateway, config, GLANCE_TIMEOUT_S * 5)
    if door is None:
        return None
    try:
        views = door.residency()
    except LoraMuxError:
        return None
    return {base: [row.get("slots") or 0 for row in view.get("replicas", ())] for base, view in views.items()}


async def _check_room(registry: Any, model: ModelName, wanted: Directive, slots: dict[str, list[int]]) -> None:
    """Raises InvalidRequest with reason `too_many_pins`."""
    live = slots.get(model.base, [])
    told = [count for count in live if count]
    if not told:
        return
    entries = (await read_view(registry)).adapters()
    check_pins(entries, model.base, model.adapter or "", wanted, slots=min(told), replicas=len(live), now_s=unix_s(moment_now()))
