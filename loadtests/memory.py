"""Memory of the product's processes, and whether it has come to rest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations

import psutil

PARTS = {
    "VLLM::EngineCore": "engine core",
    "VLLM::Worker": "engine worker",
    ":Replica:": "replica",
    ":LLMServer:": "replica",
    ":Gateway": "gateway",
    ":OpenAiIngress": "gateway",
    "ray::ProxyActor": "proxy",
    "bin/haproxy": "proxy",
    "ray::ServeController": "controller",
}
TITLE_LENGTH = 200


@dataclass(frozen=True)
class Sample:
    """Bytes that belong to each part alone (USS, added over its processes) after so many loads; `at_s` is when."""

    loads: int
    bytes_of: dict[str, int]
    at_s: float = 0.0


@dataclass(frozen=True)
class Growth:
    """How one part's memory grew in the second half of a run: `bytes_per_load` and `bytes_per_hour` are the medians of the slopes
    between all pairs of samples (Theil-Sen), `first_bytes` and `last_bytes` the medians of the third and of the last quarter."""

    bytes_per_load: float
    bytes_per_hour: float
    first_bytes: float
    last_bytes: float


def processes_below(pid: int) -> dict[str, list[psutil.Process]]:
    """The processes that `pid` started, those that started from them too, by their part; others are left out."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):  # gone meanwhile
            if part := part_of(" ".join(process.cmdline())):
                found.setdefault(part, []).append(process)
    return found


def part_of(title: str) -> str | None:
    """The part of a server that a process with this command line is."""
    return next((part for sign, part in PARTS.items() if sign in title[:TITLE_LENGTH]), None)


def processes_of(pid: int, part: str) -> dict[str, list[psutil.Process]]:
    """The same with `pid` itself as a part of that name."""
    return {part: [psutil.Process(pid)], **processes_below(pid)}


def sample(processes: dict[str, list[psutil.Process]], loads: int) -> Sample:
    sums = {part: sum(p.memory_full_info().uss for p in of_part) for part, of_part in processes.items()}
    return Sample(loads, sums, time.monotonic())


def growth(samples: Sequence[Sample], part: str) -> Growth:
    """Of the second half: the first fills what fills once (allocators' arenas, tables, pools)."""
    second = samples[len(samples) // 2 :]
    sizes = [one.bytes_of[part] for one in second]
    middle = len(second) // 2
    return Growth(
        bytes_per_load=_slope([one.loads for one in second], sizes),
        bytes_per_hour=_slope([one.at_s for one in second], sizes) * 3600,
        first_bytes=statistics.median(sizes[: max(1, middle)]),
        last_bytes=statistics.median(sizes[middle:]),
    )


def _slope(places: Sequence[float], sizes: Sequence[int]) -> float:
    pairs = combinations(zip(places, sizes, strict=True), 2)
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if b[0] > a[0]]
    return statistics.median(slopes) if slopes else 0.0
