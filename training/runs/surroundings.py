"""What a run has around it that is not the policy: other processes, time, a publisher, who watches, who may stop it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from training.runs.protocols import Publisher
from training.runs.ranks import Alone, Ranks


@dataclass(frozen=True, slots=True)
class Machine:
    """`devices` of the kind `device` (`cpu`, `cuda`) are held all the while; `start_up_s` had passed when the loop began."""

    device: str = "cpu"
    devices: int = 1
    start_up_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """`stop` is asked after each step, `phase` told what begins; `sleep_s` waits, `clock_s` counts up."""

    ranks: Ranks = field(default_factory=Alone)
    publisher: Publisher | None = None
    machine: Machine = field(default_factory=Machine)
    stop: Callable[[], bool] = lambda: False
    phase: Callable[[str], None] = lambda name: None
    sleep_s: Callable[[float], None] = time.sleep
    clock_s: Callable[[], float] = time.monotonic

    def stopping(self) -> bool:
        return self.ranks.shared(self.stop())

    @contextlib.contextmanager
    def timed(self, seconds: dict[str, float], name: str) -> Iterator[None]:
        """Adds what passes to the part of that name."""
        self.phase(name)
        began_s = self.clock_s()
        yield
        seconds[name] = seconds.get(name, 0.0) + self.clock_s() - began_s
