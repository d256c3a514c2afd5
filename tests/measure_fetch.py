"""Where the time of a fetch into the node cache goes: `python -m tests.measure_fetch --store s3 --ranges 2,8 --reads 4,8`.

Prints what reading, hashing, writing and syncing take each by itself, then whole fetches: by range size and by reads at once,
of one adapter and of several at once. Times are of one machine, whatever else it does, so nothing is asserted here.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from adapters.cache import AdapterCache
from adapters.names import AdapterRef
from adapters.settings import CacheSettings, StoreSettings
from adapters.store import Store, open_store
from adapters.store.local_s3 import LocalS3
from adapters.tree_digest import TreeDigest
from adapters.types import CONFIG_FILE, WEIGHTS_FILE, FileDigest, ResolvedAdapter, content_digest

MB = 10**6
CHUNK_BYTES = 8 * 2**20
CONFIG = b'{"peft_type": "LORA", "r": 32}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None, help="where cache and store lie; a temporary folder otherwise")
    parser.add_argument("--store", choices=["file", "s3"], default="file", help="a folder, or SeaweedFS on loopback")
    parser.add_argument("--megabytes", type=float, default=174.7)
    parser.add_argument("--ranges", default="8", help="range sizes in MiB")
    parser.add_argument("--reads", default="8", help="reads at once for one fetch")
    parser.add_argument("--whole", action="store_true", help="manifests without digests by parts, as before there were any")
    parser.add_argument("--fetches", default="4", help="fetches at once by a process")
    parser.add_argument("--at-once", default="1", help="different adapters at once")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        with tempfile.TemporaryDirectory(dir=name) as alone:
            parts(Path(alone), int(options.megabytes * MB), options.rounds)
        with store_in(options.store, Path(name)) as settings:
            asyncio.run(fetches(Path(name) / "cache", settings, options))


@contextmanager
def store_in(kind: str, folder: Path) -> Iterator[StoreSettings]:
    if kind == "file":
        yield StoreSettings(url=f"file://{folder / 'store'}")
        return
    server = LocalS3(folder / "s3")
    server.start()
    try:
        yield server.settings()
    finally:
        server.stop()


# Each part by itself


class Parts:
    """The parts of a fetch on files in `folder`, each by one thread and in chunks of 8 MiB."""

    def __init__(self, folder: Path, data: bytes) -> None:
        self._source, self._target = folder / "source", folder / "target"
        self._size_bytes = len(data)
        self._chunks = [memoryview(data)[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
        self._source.write_bytes(data)
        os.sync()

    def read(self) -> None:
        with self._source.open("rb") as file:
            while file.read(CHUNK_BYTES):
                pass

    def hash(self) -> None:
        digest = hashlib.sha256()
        for chunk in self._chunks:
            digest.update(chunk)

    def reserve(self) -> None:
        with self._target.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, self._size_bytes)

    def write(self) -> None:
        with self._target.open("r+b", buffering=0) as file:
            for chunk in self._chunks:
                file.write(chunk)

    def sync(self) -> None:
        with self._target.open("rb") as file:
            os.fsync(file.fileno())

    def remove(self) -> None:
        self._target.unlink()


def parts(folder: Path, size_bytes: int, rounds: int) -> None:
    work = Parts(folder, content(0, size_bytes))
    steps = (work.read, work.hash, work.reserve, work.write, work.sync, work.remove)
    taken_s = [[timed(step) for step in steps] for _ in range(rounds)]
    print(f"{size_bytes / MB:.1f} MB, each part by itself (page cache), {rounds} rounds")
    for step, column in zip(steps, zip(*taken_s, strict=True), strict=True):
        print(f"  {step.__name__:8} {spread(column)}")


def timed(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def spread(taken_s: Sequence[float]) -> str:
    return f"least {min(taken_s) * 1e3:6.1f} ms   median {statistics.median(taken_s) * 1e3:6.1f} ms"


# Whole fetches


async def fetches(folder: Path, settings: StoreSettings, options: argparse.Namespace) -> None:
    store = open_store(settings)
    most = max(numbers(options.at_once))
    adapters = [await put(store, seed, int(options.megabytes * MB), options.whole) for seed in range(int(most))]
    print(f"from {options.store}, until the last is there; `mean` of all; `lag` of the event loop; `behind`: syncing after")
    columns = (options.at_once, options.fetches, options.ranges, options.reads)
    for at_once, turns, mib, reads in product(*(numbers(text) for text in columns)):
        cache = CacheSettings(dir=folder, range_bytes=int(mib * 2**20), fetch_concurrency=int(reads), fetches_at_once=int(turns))
        rounds = [await fetch(store, cache, adapters[: int(at_once)]) for _ in range(options.rounds + 1)][1:]
        taken_s, *others = zip(*rounds, strict=True)
        mean, cpu, lag, behind = (f"{statistics.median(column) * 1e3:5.0f} ms" for column in others)
        row = f"{at_once:.0f} adapters, {turns:.0f} at once, {mib:4.1f} MiB x {reads:2.0f}: {spread(taken_s)}"
        print(f"  {row}   mean {mean}   cpu {cpu}   lag {lag}   behind {behind}", flush=True)


async def fetch(store: Store, settings: CacheSettings, adapters: list[ResolvedAdapter]) -> tuple[float, ...]:
    """Seconds until all leases are there, until one is on average, of processor time meanwhile, of the loop's worst delay, and
    of syncing afterwards."""
    shutil.rmtree(settings.dir, ignore_errors=True)
    os.sync()
    cache = AdapterCache(store, settings)
    lags_s: list[float] = []
    watching = asyncio.create_task(watch(lags_s))
    await asyncio.sleep(0.01)
    began, cpu = time.perf_counter(), time.process_time()
    waits_s = await asyncio.gather(*(wait_s(cache, adapter) for adapter in adapters))
    taken_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    watching.cancel()
    await cache.close()
    return taken_s, statistics.mean(waits_s), cpu_s, max(lags_s), time.perf_counter() - began - taken_s


async def wait_s(cache: AdapterCache, adapter: ResolvedAdapter) -> float:
    began = time.perf_counter()
    await cache.fetch(adapter)
    return time.perf_counter() - began


async def watch(lags_s: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        lags_s.append(time.perf_counter() - began - 0.001)


async def put(store: Store, seed: int, size_bytes: int, whole: bool) -> ResolvedAdapter:
    """An adapter of random bytes in the store, as publishing lays it there."""
    contents = {CONFIG_FILE: CONFIG, WEIGHTS_FILE: content(seed, size_bytes)}
    files = tuple(
        FileDigest(name, len(data), hashlib.sha256(data).hexdigest(), None if whole else tree(data))
        for name, data in contents.items()
    )
    adapter = ResolvedAdapter(AdapterRef("measured", "adapter", seed + 1), content_digest(files), files, 32)
    for name, data in contents.items():
        await store.put(f"blobs/{adapter.digest}/{name}", data)
    return adapter


def tree(data: bytes) -> str | None:
    digest = TreeDigest()
    digest.update(data)
    return digest.hexdigest()


def content(seed: int, size_bytes: int) -> bytes:
    block = hashlib.shake_256(str(seed).encode()).digest(2**20)
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
