"""`loramux up`, `loramux down` and `loramux base-contract`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

STATE = Path(".loramux")

app = typer.Typer()


@app.command(epilog="Example: loramux up --config loramux.yaml")
def up(
    config: Annotated[Path, typer.Option(help="Settings file.")] = Path("loramux.yaml"),
    demo: Annotated[bool, typer.Option(help="Make and publish the demo base and adapters, and run a local store.")] = True,
) -> None:
    """Run everything here: store, Ray, gateway, bases. Ctrl-C ends all of it."""
    from serve_app.up import run

    run(config, STATE, demo=demo)


@app.command(epilog="Example: loramux down")
def down() -> None:
    """End what a crashed `loramux up` left running in this folder."""
    from serve_app.processes import RunFile

    count = RunFile(STATE / "run.json").stop_all()
    typer.echo(f"ended {count} processes" if count else "nothing was running")


@app.command("base-contract", epilog="Example: loramux base-contract ./Qwen3-8B --id qwen3-8b --publish")
def base_contract(
    source: Annotated[str, typer.Argument(help="Folder of the base, or its Hugging Face id.")],
    base: Annotated[str, typer.Option("--id", help="Id that the base will be served under.")],
    out: Annotated[Path | None, typer.Option(help="Write it into this file.")] = None,
    publish: Annotated[bool, typer.Option("--publish", help="Write it into the registry.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Also if the registry describes the base otherwise.")] = False,
    max_rank: Annotated[int | None, typer.Option(help="Largest rank; by default the settings' max_lora_rank, else 64.")] = None,
    vision: Annotated[bool | None, typer.Option(help="LoRA on the vision tower; by default as in the settings.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file; LORAMUX_CONFIG or loramux.yaml by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a base takes before it is served, so that adapters can be checked. Reads its config and its weights' headers."""
    from adapters.cli.output import fail, show, warn
    from adapters.errors import LoraMuxError
    from adapters.names import check_base_id
    from adapters.registry import Registry, codec
    from adapters.settings import read_registry_settings
    from adapters.store import open_store
    from serve_app.engine import base_contract as contracts

    if out and publish:
        raise typer.BadParameter("choose --out or --publish")
    try:
        check_base_id(base)
        registry = Registry(open_store(read_registry_settings(config))) if publish else None
        engine = contracts.engine_arguments(base, config, max_rank=max_rank, vision=vision)
        with contextlib.redirect_stdout(sys.stderr):  # the engine's modules like to talk
            described = contracts.describe(source, base, engine)
        contract = described.contract
        is_new = asyncio.run(contracts.publish(registry, contract, replace=replace)) if registry else True
    except LoraMuxError as error:
        fail(error, as_json)
    encoded = codec.encode_contract(contract)
    if out:
        out.write_bytes(encoded)
    for warning in described.warnings:
        warn(warning)
    takes = f"{len(contract.modules)} modules, rank up to {contract.max_rank}{', vision tower' * contract.serves_vision}"
    show(
        as_json or not (out or publish),
        json.loads(encoded),
        f"{'described' if is_new else 'already described so:'} {base}  ({contract.architecture}, {takes})",
        f"next: loramux inspect FOLDER {f'--contract {out}' if out else f'--base {base}'}",
    )
