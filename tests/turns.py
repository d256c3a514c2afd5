"""A store whose callers take turns as a test decides: every interleaving of two processes can be played, again and again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from adapters.store import Listed, Object, Store

T = TypeVar("T")


class Death(Exception):
    """The process died."""


class Turns:
    """Lets one of the processes that wait make its next call; which one is drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def play(self, works: dict[str, Awaitable[object]]) -> dict[str, object]:
        """Runs the works to their ends; returns what each returned, or the error that it raised."""
        tasks = {name: asyncio.ensure_future(work) for name, work in works.items()}
        while not all(task.done() for task in tasks.values()):
            await self._until_all_wait(tasks)
            if self._waiting:
                self._waiting.pop(self._random.choice(sorted(self._waiting))).set_result(None)
        results = await asyncio.gather(*tasks.values(), return_exceptions=True)
        return dict(zip(tasks, results, strict=True))

    async def _until_all_wait(self, tasks: dict[str, asyncio.Future[object]]) -> None:
        for _ in range(200):  # a process may compute, or wait for something else than the store
            if all(task.done() or name in self._waiting for name, task in tasks.items()):
                return
            await asyncio.sleep(0)

    async def wait(self, name: str) -> None:
        self._waiting[name] = asyncio.get_running_loop().create_future()
        await self._waiting[name]


class TurnStore:
    """One process' way to the store; its calls wait for their turn. It dies at call number `dies_at`, before or after the
    call's effect."""

    def __init__(self, store: Store, turns: Turns, name: str, *, dies_at: int | None = None, after: bool = False) -> None:
        self._store, self._turns, self._name = store, turns, name
        self._dies_at, self._after = dies_at, after
        self._one_at_a_time = asyncio.Lock()
        self.calls = 0

    async def get(self, key: str) -> Object:
        return await self._call(lambda: self._store.get(key))

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        return await self._call(lambda: self._store.get_range(key, start, length))

    async def stat(self, key: str) -> Listed:
        return await self._call(lambda: self._store.stat(key))

    async def create(self, key: str, data: bytes) -> str:
        return await self._call(lambda: self._store.create(key, data))

    async def replace(self, key: str, data: bytes, etag: str) -> str:
        return await self._call(lambda: self._store.replace(key, data, etag))

    async def put(self, key: str, data: bytes) -> str:
        return await self._call(lambda: self._store.put(key, data))

    async def delete(self, key: str) -> None:
        await self._call(lambda: self._store.delete(key))

    async def list(self, prefix: str) -> AsyncIterator[Listed]:
        async def rows() -> list[Listed]:
            return [row async for row in self._store.list(prefix)]

        for row in await self._call(rows):
            yield row

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        async with self._one_at_a_time:
            await self._turns.wait(self._name)
            self.calls += 1
            dies = self._dies_at is not None and self.calls >= self._dies_at
            if dies and not (self._after and self.calls == self._dies_at):
                raise Death
            result = await call()
            if dies:
                raise Death
            return result
