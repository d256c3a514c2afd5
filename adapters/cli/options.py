"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path | None, typer.Option("--config", help="Settings file; LORAMUX_CONFIG or loramux.yaml by default.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Base = Annotated[str | None, typer.Option("--base", help="Base id; may be left out when only one base is known.")]
Message = Annotated[str | None, typer.Option("--message", "-m", help="Why; kept in the history.")]
IfRevision = Annotated[
    int | None, typer.Option("--if-revision", "--revision", help="Only if the adapter still has this revision.")
]
Alias = Annotated[str, typer.Option("--alias", help="Alias to move.")]
Name = Annotated[str, typer.Argument(help="Adapter: `name`, `team/name` or `base:name`.")]
