"""Adapters that lie in plain folders of an object store, as `aws s3 sync` or a trainer leaves them, become versions.

`find` looks, `adopt` publishes one folder, `DropWatcher` does both by itself for a watched prefix.
"""

from adapters.adoption.adopting import Adoption, adopt, source_settings
from adapters.adoption.candidates import LOOK_AGAIN_S, SETTLE_S, Candidate, find
from adapters.adoption.watcher import DropWatcher, Outcome

__all__ = [
    "LOOK_AGAIN_S",
    "SETTLE_S",
    "Adoption",
    "Candidate",
    "DropWatcher",
    "Outcome",
    "adopt",
    "find",
    "source_settings",
]
