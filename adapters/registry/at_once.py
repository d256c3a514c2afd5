"""Many small calls to a store, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def each(items: Iterable[T], work: Callable[[T], Awaitable[object]], at_once: int) -> None:
    """Works on `at_once` items at a time. Raises the first error; after it no more are begun."""
    gate = asyncio.Semaphore(at_once)

    async def one(item: T) -> None:
        async with gate:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for item in items:
                group.create_task(one(item))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
