"""A scenario is run: peers one after another, their tiers set, requests sent on a schedule, every line written down."""

from loadtests.running.run import Outcome, Running, Tools, run

__all__ = ["Outcome", "Running", "Tools", "run"]
