"""Several learner processes: rank 0 starts the others, which run the same loop without a sampler and say nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from training.learner import World, join, leave

# How the others find the group; what starts engines must not hand it on to them.
RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
WAIT = timedelta(days=7)  # the others wait while rank 0 plays and evaluates


class Group:
    """`training.runs.ranks.Ranks` over gloo, whatever the learners' own group is."""

    def __init__(self, world: World):
        self.rank = world.rank
        self.world_size = world.size
        self._group = dist.new_group(backend="gloo", timeout=WAIT)

    def shared(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def any(self, value: bool) -> bool:
        told = torch.tensor([int(value)])
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group)
        return bool(told.item())


@contextlib.contextmanager
def joined(device: str) -> Iterator[World]:
    """The world that the environment tells of, which it then no longer does."""
    world = join(device)
    for name in RENDEZVOUS:
        os.environ.pop(name, None)
    try:
        yield world
    finally:
        leave()


@contextlib.contextmanager
def leading(size: int, command: Sequence[str], lost: Callable[[int, int], None]) -> Iterator[None]:
    """This process is rank 0 of `size`; `command` runs as each other, out of reach of the terminal's Ctrl-C. `lost(rank, code)`
    is called from a thread when one of them ends before we do: what all do together would wait for it for ever."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def of_rank(rank: int) -> dict[str, str]:
        return {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}

    others = [
        subprocess.Popen(command, env={**os.environ, **of_rank(rank)}, stdin=subprocess.DEVNULL, start_new_session=True)
        for rank in range(1, size)
    ]
    over = threading.Event()
    for rank, other in enumerate(others, 1):
        threading.Thread(target=_watch, args=(rank, other, over, lost), daemon=True).start()
    os.environ.update(of_rank(0))
    try:
        yield
        over.set()
        for other in others:
            other.wait()
    finally:
        over.set()
        for other in others:
            with contextlib.suppress(ProcessLookupError):
                other.kill()
            other.wait()


def die_with_parent() -> None:
    """For the others: a rank 0 that is killed takes them along (Linux)."""
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit(1)


def _watch(rank: int, other: subprocess.Popen, over: threading.Event, lost: Callable[[int, int], None]) -> None:
    code = other.wait()
    if not over.is_set():
        lost(rank, code)
