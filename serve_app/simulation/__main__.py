"""`python -m serve_app.simulation policies|placement|thrash`: prints the tables of serve_app/README.md."""

from __future__ import annotations

import logging
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


if __name__ == "__main__":
    app()
