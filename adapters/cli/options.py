"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adapters.cli.completion import complete_adapter, complete_alias, complete_base, complete_ref

Config = Annotated[Path | None, typer.Option("--config", help="Settings file; LORAMUX_CONFIG or loramux.yaml by default.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; adapters/README.md has its shape.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print ids only.")]
Base = Annotated[
    str | None,
    typer.Option("--base", help="Base id; may be left out when only one is known.", autocompletion=complete_base),
]
Message = Annotated[str | None, typer.Option("--message", "-m", help="Why; kept in the history.")]
IfRevision = Annotated[
    int | None, typer.Option("--if-revision", "--revision", help="Only if the adapter still has this revision.")
]
Unlock = Annotated[bool, typer.Option("--unlock", help="Move the alias although it is protected.")]
Alias = Annotated[str, typer.Option("--alias", help="Alias to move.", autocompletion=complete_alias)]
Name = Annotated[str, typer.Argument(help="Adapter: `name`, `team/name` or `base:name`.", autocompletion=complete_adapter)]
Ref = Annotated[
    str,
    typer.Argument(
        help="Version: `name@7`, `name@canary`, `name` for production; `base:` may stand before it.", autocompletion=complete_ref
    ),
]
Gateway = Annotated[
    str | None,
    typer.Option("--gateway", help="Address of a gateway; LORAMUX_GATEWAY_URL or the settings file's by default."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it, without asking.")]
