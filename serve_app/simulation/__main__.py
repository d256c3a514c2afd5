"""`python -m serve_app.simulation policies|placement|thrash`: prints the tables of serve_app/README.md. `plan` answers a question
about sizes."""

from __future__ import annotations

import json
import logging
import sys
from typing import Annotated

import typer

app = typer.Typer()


@app.callback()
def about() -> None:
    """What production's decisions do on made-up traces, without an engine."""


@app.command()
def policies(requests: Annotated[int, typer.Option(help="Requests in each trace.")] = 20_000) -> None:
    """Which slot and which file goes, beside other rules and the optimum. Some minutes on one core."""
    from serve_app.simulation import policies as tables

    for title, lines in (
        ("Slots: requests that miss", tables.slots_table(requests)),
        ("Our rule with other half-lives", tables.half_lives_table(requests)),
        ("Disk: leases that fetch", tables.disk_table(requests)),
    ):
        typer.echo(f"{title}\n")
        for line in lines:
            typer.echo(line)
        typer.echo()


@app.command()
def placement(
    requests: Annotated[int, typer.Option(help="Requests in each run, at least; 400 for each replica if that is more.")] = 40_000,
    replicas: Annotated[list[int], typer.Option(help="Numbers of replicas; each has a hundred adapters.")] = [10, 100, 1000],  # noqa: B006
    exponent: Annotated[list[float], typer.Option(help="Exponents of Zipf.")] = [0.9, 1.2],  # noqa: B006
    gateways: Annotated[int, typer.Option(help="Gateways, each with a router of its own.")] = 1,
) -> None:
    """Where requests go, beside Ray's multiplexing. Some minutes on one core."""
    from serve_app.simulation.placement import table

    for line in table(requests, tuple(replicas), tuple(exponent), gateways):
        typer.echo(line)


@app.command()
def thrash(requests: Annotated[int, typer.Option(help="Requests in each run.")] = 5_000) -> None:
    """More busy adapters than an engine has places. Seconds."""
    from serve_app.simulation.thrash import table

    alarms = logging.getLogger("serve_app.slots.engine_slots")
    level = alarms.level
    alarms.setLevel(logging.ERROR)  # the thrash alarm would come each minute of the clock that jumps
    try:
        for line in table(requests):
            typer.echo(line)
    finally:
        alarms.setLevel(level)


@app.command()
def plan(as_json: Annotated[bool, typer.Option("--json", help="Print JSON, errors too.")] = False) -> None:
    """What to expect of slots, replicas and disks: a `sizing.Question` as JSON on stdin."""
    from pydantic import ValidationError

    from serve_app.simulation import sizing

    try:
        question = sizing.Question.model_validate_json(sys.stdin.read())
    except ValidationError as error:
        lines = list(sizing.faults(error.errors()))
        typer.echo(json.dumps({"error": {"message": "; ".join(lines)}}) if as_json else "\n".join(lines), err=True)
        raise typer.Exit(2) from None
    expected = sizing.expect(question)
    if as_json:
        typer.echo(expected.model_dump_json())
        return
    for line in sizing.table(expected):
        typer.echo(line)


if __name__ == "__main__":
    app()
