"""The command `loramux`: the author commands are here, other packages add theirs through the entry points `loramux.commands`.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage.
"""

from adapters.cli import listing, moves, node_cache, placing, publish, residency, rollouts, trying, upkeep, versions
from adapters.cli.program import app, arrange, main

COMMANDS = (  # importing a module adds its commands
    listing,
    moves,
    node_cache,
    placing,
    publish,
    residency,
    rollouts,
    trying,
    upkeep,
    versions,
)

arrange()

__all__ = ["COMMANDS", "app", "main"]
