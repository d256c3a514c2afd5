"""`python -m tests.killed_runs OUT KILLS`: runs that are killed and taken up again, each in a process of its own.

A kill is a SIGKILL before the n-th thing that a process does to the file system (or the n-th part that the learner writes of its
state), so that it also comes in the middle of a checkpoint. Prints a JSON line a run: where it was killed, what it ended with.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.scripted_run import ScriptedLearner, ScriptedSampler, plan_in
from training.runs.events import EventLog
from training.runs.loop import Loop

# What Python tells of as it happens (sys.addaudithook): all that changes what a later process finds.
TOUCHING = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "scripted.part-written"}


def main(out: Path, kills: int) -> None:
    whole = out / "alone"
    touched = _in_child(lambda: _run(whole), kill_at=None)
    _tell({"kills": [], "adapter": _digest(whole), "touched": touched})
    dice = random.Random(7)
    for number in range(kills):
        folder = out / f"killed-{number}"
        at = [dice.randrange(1, touched)]
        while _in_child(lambda folder=folder: _run(folder), kill_at=at[-1]) is None:
            at.append(dice.randrange(1, touched))
        _tell({"kills": at, "adapter": _digest(folder), "left": sorted(_left(folder))})


def _run(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    Loop(plan_in(folder), ScriptedSampler(), ScriptedLearner(), EventLog(folder / "events.jsonl")).run()


def _in_child(act: Callable[[], None], kill_at: int | None) -> int | None:
    """How often it touched the file system; None if it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        counted = [0]

        def count(event: str, _: object) -> None:
            if event in TOUCHING:
                counted[0] += 1
                if counted[0] == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        act()
        os.write(writing, str(counted[0]).encode())
        os._exit(0)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    told = os.read(reading, 100)
    os.close(reading)
    if os.WIFSIGNALED(status):
        return None
    assert told, "the run ended otherwise than by a kill"
    return int(told)


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / "exports/global_step_6/policy/adapter_model.safetensors").read_bytes()).hexdigest()


def _left(folder: Path) -> Iterator[str]:
    for place in ("ckpts", "exports", "adapters"):
        yield from (f"{place}/{path.name}" for path in (folder / place).glob("*"))


def _tell(row: object) -> None:
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
