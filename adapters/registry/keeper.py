"""Repairs the index now and then: a writer that died between its manifest and its index row left it behind."""

from __future__ import annotations

import asyncio
import logging
import random

from adapters.errors import LoraMuxError
from adapters.registry.index import SweepReport
from adapters.registry.registry import Registry
from adapters.store import Store

log = logging.getLogger(__name__)


async def keep_index(registry: Registry, interval_s: float) -> None:
    """Sweeps about every `interval_s` until it is cancelled, at once for the first time; store trouble is survived.

    In a thread with a loop of its own: tens of thousands of listed rows would hold up the streams on this one.
    """
    while True:
        try:
            report = await asyncio.to_thread(_sweep, registry.store)
        except LoraMuxError as error:
            log.warning("the index could not be swept: %s", error)
        except Exception:
            log.exception("a sweep of the index failed")
        else:
            if report.repaired:
                log.warning("the index was behind in %d adapters and is repaired", len(report.repaired))
        # spread, so that many processes that started together don't list together
        await asyncio.sleep(interval_s * random.uniform(0.5, 1.5))


def _sweep(store: Store) -> SweepReport:
    return asyncio.run(Registry(store).sweep())
