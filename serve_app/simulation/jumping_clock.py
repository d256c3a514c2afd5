"""An event loop that does not sleep: when nothing is left to do, its clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class JumpingLoop(asyncio.SelectorEventLoop):
    """Hours pass in milliseconds, the same way each time. Raises AssertionError when nothing will ever happen again."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._now_s

    def jump(self, seconds: float) -> None:
        self._now_s += seconds


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, Any]]:
        assert timeout is not None, "everybody waits for something that will never happen"
        self._loop.jump(timeout)
        return super().select(0)
