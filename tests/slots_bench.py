"""EngineSlots on a bench: an engine that checks the rules which the real one doesn't, and a cache that counts leases."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from adapters.cache import Lease
from adapters.errors import AdapterIncompatible
from adapters.names import AdapterRef
from adapters.types import WEIGHTS_FILE, FileDigest, LocalAdapter, ResolvedAdapter
from serve_app.simulation.jumping_clock import JumpingLoop
from serve_app.slots.engine_slots import EngineSlots


def adapter(name: str, version: int = 1, num_modules: int = 4, size_bytes: int = 1) -> ResolvedAdapter:
    ref = AdapterRef("base", name, version)
    digest = hashlib.sha256(str(ref).encode()).hexdigest()
    return ResolvedAdapter(ref, digest, (FileDigest(WEIGHTS_FILE, size_bytes, digest),), rank=8, num_modules=num_modules)


class StrictEngine:
    """Fails the test when the table breaks a rule of the engine."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.loaded: dict[int, AdapterRef] = {}
        self.ever: set[int] = set()
        self.loads: list[AdapterRef] = []
        self.failing: set[AdapterRef] = set()
        self.in_use: dict[int, int] = {}
        self.gate: asyncio.Event | None = None
        self.landing = 4
        self.staged: dict[int, AdapterRef] = {}
        self.most_staged = 0

    async def stage(self, ref: AdapterRef, int_id: int, files: LocalAdapter) -> None:
        assert int_id not in self.ever, "an integer id was used twice"
        self.ever.add(int_id)
        self.staged[int_id] = ref
        self.most_staged = max(self.most_staged, len(self.staged))
        await asyncio.sleep(0)

    async def add(self, ref: AdapterRef, int_id: int, files: LocalAdapter) -> int:
        assert self.staged.pop(int_id) == ref, "added without being staged"
        assert ref not in self.loaded.values(), "one adapter twice in the engine"
        self.loads.append(ref)
        self.loaded[int_id] = ref  # also when it fails: that is the engine's ghost
        assert len(self.loaded) <= self.capacity, "more adapters than the engine takes"
        if self.gate:
            await self.gate.wait()
        await asyncio.sleep(0)
        if ref in self.failing:
            raise AdapterIncompatible("no", reason="engine_refused")
        return self.landing

    async def remove(self, ref: AdapterRef, int_id: int) -> None:
        assert not self.in_use.get(int_id), "an adapter in use was removed"
        await asyncio.sleep(0)
        self.staged.pop(int_id, None)
        self.loaded.pop(int_id, None)


class CountingCache:
    """Leases that are counted, fetches that can fail or wait."""

    def __init__(self) -> None:
        self.leases: dict[str, int] = {}
        self.fetches: list[str] = []
        self.on_disk: set[str] = set()
        self.failures: list[Exception] = []

    def has(self, digest: str) -> bool:
        return digest in self.on_disk

    async def lease(self, adapter: ResolvedAdapter) -> Lease:
        self.fetches.append(adapter.digest)
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        self.on_disk.add(adapter.digest)
        self.leases[adapter.digest] = self.leases.get(adapter.digest, 0) + 1
        local = LocalAdapter(adapter.digest, Path("/nowhere"), 1)
        return Lease(local, True, 0.0, lambda: self._back(adapter.digest))

    def _back(self, digest: str) -> None:
        self.leases[digest] -= 1


class Bench:
    def __init__(self, capacity: int = 2, **options: float) -> None:
        self.engine = StrictEngine(capacity)
        self.cache = CountingCache()
        self.slots = EngineSlots(self.engine, self.cache, capacity, **options)

    async def request(self, adapter: ResolvedAdapter, hold_s: float = 0) -> str:
        use = await self.slots.use(adapter)
        int_id = use.slot.int_id
        self.engine.in_use[int_id] = self.engine.in_use.get(int_id, 0) + 1
        try:
            assert self.engine.loaded.get(int_id) == adapter.ref, "the slot holds another adapter"
            await asyncio.sleep(hold_s)
            assert self.engine.loaded.get(int_id) == adapter.ref, "the adapter went away in use"
        finally:
            self.engine.in_use[int_id] -= 1
            use.release()
        return use.load

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def check_quiet(self) -> None:
        assert self.slots.int_ids() == set(self.engine.loaded), "table and engine disagree"
        assert self.engine.staged == {}, "what is not loaded stays staged"
        held = {digest for digest, count in self.cache.leases.items() if count}
        assert len(held) == len(self.engine.loaded), "files are leased exactly while registered"


def on_a_jumping_clock(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an asynchronous test on such a loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
