"""A publisher in a process of its own that kills itself at a write: `python -m tests.dying_publisher <json>`.

The JSON holds `store` (its settings), `base`, `name`, `weights` (a file), `at` (a part of the key of that write) and `after`; it
exits with 0 if it never wrote such a key.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from adapters.registry import Registry
from adapters.settings import StoreSettings
from adapters.store import open_store
from adapters.types import PreparedAdapter
from tests.prepared import prepared


class KillingStore:
    """Passes all on to the store; the write of a key that contains `at` is the last thing that this process does, or the last
    but its effect."""

    def __init__(self, store: Any, at: str, after: bool) -> None:
        self._store, self._at, self._after = store, at, after

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        return self._watched(method) if name in ("create", "replace", "put", "delete") else method

    def _watched(self, method: Any) -> Any:
        async def write(key: str, *args: Any) -> Any:
            if self._at in key and not self._after:
                _die()
            result = await method(key, *args)
            if self._at in key:
                _die()
            return result

        return write

    async def put_stream(self, key: str, chunks: AsyncIterator[bytes]) -> str:
        """Before its effect is here in the middle of the stream."""
        dies = self._at in key
        etag = await self._store.put_stream(key, _cut(chunks) if dies and not self._after else chunks)
        if dies:
            _die()
        return etag


async def _cut(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for number, chunk in _numbered(chunks):
        if number == 1:
            _die()
        yield chunk


async def _numbered(chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    number = 0
    async for chunk in chunks:
        yield number, chunk
        number += 1


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def main(task: dict[str, Any]) -> None:
    store = KillingStore(open_store(StoreSettings.model_validate(task["store"])), task["at"], task["after"])
    await Registry(store).publish(task["base"], task["name"], _prepared(Path(task["weights"])))


def _prepared(weights: Path) -> PreparedAdapter:
    return prepared(weights.read_bytes(), weights)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
