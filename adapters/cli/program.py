"""The app and the program: our commands, then those that other packages add through the entry points `loramux.commands`."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import typer

PUBLISH = "Publish"
VERSIONS = "Versions"
ALIASES = "Aliases"
PLACES = "Places"
TRY = "Try"
UPKEEP = "Upkeep"
RUN = "Run"
PANELS = (PUBLISH, VERSIONS, ALIASES, PLACES, TRY, UPKEEP, RUN)  # the order of the help

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="LoraMux: publish adapters, move aliases, try them, run everything.",
)


def main() -> None:
    """The program: commands of ours, then those that other packages add."""
    for extra in entry_points(group="loramux.commands"):
        _add_commands(extra)
    app()


def arrange() -> None:
    """Puts the commands into the order of their panels."""
    app.registered_commands.sort(key=lambda command: PANELS.index(command.rich_help_panel))


def _add_commands(extra: Any) -> None:
    """Another package's commands and groups. Each is a typer app; importing it is cheap, its work is imported when it runs."""
    more = extra.load()
    for command in (*more.registered_commands, *more.registered_groups):
        if not isinstance(command.rich_help_panel, str):
            command.rich_help_panel = RUN
    app.registered_commands.extend(more.registered_commands)
    app.registered_groups.extend(more.registered_groups)
