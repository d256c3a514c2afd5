"""A run with a publisher in a process of its own that kills itself at a write: `python -m tests.dying_run <json>`.

The JSON holds `store` (its settings), `exports` (pairs of an export's folder and its solve rate), `at` (a part of the key of that
write) and `after`; it exits with 0 if it never wrote such a key.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from adapters.registry import Registry
from adapters.settings import StoreSettings
from adapters.store import open_store
from tests.dying_publisher import KillingStore
from tests.exported_runs import origin, saved, target
from training.publishing import Publisher

if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    store = KillingStore(open_store(StoreSettings.model_validate(task["store"])), task["at"], task["after"])
    publisher = Publisher(lambda: Registry(store), target(), origin())
    for folder, rate in task["exports"]:
        publisher.offer(saved(Path(folder), rate))
    publisher.close(60)
