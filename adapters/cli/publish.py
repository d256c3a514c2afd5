"""Commands that make versions: publish, and inspect, which only looks."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from adapters.cli import shapes, times
from adapters.cli.completion import complete_alias
from adapters.cli.gateway import find_gateway
from adapters.cli.options import AsJson, Base, Config, Gateway, Message, Quiet, Unlock
from adapters.cli.output import as_data, err, fail, is_terminal, progress_bar, show, size, spinner, warn
from adapters.cli.program import PUBLISH, app
from adapters.cli.telling import tell
from adapters.cli.versions import parse_tags
from adapters.cli.waiting import DEFAULT_TIMEOUT, Waited, promoted, watching
from adapters.cli.work import by, find_name, run, usage
from adapters.errors import InvalidRequest, LoraMuxError, ModelNotFound, VersionConflict
from adapters.names import PRODUCTION, AdapterRef, check_adapter_name, check_alias, slug_of
from adapters.registry.aliases import check_unlocked
from adapters.types import Head

Source = Annotated[Path, typer.Argument(help="PEFT folder, or a .tar, .tar.gz or .zip of one.")]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse what would have to be rewritten.")]
Alpha = Annotated[float | None, typer.Option(help="Use this lora_alpha instead of the config's.")]
AllowZero = Annotated[bool, typer.Option("--allow-zero", help="Take it even if it changes nothing.")]
KeepDtype = Annotated[bool, typer.Option("--keep-dtype", help="Keep float32 instead of bfloat16.")]
Drop = Annotated[list[str] | None, typer.Option("--drop", help="Leave these weights out: `vision`.")]


@dataclass(frozen=True)
class Wish:
    """What the command line asks to publish."""

    folder: Path
    name: str
    base: str | None
    promote: str | None
    message: str | None
    unlock: bool
    now: bool = False
    tags: dict[str, str | None] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)


@app.command(rich_help_panel=PUBLISH, epilog="Example: loramux publish ./my-adapter --name sql --tag data=v3 --promote")
def publish(
    folder: Source,
    name: Annotated[str, typer.Option(help="Adapter: `name` or `team/name`.")],
    base: Base = None,
    promote: Annotated[
        bool, typer.Option("--promote", help="Let the alias name it; one that has users moves when replicas have the version.")
    ] = False,
    now: Annotated[bool, typer.Option("--now", help="Move the alias at once, warm or not.")] = False,
    alias: Annotated[str, typer.Option(help="Alias that --promote moves.", autocompletion=complete_alias)] = PRODUCTION,
    message: Message = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="`k=v`: a tag of the version; may be repeated.")] = None,
    metric: Annotated[list[str] | None, typer.Option("--metric", help="`k=number`: how good it is; may be repeated.")] = None,
    source_run: Annotated[str | None, typer.Option(help="Training run that it comes from.")] = None,
    source_step: Annotated[int | None, typer.Option(help="Step of that run.")] = None,
    unlock: Unlock = False,
    strict: Strict = False,
    alpha: Alpha = None,
    allow_zero: AllowZero = False,
    keep_dtype: KeepDtype = False,
    drop: Drop = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")] = False,
    wait_ready: Annotated[bool, typer.Option("--wait-ready", help="Return when a gateway has answered from it.")] = False,
    probe: Annotated[bool, typer.Option("--probe", help="Compare its answers with the base's, on a gateway.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=1, help="Limit for --wait-ready and --probe.")] = 120,
    gateway: Gateway = None,
    quiet: Quiet = False,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Publish a PEFT folder as a new version."""
    options = usage(lambda: _options(strict, alpha, keep_dtype, allow_zero, drop))
    try:
        named = _named(name, dry_run)
    except LoraMuxError as error:
        fail(error, as_json)
    source = {"run": source_run, "step": source_step, "original_name": name if named != name else None}
    wish = Wish(
        folder,
        named,
        base,
        promote=usage(lambda: check_alias(alias)) if promote else None,
        message=message,
        unlock=unlock,
        now=now,
        tags=_tags(tag or []),
        metrics=_metrics(metric or []),
        source={key: value for key, value in source.items() if value is not None},
    )
    if dry_run:
        _show_inspection(*run(config, lambda registry: _inspection(registry, wish, options), as_json), as_json)
    talks = not (as_json or quiet)

    async def work(registry: Any) -> tuple[Any, int]:
        published, head = await _publish(registry, wish, options, talks)
        return published, await _promoted(registry, published.ref, wish, head, config, gateway, talks)

    published, revision = run(config, work, as_json)
    told = {"ready": None, "probe": None} | _asked_gateway(str(published.ref), wait_ready, probe, gateway, config, timeout_s)
    data = shapes.manifest_data(published.manifest) | {
        "created": published.created,
        "retired": published.retired,
        "promoted": wish.promote,
        "revision": revision,
        "tags": {key: value for key, value in wish.tags.items() if value is not None},
        **told,
    }
    lines = [str(published.ref)] if quiet else _lines(published, wish, told, find_gateway(gateway, config).url)
    show(as_json, data, *lines)
    ready = told["ready"]
    sys.exit(0 if ready is None or ready["ready"] else 1)


async def _publish(registry: Any, wish: Wish, options: Any, bar: bool) -> tuple[Any, Head]:
    """The version, and the head with it. A protected alias is found out before anything is sent."""
    from adapters.publishing import Publication, publish_folder

    where = await find_name(registry, wish.name, wish.base)
    name, caller = where.adapter or "", by(wish.message, None, wish.unlock)
    if wish.promote:
        with suppress(ModelNotFound):
            check_unlocked(await registry.head(where.base, name), wish.promote, caller)
    publication = Publication(
        where.base,
        name,
        wish.folder,
        message=wish.message,
        who=caller.who,
        source=wish.source,
        metrics=wish.metrics,
        unlock=wish.unlock,
    )
    with progress_bar("publishing", bar) as progress:
        published = await publish_folder(registry, publication, options, progress)
    ref = published.ref
    if wish.tags:
        await registry.tag(ref, wish.tags, by())
    return published, await registry.head(ref.base, ref.name)


async def _promoted(
    registry: Any, ref: AdapterRef, wish: Wish, before: Head, config: Path | None, gateway: str | None, talks: bool
) -> int:
    """The adapter's revision after the alias has moved, if it was to. One that names nothing yet has nobody who would wait."""
    if wish.promote is None:
        return before.revision
    caller = by(wish.message, None, wish.unlock)
    if wish.now or wish.promote not in before.aliases:
        waited = Waited(await registry.promote(ref.base, ref.name, wish.promote, ref.version, caller))
    else:
        timeout_s = times.duration_s(DEFAULT_TIMEOUT)
        try:
            with watching(gateway, config, talks) as watch:
                waited = await promoted(registry, ref, wish.promote, caller, watch, timeout_s=timeout_s)
        except VersionConflict as error:
            stands = f"{ref} is published; {error.hint}" if error.hint else f"{ref} is published"
            raise VersionConflict(error.message, **error.details() | {"hint": stands}) from None
    if not waited.by_gateway:
        await tell(config, before, waited.head)
    if waited.note:
        warn(f"cold: {waited.note}")
    return waited.head.revision


def _asked_gateway(
    ref: str, wait_ready: bool, probe: bool, url: str | None, config: Path | None, timeout_s: float
) -> dict[str, Any]:
    """What a gateway says of the new version. The publication stands whatever it says."""
    from adapters.cli import probing

    told: dict[str, Any] = {}
    if not (wait_ready or probe):
        return told
    gateway = find_gateway(url, config, timeout_s)
    try:
        with spinner(f"waiting for {ref} to answer"):
            probing.wait_ready(gateway, ref, timeout_s)
        told["ready"] = {"ready": True, "error": None}
        with spinner(f"comparing {ref} with its base"):
            told["probe"] = probing.probe(gateway, ref).as_data() if probe else None
    except LoraMuxError as error:
        told.setdefault("ready", {"ready": False, "error": as_data(error)})
        if told["ready"]["ready"]:
            told["probe"] = {"differs": None, "error": as_data(error)}
    return told


def _lines(published: Any, wish: Wish, told: dict[str, Any], url: str) -> list[str | None]:
    from adapters.cli import probing

    ref, manifest = published.ref, published.manifest
    state = "published" if published.created else "there already, unchanged"
    adapter = f"{ref.base}:{ref.name}"
    lines: list[str | None] = [
        f"{state}: {ref}  (rank {manifest.rank}, {size(manifest.size_bytes)}, {manifest.digest[:12]})",
        *(f"warning: {warning}" for warning in manifest.warnings),
        f"warning: this version is retired; loramux restore {ref} brings it back" if published.retired else None,
        f"promoted: {wish.promote} of {adapter} is now version {ref.version}" if wish.promote else None,
    ]
    ready = told["ready"]
    if ready is not None:
        lines.append("ready: a gateway has answered from it" if ready["ready"] else f"not ready: {ready['error']['message']}")
    if told["probe"]:
        lines += probing.lines(told["probe"])
    body = f'{{"model": "{ref}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    lines.append(f"try:  curl -s {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'")
    if wish.promote:
        alias = "" if wish.promote == PRODUCTION else f" --alias {wish.promote}"
        return [*lines, f"undo: loramux rollback {adapter}{alias}" if ref.version > 1 else f"see:  loramux show {adapter}"]
    return [*lines, f"next: loramux promote {adapter} {ref.version}"]


def _options(strict: bool, alpha: float | None, keep_dtype: bool, allow_zero: bool, drop: list[str] | None) -> Any:
    from adapters.contract import PublishOptions

    return PublishOptions(strict=strict, alpha=alpha, keep_dtype=keep_dtype, allow_zero=allow_zero, drop=frozenset(drop or ()))


def _named(name: str, dry_run: bool) -> str:
    """The name; one in another spelling is asked about on a terminal. Raises InvalidRequest with the spelling as a hint."""
    adapter = name.rpartition(":")[2]
    slug = slug_of(adapter)
    if slug is None or dry_run or not is_terminal():
        if ":" not in name:
            check_adapter_name(name)
        return name
    err.print(f"`{adapter}` is no adapter name; names are lower case.")
    if not typer.confirm(f"publish as `{slug}`?", default=True, err=True):
        raise InvalidRequest("nothing was published", hint=f"--name {slug}")
    return name.removesuffix(adapter) + slug


def _tags(words: list[str]) -> dict[str, str | None]:
    tags = parse_tags(words)
    if None in tags.values():
        raise typer.BadParameter("a new version has no tag to take away; write `k=v`")
    return tags


def _metrics(words: list[str]) -> dict[str, float]:
    metrics = {}
    for word in words:
        key, _, value = word.partition("=")
        try:
            metrics[key] = float(value)
        except ValueError:
            raise typer.BadParameter(f"`{word}` is no metric; write `k=0.71`") from None
    return metrics


# Looking only


@app.command(rich_help_panel=PUBLISH, epilog="Example: loramux inspect ./my-adapter --base demo")
def inspect(
    folder: Source,
    base: Base = None,
    contract: Annotated[Path | None, typer.Option(help="Base contract file, for a machine without a registry.")] = None,
    strict: Strict = False,
    alpha: Alpha = None,
    allow_zero: AllowZero = False,
    keep_dtype: KeepDtype = False,
    drop: Drop = None,
    as_json: AsJson = False,
) -> None:
    """Say what publishing a folder would do, without a registry."""
    from adapters.inspect_command import inspect_folder

    options = usage(lambda: _options(strict, alpha, keep_dtype, allow_zero, drop))
    try:
        publishable = inspect_folder(folder, contract, as_json, base=base, options=options)
    except LoraMuxError as error:
        fail(error, as_json)
    sys.exit(0 if publishable else 1)


async def _inspection(registry: Any, wish: Wish, options: Any) -> tuple[Any, str, str | None]:
    """What would happen, and the version that holds this content already, if any."""
    from adapters.contract import inspect as inspect_contract
    from adapters.contract import opened
    from adapters.publishing import base_contract

    where = await find_name(registry, wish.name, wish.base)
    contract = await base_contract(registry, where.base)
    with opened(wish.folder, options.max_bytes) as folder:
        seen = await asyncio.to_thread(inspect_contract, folder, contract, options, base=where.base)
    entry = await registry.truth.entry(where.base, where.adapter)
    same = [number for number, version in entry.versions.items() if version.digest == seen.digest] if entry else []
    return seen, f"{where.base}:{where.adapter}", str(AdapterRef(where.base, where.adapter or "", same[0])) if same else None


def _show_inspection(inspection: Any, name: str, same: str | None, as_json: bool) -> NoReturn:
    from adapters.inspect_command import as_data as inspection_data
    from adapters.inspect_command import render

    if as_json:
        show(True, inspection_data(inspection) | {"dry_run": True, "same_as": same})
    else:
        for part in render(inspection, name):
            show(False, None, part)
        show(False, None, f"this content is {same} already" if same else None)
        if inspection.is_publishable:
            show(False, None, "nothing was written; next: the same command without --dry-run")
    sys.exit(0 if inspection.is_publishable else 1)
