"""What the loop needs of others: who plays, who learns, who publishes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from training.runs.events import AdapterSaved
from training.trajectory import Sampling, Task, Trajectory


class Sampler(Protocol):
    """Plays episodes with the policy that it was last told to use. Equal policy, tasks and sampling give equal trajectories."""

    def use_adapter(self, folder: Path, policy_step: int) -> None: ...

    def use_base(self) -> None: ...

    def play(self, tasks: Sequence[Task], sampling: Sampling) -> list[Trajectory]: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class Learner(Protocol):
    """Holds the policy that is trained. With several processes each has one, and all call the same methods in the same order."""

    def update(self, trajectories: Sequence[Trajectory], *, step: int) -> dict[str, float]: ...

    def save_adapter(self, folder: Path) -> None: ...

    def save_state(self, folder: Path) -> None: ...

    def load_state(self, folder: Path) -> None: ...


class Publisher(Protocol):
    def offer(self, saved: AdapterSaved) -> None: ...

    def close(self, timeout_s: float) -> Any: ...
