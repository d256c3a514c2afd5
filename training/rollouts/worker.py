"""The process of one engine: `python -m training.rollouts.worker SOCKET LIFELINE`, file descriptors that `engines` hands on.

It does what it is told, one thing after the other, and ends when nobody is there any more to tell it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from training.rollouts.conversation import Wording
from training.rollouts.errors import REFUSED, EngineDied
from training.rollouts.playing import play
from training.rollouts.settings import EngineSettings
from training.trajectory import Sampling, Task, Trajectory


class Worker:
    """What `Engines` tells it to do, by the names of its methods; `start` first."""

    @classmethod
    def start(cls, settings: EngineSettings) -> Worker:
        return cls(settings)

    def __init__(self, settings: EngineSettings) -> None:
        from training.rollouts.engine import VllmEngine

        self._engine = VllmEngine(settings)
        self._wording = Wording(self._engine.tokenizer, settings.template_kwargs)
        self._rules = settings.rules
        self._policy_step = 0

    def use_adapter(self, folder: Path, policy_step: int) -> None:
        self._engine.use_adapter(folder, policy_step)
        self._policy_step = policy_step

    def use_base(self) -> None:
        self._engine.use_base()
        self._policy_step = 0

    def play(self, tasks: Sequence[Task], sampling: Sampling) -> tuple[list[Trajectory], float]:
        """Trajectories, and how many seconds of it the engine took."""
        before = self._engine.seconds
        played = play(self._engine, self._wording, self._rules, tasks, sampling, self._policy_step)
        return played, self._engine.seconds - before

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()


def main(kind: Any = Worker) -> int:
    socket, lifeline = map(int, sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):  # a group's are for whoever tells this process what to do; it ends with them
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    connection = Connection(socket)
    worker = kind
    while (told := _told(connection)) is not None:
        name, arguments = told
        try:
            result = getattr(worker, name)(*arguments)
        except REFUSED as error:
            result = error
        except BaseException as error:  # noqa: BLE001 - whatever it is, nothing is known of the engine after it
            traceback.print_exc()
            connection.send(EngineDied(f"{type(error).__name__}: {error}"))
            return 1
        else:
            if name == "start":
                worker, result = result, None
        connection.send(result)
    return 0


def _told(connection: Connection) -> tuple[str, tuple[Any, ...]] | None:
    try:
        told: tuple[str, tuple[Any, ...]] = connection.recv()
    except EOFError:
        return None
    return told


def _end_with(lifeline: int) -> None:
    """Nothing is ever written there: it can be read as soon as the other side is gone, however it went."""
    os.read(lifeline, 1)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
