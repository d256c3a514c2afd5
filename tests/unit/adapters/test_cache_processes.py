"""The node cache between processes: replicas of a node share the folder, and any of them may be killed at any time."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adapters.cache import AdapterCache
from adapters.cache.folder import CacheFolder
from adapters.cli.node_cache import is_whole
from adapters.errors import DiskFull
from adapters.settings import CacheSettings
from adapters.types import CONFIG_FILE, WEIGHTS_FILE, ResolvedAdapter
from tests.fake_store import FakeStore
from tests.unit.adapters.test_cache import RANGE, SIZE, adapter_of, bytes_on_disk, published, use

REPOSITORY = Path(__file__).parents[3]
# Sizes differ by bytes; of those that would fit but for a few bytes, some do and some don't.
CROWD_BUDGET = 3 * SIZE + 6
STORM_BUDGET = 6 * SIZE + 60
STORMERS, STORM_TURNS = 2, 60


class LoggedStore(FakeStore):
    """Writes each range that it is asked for into a file that all processes share; can stop answering after some."""

    def __init__(self, log: Path, answers: int = 10**9, latency_s: float = 0.0) -> None:
        super().__init__(latency_s=latency_s)
        self._log = log
        self._answers = answers

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._log.open("a") as log:
            log.write(f"{key} {start}\n")
        self._answers -= 1
        if self._answers < 0:
            say("hanging")
            await asyncio.Event().wait()
        return await super().get_range(key, start, length)


def say(line: str) -> None:
    print(line, flush=True)


def cache_settings(folder: Path, budget: int) -> CacheSettings:
    return CacheSettings(dir=folder, budget_bytes=budget, fetch_concurrency=2, range_bytes=RANGE)


async def replica(role: str, folder: Path, log: Path) -> None:
    """What a child process does; it says what it has done on stdout."""
    store = LoggedStore(log, answers=2 if role == "hang" else 10**9, latency_s=0.002)
    adapters = [await published(store, seed, SIZE + seed) for seed in range(24 if role == "storm" else 6)]
    budget = {"crowd": CROWD_BUDGET, "storm": STORM_BUDGET}.get(role, 100 * SIZE)
    cache = AdapterCache(store, cache_settings(folder, budget))
    say("ready")
    await asyncio.to_thread(sys.stdin.readline)
    if role == "crowd":
        await crowd(cache, adapters, folder)
    elif role == "storm":
        await asyncio.gather(*(storm(cache, adapters, number) for number in range(STORMERS)))
        await cache.close()
        say("done")
    else:
        lease = await cache.lease(adapters[0])
        say(f"fetched={lease.fetched}")
        await asyncio.to_thread(sys.stdin.readline)
        lease.release()


async def crowd(cache: AdapterCache, adapters: list[ResolvedAdapter], folder: Path) -> None:
    most = 0
    for adapter in adapters * 2:
        try:
            await use(cache, adapter)
        except DiskFull:
            await asyncio.sleep(0.002)
        most = max(most, bytes_on_disk(folder))
    say(f"most={most}")


async def storm(cache: AdapterCache, adapters: list[ResolvedAdapter], number: int) -> None:
    """Any adapter, again and again."""
    dice = random.Random(f"{os.getpid()} {number}")
    for _ in range(STORM_TURNS):
        try:
            await use(cache, dice.choice(adapters))
        except DiskFull:
            await asyncio.sleep(0.002)


class Child:
    """A replica process and what it says."""

    def __init__(self, role: str, folder: Path, log: Path) -> None:
        command = [sys.executable, "-m", "tests.unit.adapters.test_cache_processes", role, str(folder), str(log)]
        self.process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def children(*roles: str, folder: Path, log: Path) -> Iterator[list[Child]]:
    """Child processes, all of them ready to start."""
    started = [Child(role, folder, log) for role in roles]
    try:
        assert [child.says() for child in started] == ["ready"] * len(started)
        yield started
    finally:
        for child in started:
            child.kill()
            child.process.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "ranges.log"


@pytest.fixture
async def cache(folder: Path) -> AsyncIterator[AdapterCache]:
    """This process' own cache over the same folder, with a store that has nothing."""
    cache = AdapterCache(FakeStore(), cache_settings(folder, 100 * SIZE))
    yield cache
    await cache.close()


def test_two_processes_that_want_the_same_digest_make_one_fetch(folder: Path, log: Path) -> None:
    with children("lease", "lease", folder=folder, log=log) as pair:
        for child in pair:
            child.go_on()
        assert sorted(child.says() for child in pair) == ["fetched=False", "fetched=True"]
    lines = log.read_text().splitlines()
    assert len(lines) == len(set(lines)) == 1 + 5


async def test_a_half_written_folder_of_a_killed_process_is_removed(folder: Path, log: Path, cache: AdapterCache) -> None:
    adapter, _ = adapter_of(0)
    with children("hang", folder=folder, log=log) as (child,):
        child.go_on()
        assert child.says() == "hanging"
        assert await cache.sweep() == 0  # it lives, and so does its reservation
        assert cache.used_bytes() == SIZE
        child.kill()
    assert await cache.sweep() == 1
    assert cache.used_bytes() == bytes_on_disk(folder) == 0
    assert not cache.has(adapter.digest)


async def test_the_next_process_takes_over_the_fetch_of_a_killed_one(folder: Path, log: Path) -> None:
    with children("hang", "lease", folder=folder, log=log) as (first, second):
        first.go_on()
        assert first.says() == "hanging"
        second.go_on()
        first.kill()
        assert second.says() == "fetched=True"
    weights = folder / adapter_of(0)[0].digest / WEIGHTS_FILE
    assert weights.read_bytes() == adapter_of(0)[1]


async def test_a_dead_reservation_does_not_count_even_without_a_sweep(folder: Path, log: Path) -> None:
    with children("hang", folder=folder, log=log) as (child,):
        child.go_on()
        assert child.says() == "hanging"
        child.kill()
    store = FakeStore()
    other = AdapterCache(store, cache_settings(folder, SIZE))
    assert await use(other, await published(store, 1))
    await other.close()


async def test_a_lease_of_another_process_forbids_removal_until_that_process_dies(
    folder: Path, log: Path, cache: AdapterCache
) -> None:
    adapter, _ = adapter_of(0)
    with children("lease", folder=folder, log=log) as (child,):
        child.go_on()
        assert child.says() == "fetched=True"
        assert sorted(os.listdir(folder / adapter.digest)) == [CONFIG_FILE, WEIGHTS_FILE]
        assert not await cache.remove(adapter.digest)
        child.kill()
    assert not await use(cache, adapter)  # finished is finished: no store call, and this store has nothing
    assert await cache.remove(adapter.digest)


def test_the_budget_holds_to_the_byte_between_processes(folder: Path, log: Path) -> None:
    with children("crowd", "crowd", "crowd", folder=folder, log=log) as crowd_of_three:
        for child in crowd_of_three:
            child.go_on()
        most = [int(child.says().removeprefix("most=")) for child in crowd_of_three]
    assert 3 * SIZE <= max(most) <= CROWD_BUDGET


def test_the_budget_holds_to_the_byte_while_processes_of_a_crowded_node_are_killed(folder: Path, log: Path) -> None:
    roles = ["storm"] * 4
    with children(*roles, folder=folder, log=log) as stormers:
        for child in stormers:
            child.go_on()
        seen = [bytes_on_disk(folder) for _ in samples(100)]
        stormers[0].kill()
        seen += [bytes_on_disk(folder) for _ in samples(100)]
        stormers[1].kill()
        assert [child.says() for child in stormers[2:]] == ["done"] * 2
    cache = CacheFolder(folder, STORM_BUDGET)
    cache.sweep()
    assert 4 * SIZE < max(seen) <= STORM_BUDGET
    assert len(log.read_text().splitlines()) > 100 * 6, "hundreds of fetches ran"
    assert bytes_on_disk(folder) == cache.used_bytes() <= STORM_BUDGET
    assert all(is_whole(cache.path(entry.digest)) for entry in cache.entries())


def samples(number: int) -> Iterator[None]:
    for _ in range(number):
        yield time.sleep(0.005)


if __name__ == "__main__":
    asyncio.run(replica(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
