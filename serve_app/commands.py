"""`loramux up` and `loramux down`."""

from __future__ import annotations

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
