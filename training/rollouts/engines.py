"""Rollouts: the engines of a run, each in a process of its own, with whole groups dealt out among them.

An engine is never in the trainer's process, not even a lone one: vLLM takes the process group, the number of threads and torch's
random state for its own, and a learner needs all three.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from training.rollouts.errors import REFUSED, EngineDied
from training.rollouts.playing import groups
from training.rollouts.settings import engine_environment, engine_settings
from training.spec import TrainSpec
from training.trajectory import Sampling, Task, Trajectory

LAST_BYTES = 2000
CLOSE_S = 10.0


class Rollouts:
    """Plays tasks with the policy that it was last told to use: the base at first. Equal policy, tasks, sampling and number of
    engines give equal trajectories, token by token and log-prob by log-prob on CPUs, whatever was played before.

    Whatever raises EngineDied leaves nothing to go on with: `close` it. Starting takes as long as an engine does, all at once.
    """

    def __init__(self, spec: TrainSpec, *, worker: Sequence[str] = (sys.executable, "-m", "training.rollouts.worker")) -> None:
        device = device_of(spec)
        settings = engine_settings(spec, device)
        self._engines: list[EngineProcess] = []
        self._metrics: dict[str, float] = {}
        self._broken = ""
        try:
            for index in range(spec.generator.inference_engine.num_engines):
                environment = engine_environment(spec, index, device, os.environ)
                self._engines.append(EngineProcess(index, worker, environment))
            self._all("start", settings)
        except BaseException:
            self.close()
            raise
        self._can_sleep = settings.can_sleep

    def use_adapter(self, folder: Path, policy_step: int) -> None:
        """From now on the adapter in `folder` plays, which need not stay there; its trajectories say `policy_step`. Raises
        BadAdapter: the base plays then."""
        try:
            self._all("use_adapter", Path(folder).absolute(), policy_step)
        except REFUSED:
            self.use_base()
            raise

    def use_base(self) -> None:
        """From now on the base plays, as policy step 0."""
        self._all("use_base")

    def play(self, tasks: Sequence[Task], sampling: Sampling) -> list[Trajectory]:
        """Each task's episode, in the order of `tasks`. Raises BadRollout and EngineDied; there is all or nothing."""
        began = time.monotonic()
        dealt = deal(tasks, len(self._engines))
        told = {index: ([tasks[place] for place in places], sampling) for index, places in enumerate(dealt) if places}
        results = self._tell("play", told)
        found: dict[int, Trajectory] = {}
        for index, (played, _) in results.items():
            found |= dict(zip(dealt[index], played, strict=True))
        self._metrics = {
            "timing/rollouts/play_s": time.monotonic() - began,
            "timing/rollouts/engine_s": max((seconds for _, seconds in results.values()), default=0.0),
        }
        return [found[place] for place in range(len(tasks))]

    def metrics(self) -> dict[str, float]:
        """Of the last `play`: its seconds, and those that the slowest engine spent in vLLM. `can_sleep` is 0 where engines keep
        their memory, since it is no learner's (CPUs, GPUs of their own): `sleep` does nothing then."""
        return {**self._metrics, "rollouts/engines": float(len(self._engines)), "rollouts/can_sleep": float(self._can_sleep)}

    def sleep(self) -> None:
        """Gives the engines' GPU memory back."""
        self._all("sleep")

    def wake(self) -> None:
        self._all("wake")

    def close(self) -> None:
        """Ends the engines; fine at any time, and more than once."""
        for engine in self._engines:
            engine.hang_up()
        for engine in self._engines:
            engine.end()
        self._engines = []

    def _all(self, name: str, *arguments: Any) -> None:
        self._tell(name, dict.fromkeys(range(len(self._engines)), arguments))

    def _tell(self, name: str, told: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Tells engines at once; waits for all. What one of them refused is raised once all have answered. Whoever was
        interrupted in between does not know who has answered what."""
        if self._broken:
            raise EngineDied(self._broken)
        try:
            for index, arguments in told.items():
                self._engines[index].tell(name, arguments)
            results = {index: self._engines[index].answer(name) for index in told}
        except BaseException as error:
            self._broken = str(error) or f"interrupted at {name} by {type(error).__name__}"
            raise
        for result in results.values():
            if isinstance(result, REFUSED):
                raise result
        return results


def deal(tasks: Sequence[Task], engines: int) -> list[list[int]]:
    """For each engine the places in `tasks` that it plays: whole groups, each to whoever has fewest so far."""
    dealt: list[list[int]] = [[] for _ in range(engines)]
    for group in groups(tasks):
        min(dealt, key=len).extend(group)
    return dealt


def device_of(spec: TrainSpec) -> str:
    if spec.loramux.device != "auto":
        return spec.loramux.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class EngineProcess:
    """One engine's process, and the way to talk to it. What it prints is kept for when it dies."""

    def __init__(self, index: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name = f"engine {index}"
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as the process is
        ours, theirs = socket.socketpair()
        watched, self._lifeline = os.pipe()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(watched)],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), watched),
            )
        os.close(watched)
        self._connection = Connection(ours.detach())

    def tell(self, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            self._connection.send((name, arguments))
        except OSError as error:
            raise self._died(name) from error

    def answer(self, name: str) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._died(name) from error
        if isinstance(answer, EngineDied):
            raise EngineDied(f"{self._name} failed at {name}: {answer}")
        return answer

    def _died(self, name: str) -> EngineDied:
        try:
            how = f"exit status {self._process.wait(CLOSE_S)}"
        except subprocess.TimeoutExpired:
            how = "it still runs, but does not answer"
        end = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, end - LAST_BYTES))
        last = self._said.read().decode(errors="replace").strip()
        return EngineDied(f"{self._name} died at {name} ({how}); its last words: {last or 'none'}")

    def hang_up(self) -> None:
        """It ends as soon as it notices, also in the middle of something."""
        self._connection.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def end(self) -> None:
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()
