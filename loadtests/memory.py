"""Memory of the product's processes, and whether it has come to rest."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import psutil

PARTS = {"VLLM::EngineCore": "engine core", "VLLM::Worker": "engine worker", ":Replica:": "replica", ":Gateway": "gateway"}


@dataclass(frozen=True)
class Sample:
    """Bytes that belong to each part alone (USS, added over its processes) after so many loads."""

    loads: int
    bytes_of: dict[str, int]


@dataclass(frozen=True)
class Growth:
    """How one part's memory grew in the second half of a run: `bytes_per_load` is the median of the slopes between all pairs of
    samples (Theil-Sen), `first_bytes` and `last_bytes` the medians of the third and of the last quarter."""

    bytes_per_load: float
    first_bytes: float
    last_bytes: float


def processes_below(pid: int) -> dict[str, list[psutil.Process]]:
    """The processes that `pid` started, those that started from them too, by their part; others are left out."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.Process(pid).children(recursive=True):
        title = " ".join(process.cmdline())
        part = next((part for sign, part in PARTS.items() if sign in title[:120]), None)
        if part:
            found.setdefault(part, []).append(process)
    return found


def processes_of(pid: int, part: str) -> dict[str, list[psutil.Process]]:
    """The same with `pid` itself as a part of that name."""
    return {part: [psutil.Process(pid)], **processes_below(pid)}


def sample(processes: dict[str, list[psutil.Process]], loads: int) -> Sample:
    sums = {part: sum(p.memory_full_info().uss for p in of_part) for part, of_part in processes.items()}
    return Sample(loads, sums)


def growth(samples: Sequence[Sample], part: str) -> Growth:
    """Of the second half: the first fills what fills once (allocators' arenas, tables, pools)."""
    second = [(one.loads, one.bytes_of[part]) for one in samples[len(samples) // 2 :]]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(second, 2) if b[0] > a[0]]
    middle = len(second) // 2
    return Growth(
        bytes_per_load=statistics.median(slopes) if slopes else 0.0,
        first_bytes=statistics.median(size for _, size in second[: max(1, middle)]),
        last_bytes=statistics.median(size for _, size in second[middle:]),
    )
