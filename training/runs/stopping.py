"""Ctrl-C and SIGTERM: the first asks a run to end after the step in flight, a second one ends it where it is."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


class Stopping:
    """`asked` is what a loop looks at."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._asked = False

    def asked(self) -> bool:
        return self._asked

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """From here on, until the end of the block."""
        before = {number: signal.signal(number, self._heard) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, number: int, _: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        self._say("ending after the step in flight, with a checkpoint; once more ends it now")
