"""Line: who waits for something that comes free now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class InLine(Protocol):
    """What stands in a line. `urgent` may become true while it waits."""

    urgent: bool


T = TypeVar("T", bound=InLine)


@dataclass(eq=False, slots=True)
class _Waiter(Generic[T]):
    who: T
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Line(Generic[T]):
    """The urgent first, each kind in its order of arrival; nobody overtakes an equal.

    `try_take(who)` says whether `who` got what it waits for; it must say no without awaiting anything, or a `wake` could be lost.
    """

    def __init__(self, try_take: Callable[[T], Awaitable[bool]]) -> None:
        self._try_take = try_take
        self._waiting: list[_Waiter[T]] = []

    def has_urgent(self) -> bool:
        return any(waiter.who.urgent for waiter in self._waiting)

    async def take(self, who: T) -> None:
        """Returns when `who` has got it; raises what `try_take` raises. Cancelling leaves the line."""
        if not self._must_wait(who) and await self._try_take(who):
            return
        waiter = _Waiter(who)
        self._waiting.append(waiter)
        try:
            while True:
                await waiter.turn
                if await self._try_take(who):
                    return
                waiter.turn = asyncio.get_running_loop().create_future()
        finally:
            self._waiting.remove(waiter)
            self.wake()

    def wake(self) -> None:
        """Something may have come free, or someone became urgent: the first in line tries."""
        first = self._first()
        if first is not None and not first.turn.done():
            first.turn.set_result(None)

    def _must_wait(self, who: T) -> bool:
        return self.has_urgent() if who.urgent else bool(self._waiting)

    def _first(self) -> _Waiter[T] | None:
        return next((waiter for waiter in self._waiting if waiter.who.urgent), self._waiting[0] if self._waiting else None)
