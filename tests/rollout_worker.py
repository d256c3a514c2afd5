"""An engine's process without an engine, for tests: `python -m tests.rollout_worker SOCKET LIFELINE`.

It plays at once, and what it plays tells which process did. Mazes of some seeds are its undoing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.rollouts.errors import BadAdapter, BadRollout
from training.rollouts.worker import main
from training.trajectory import Sampling, Task, Trajectory

DIES, FAILS, REFUSES, TAKES_LONG = 666, 500, 400, 1000


class Stub:
    @classmethod
    def start(cls, settings: Any) -> Stub:
        if settings.arguments["seed"] == FAILS:
            raise RuntimeError("no such device")
        return cls()

    def __init__(self) -> None:
        self._policy_step = 0

    def use_adapter(self, folder: Path, policy_step: int) -> None:
        if not folder.exists():
            raise BadAdapter(f"{folder} has no adapter_config.json")
        self._policy_step = policy_step

    def use_base(self) -> None:
        self._policy_step = 0

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def play(self, tasks: Sequence[Task], sampling: Sampling) -> tuple[list[Trajectory], float]:
        return [self._played(task) for task in tasks], 0.5

    def _played(self, task: Task) -> Trajectory:
        if task.maze_seed == DIES:
            print("out of luck", flush=True)
            os._exit(3)
        if task.maze_seed == FAILS:
            raise RuntimeError("no memory left")
        if task.maze_seed == REFUSES:
            raise BadRollout("the prompt is too long")
        if task.maze_seed == TAKES_LONG:
            time.sleep(600)
        return Trajectory(task, self._policy_step, (os.getpid(),), 1, (), (), (), (), (), 0.0, False, "turns")


if __name__ == "__main__":
    sys.exit(main(Stub))
