"""The gateway's app watches the drop prefix while it lives, where one is configured."""

from __future__ import annotations

import asyncio
import contextlib

from fastapi import FastAPI

from adapters.adoption import DropWatcher
from adapters.registry import Registry
from adapters.settings import DropSettings, StoreSettings
from adapters.store import open_store


def watch_drop(app: FastAPI, registry: Registry, drop: DropSettings | None, like: StoreSettings) -> None:
    """Adds the watcher to the app's lifespan; without `drop` nothing happens. What `drop` leaves out is as in `like`.

    Raises InvalidRequest for an alias that is none, StoreMisconfigured for an address that is none.
    """
    if drop is None:
        return
    watcher = DropWatcher(registry, open_store(drop.store_settings(like)), drop)
    app.router.lifespan_context = _watching(app.router.lifespan_context, watcher)


def _watching(inner, watcher: DropWatcher):
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI):
        async with inner(app) as state:
            looking = asyncio.create_task(watcher.run())
            try:
                yield state
            finally:
                looking.cancel()

    return lifespan
