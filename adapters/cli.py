"""The command `loramux`: the author commands are here, other packages add theirs through the entry points `loramux.commands`.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import getpass
import json
import sys
from collections.abc import Callable, Coroutine, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from adapters.errors import LoraMuxError
from adapters.names import PRODUCTION, AdapterRef, ModelName, check_adapter_name, parse_model_name
from adapters.settings import RegistrySettings, read_registry_settings
from adapters.types import By

app = typer.Typer(no_args_is_help=True, add_completion=False, help="LoraMux: publish adapters, move aliases, run the demo.")
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

Config = Annotated[Path | None, typer.Option("--config", help="Settings file; LORAMUX_CONFIG or loramux.yaml by default.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Base = Annotated[str | None, typer.Option("--base", help="Base id; may be left out when only one base is known.")]
Message = Annotated[str | None, typer.Option("--message", "-m", help="Why; kept in the history.")]
Revision = Annotated[int | None, typer.Option("--revision", help="Only if the adapter still has this revision.")]
Alias = Annotated[str, typer.Option(help="Alias to move.")]
Name = Annotated[str, typer.Argument(help="Adapter: `name`, `team/name` or `base:name`.")]


@app.command(epilog="Example: loramux publish ./my-adapter --name sql --base demo --promote")
def publish(
    folder: Annotated[Path, typer.Argument(help="PEFT folder with adapter_config.json and adapter_model.safetensors.")],
    name: Annotated[str, typer.Option(help="Adapter name.")],
    base: Base = None,
    promote: Annotated[bool, typer.Option("--promote", help="Make it the production version.")] = False,
    alias: Annotated[str, typer.Option(help="Alias that --promote moves.")] = PRODUCTION,
    message: Message = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse what would have to be rewritten.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")] = False,
    alpha: Annotated[float | None, typer.Option(help="Use this lora_alpha instead of the config's.")] = None,
    allow_zero: Annotated[bool, typer.Option("--allow-zero", help="Publish even if it changes nothing.")] = False,
    keep_dtype: Annotated[bool, typer.Option("--keep-dtype", help="Keep float32 instead of bfloat16.")] = False,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Publish a PEFT folder as a new version."""
    from adapters.contract import PublishOptions
    from adapters.publishing import Publication, publish_folder

    options = PublishOptions(strict=strict, alpha=alpha, allow_zero=allow_zero, keep_dtype=keep_dtype)

    async def work(registry: Any) -> Any:
        where = await _name(registry, name, base)
        if dry_run:
            return await _inspection(registry, folder, where.base, options)
        with _progress(not as_json) as progress:
            publication = Publication(
                where.base, where.adapter or "", folder, promote=alias if promote else None, message=message, who=_who()
            )
            return await publish_folder(registry, publication, options, progress)

    result = _run(config, work)
    if dry_run:
        _show_inspection(result, name, as_json)
    ref, manifest = result.ref, result.manifest
    _print(
        as_json,
        {"ref": str(ref), "created": result.created, "manifest": manifest},
        f"{'published' if result.created else 'already there, unchanged:'} {ref}  "
        f"(rank {manifest.rank}, {_size(manifest.size_bytes)}, {manifest.digest[:12]})",
        *(f"warning: {warning}" for warning in manifest.warnings),
        f"next: loramux promote {ref.base}:{ref.name} {ref.version}" if not promote else f"{alias} is now version {ref.version}",
    )


@app.command("list", epilog="Example: loramux list --json")
def list_adapters(base: Base = None, config: Config = None, as_json: AsJson = False) -> None:
    """List adapters with their production versions."""

    async def work(registry: Any) -> Any:
        view = await _view(registry)
        return [entry for entry in view.adapters() if base in (None, entry.base)]

    entries = _run(config, work)
    table = Table("ADAPTER", "PRODUCTION", "NEWEST", "VERSIONS", "RANK", "SIZE", box=None, pad_edge=False)
    for entry in entries:
        newest = entry.versions[max(entry.versions)]
        table.add_row(
            f"{entry.base}:{entry.name}",
            str(entry.production or "-"),
            str(newest.version),
            str(len(entry.versions)),
            str(newest.rank),
            _size(newest.size_bytes),
        )
    empty = "no adapters yet; next: loramux publish FOLDER --name NAME --base BASE --promote"
    _print(as_json, {"adapters": entries}, table if entries else empty)


@app.command(epilog="Example: loramux show parrot")
def show(name: Name, base: Base = None, config: Config = None, as_json: AsJson = False) -> None:
    """Show one adapter: versions, aliases and who moved them."""

    async def work(registry: Any) -> Any:
        where = await _name(registry, name, base)
        head = await registry.head(where.base, where.adapter)
        versions = await registry.versions(where.base, where.adapter)
        manifests = [await registry.manifest(AdapterRef(where.base, where.adapter, number)) for number in versions]
        return head, manifests

    head, manifests = _run(config, work)
    table = Table("VERSION", "ALIASES", "RANK", "SIZE", "DIGEST", "PUBLISHED", "BY", "MESSAGE", box=None, pad_edge=False)
    for manifest in reversed(manifests):
        number = manifest.ref.version
        aliases = [alias for alias, version in head.aliases.items() if version == number]
        aliases += ["retired"] if number in head.retired else []
        table.add_row(
            str(number),
            ", ".join(aliases),
            str(manifest.rank),
            _size(manifest.size_bytes),
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
    _print(as_json, {"head": head, "versions": manifests}, f"{head.base}:{head.name}  revision {head.revision}", table, *history)


@app.command(epilog="Example: loramux promote parrot 2 -m 'better rhymes'")
def promote(
    name: Name,
    version: Annotated[int, typer.Argument(help="Version that the alias will name.")],
    alias: Alias = PRODUCTION,
    message: Message = None,
    revision: Revision = None,
    base: Base = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Move an alias to a version."""

    async def work(registry: Any) -> Any:
        where = await _name(registry, name, base)
        return await registry.promote(
            where.base, where.adapter, alias, version, By(_who(), message, revision)
        )

    head = _run(config, work)
    _moved(as_json, head, alias, "promoted", f"undo: loramux rollback {head.base}:{head.name}")


@app.command(epilog="Example: loramux rollback parrot")
def rollback(
    name: Name,
    to: Annotated[int | None, typer.Option(help="Version to go back to; the one that was live before by default.")] = None,
    alias: Alias = PRODUCTION,
    message: Message = None,
    revision: Revision = None,
    base: Base = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Move an alias back to a version that was live before."""

    async def work(registry: Any) -> Any:
        where = await _name(registry, name, base)
        return await registry.rollback(
            where.base, where.adapter, alias, to=to, by=By(_who(), message, revision)
        )

    head = _run(config, work)
    _moved(as_json, head, alias, "rolled back", f"see: loramux show {head.base}:{head.name}")


@app.command(epilog="Example: loramux inspect ./my-adapter --base demo")
def inspect(
    folder: Annotated[Path, typer.Argument(help="PEFT folder.")],
    base: Base = None,
    contract: Annotated[Path | None, typer.Option(help="Base contract file, for a machine without a registry.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what publishing a folder would do, without a registry."""
    from adapters.inspect_command import inspect_folder

    try:
        publishable = inspect_folder(folder, contract, as_json, base=base)
    except LoraMuxError as error:
        fail(error)
    sys.exit(0 if publishable else 1)


def main() -> None:
    """The program: commands of ours, then those that other packages add."""
    for extra in entry_points(group="loramux.commands"):
        _add_commands(extra)
    app()


def _add_commands(extra: Any) -> None:
    """Another package's commands. Each is a typer app; importing it is cheap, its work is imported when it runs."""
    for command in extra.load().registered_commands:
        app.registered_commands.append(command)


def _run(config: Path | None, work: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    """Opens the registry, runs the work, turns our errors into an exit code."""
    from adapters.registry import Registry
    from adapters.store import open_store

    async def run() -> Any:
        return await work(Registry(open_store(_settings(config))))

    try:
        return asyncio.run(run())
    except LoraMuxError as error:
        fail(error)


def _settings(config: Path | None) -> RegistrySettings:
    return read_registry_settings(config)


def fail(error: LoraMuxError) -> NoReturn:
    """What went wrong, the value against the limit, what to do."""
    err.print(f"[red]{error.code}[/red]{f' ({error.reason})' if error.reason else ''}: {error.message}")
    if error.limit is not None or error.value is not None:
        err.print(f"  limit {error.limit}, value {error.value}")
    if error.hint:
        err.print(f"  {error.hint}")
    sys.exit(1)


async def _name(registry: Any, name: str, base: str | None) -> ModelName:
    """`name` or `base:name`; the base may be left out when the registry knows exactly one."""
    from adapters.errors import InvalidRequest

    if ":" in name:
        return parse_model_name(name)
    check_adapter_name(name)
    if base is None:
        known = await registry.bases()
        if len(known) != 1:
            raise InvalidRequest(f"which base? {', '.join(sorted(known)) or 'none was served yet'}", hint="pass --base")
        base = known[0]
    return ModelName(base, name, alias=PRODUCTION)


async def _view(registry: Any) -> Any:
    from adapters.registry.view import RegistryView

    view = RegistryView(registry, poll_interval_s=1)
    await view.refresh()
    return view


async def _inspection(registry: Any, folder: Path, base: str, options: Any) -> Any:
    from adapters.contract import inspect as inspect_contract
    from adapters.publishing import base_contract

    return inspect_contract(folder, await base_contract(registry, base), options, base=base)


def _show_inspection(inspection: Any, name: str, as_json: bool) -> NoReturn:
    from adapters.inspect_command import as_data, render

    _print(as_json, as_data(inspection), *render(inspection, name))
    sys.exit(0 if inspection.is_publishable else 1)


def _moved(as_json: bool, head: Any, alias: str, verb: str, following: str) -> None:
    text = f"{verb}: {alias} of {head.base}:{head.name} is now version {head.aliases[alias]} (revision {head.revision})"
    _print(as_json, {"head": head}, text, following)


@contextlib.contextmanager
def _progress(wanted: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on a terminal, nothing elsewhere."""
    if not wanted or not err.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    with Progress("publishing", BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=err, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda sent, total: bar.update(task, completed=sent, total=total)


def _print(as_json: bool, value: Any, *lines: Any) -> None:
    if as_json:
        sys.stdout.write(json.dumps(value, default=_plain) + "\n")
        return
    for line in lines:
        out.print(line)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: str(item) if isinstance(item, AdapterRef) else item for name, item in fields.items()}
    if isinstance(value, (set, frozenset, tuple)):
        return sorted(value) if isinstance(value, (set, frozenset)) else list(value)
    return str(value)


def _who() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
