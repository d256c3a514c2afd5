"""Commands that make versions: publish, and inspect, which only looks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from adapters.cli.options import AsJson, Base, Config, Message
from adapters.cli.output import fail, progress_bar, size
from adapters.cli.output import show as show_output
from adapters.cli.program import PUBLISH, app
from adapters.cli.work import find_name, run, who
from adapters.errors import LoraMuxError
from adapters.names import PRODUCTION


@app.command(rich_help_panel=PUBLISH, epilog="Example: loramux publish ./my-adapter --name sql --base demo --promote")
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
        where = await find_name(registry, name, base)
        if dry_run:
            return await _inspection(registry, folder, where.base, options)
        with progress_bar("publishing", not as_json) as progress:
            publication = Publication(
                where.base, where.adapter or "", folder, promote=alias if promote else None, message=message, who=who()
            )
            return await publish_folder(registry, publication, options, progress)

    result = run(config, work)
    if dry_run:
        _show_inspection(result, name, as_json)
    ref, manifest = result.ref, result.manifest
    show_output(
        as_json,
        {"ref": str(ref), "created": result.created, "manifest": manifest},
        f"{'published' if result.created else 'already there, unchanged:'} {ref}  "
        f"(rank {manifest.rank}, {size(manifest.size_bytes)}, {manifest.digest[:12]})",
        *(f"warning: {warning}" for warning in manifest.warnings),
        f"next: loramux promote {ref.base}:{ref.name} {ref.version}" if not promote else f"{alias} is now version {ref.version}",
    )


@app.command(rich_help_panel=PUBLISH, epilog="Example: loramux inspect ./my-adapter --base demo")
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


async def _inspection(registry: Any, folder: Path, base: str, options: Any) -> Any:
    from adapters.contract import inspect as inspect_contract
    from adapters.publishing import base_contract

    return inspect_contract(folder, await base_contract(registry, base), options, base=base)


def _show_inspection(inspection: Any, name: str, as_json: bool) -> NoReturn:
    from adapters.inspect_command import as_data, render

    show_output(as_json, as_data(inspection), *render(inspection, name))
    sys.exit(0 if inspection.is_publishable else 1)
