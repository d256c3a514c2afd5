"""Pending: a load under way. Who waits for it, how long each stage took, when it gives up queueing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from adapters.names import AdapterRef
from adapters.types import ResolvedAdapter
from gateway.backend import Tier
from serve_app.slots.places import Slot

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Pending:
    """A load under way; only EngineSlots makes and changes it.

    `waiters` become the slot's users at the moment it is ready, so nothing can slip between. `urgent`: a request asked for it,
    or a promotion. It queues for `wait_s` at most, in all its queues together.
    """

    adapter: ResolvedAdapter
    tier: Tier
    wait_s: float
    clock_s: Callable[[], float]
    urgent: bool = False
    waiters: int = 0
    timings_ms: dict[str, float] = field(default_factory=dict)
    task: asyncio.Task[Slot] | None = None
    _since_s: float = 0.0
    _gives_up_at_s: float | None = None  # by the loop's clock, once it queues
    _limit: asyncio.Timeout | None = None

    def __post_init__(self) -> None:
        self._since_s = self.clock_s()

    @property
    def ref(self) -> AdapterRef:
        return self.adapter.ref

    @property
    def age_s(self) -> float:
        return self.clock_s() - self._since_s

    @property
    def queued_s(self) -> float:
        return self.timings_ms.get("queue", 0.0) / 1e3

    def hurry(self) -> None:
        """It is urgent now, and whoever makes it so waits as long as any other."""
        self.urgent = True
        if self._gives_up_at_s is not None:
            self._gives_up_at_s = asyncio.get_running_loop().time() + self.wait_s
        if self._limit is not None:
            self._limit.reschedule(self._gives_up_at_s)

    async def timed(self, stage: str, work: Coroutine[Any, Any, T]) -> T:
        """Does the work and adds its time to the stage's."""
        start_s = self.clock_s()
        try:
            return await work
        finally:
            self.timings_ms[stage] = self.timings_ms.get(stage, 0.0) + (self.clock_s() - start_s) * 1e3

    async def queue(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Waits, timed as `queue`. Raises TimeoutError when `wait_s` are over."""
        if self._gives_up_at_s is None:
            self._gives_up_at_s = asyncio.get_running_loop().time() + self.wait_s
        try:
            async with asyncio.timeout_at(self._gives_up_at_s) as self._limit:
                return await self.timed("queue", waiting)
        finally:
            self._limit = None
