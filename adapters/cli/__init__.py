"""The command `loramux`: the author commands are here, other packages add theirs through the entry points `loramux.commands`.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage.
"""

from adapters.cli import aliases, publish, versions
from adapters.cli.program import app, main

__all__ = ["aliases", "app", "main", "publish", "versions"]
