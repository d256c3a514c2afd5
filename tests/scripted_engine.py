"""An engine for tests that answers nothing, but is strict: it fails the test when its table of places breaks a rule."""

from __future__ import annotations

import asyncio
from collections import Counter

from adapters.errors import AdapterIncompatible
from adapters.names import AdapterRef
from adapters.types import LocalAdapter

MODULES = 4  # what an adapter of `tests.prepared` fills


class ScriptedEngine:
    """Fulfils `serve_app.slots.engine_slots.AdapterEngine`.

    `capacity` places; `loads` and `removals` in order; `failing` refs are refused as the real engine refuses, and so are files
    whose content is in `broken`; `gate`, when set to a cleared event, holds every load until the event is set.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.loaded: dict[int, AdapterRef] = {}
        self.staged: set[int] = set()
        self.loads: list[AdapterRef] = []
        self.removals: list[AdapterRef] = []
        self.failing: set[AdapterRef] = set()
        self.broken: set[bytes] = set()
        self.gate: asyncio.Event | None = None
        self.used_ids: Counter[int] = Counter()

    async def stage(self, ref: AdapterRef, int_id: int, files: LocalAdapter) -> None:
        self.staged.add(int_id)
        await asyncio.sleep(0)

    async def add(self, ref: AdapterRef, int_id: int, files: LocalAdapter) -> int:
        self.used_ids[int_id] += 1
        assert self.used_ids[int_id] == 1, "an integer id was used twice"
        self.loads.append(ref)
        self.loaded[int_id] = ref  # also when it fails: that is the engine's ghost
        assert len(self.loaded) <= self.capacity, "more adapters than the engine takes"
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(0)
        if ref in self.failing or self._is_broken(files):
            raise AdapterIncompatible(f"the engine refused `{ref}`", reason="engine_refused")
        return MODULES

    async def remove(self, ref: AdapterRef, int_id: int) -> None:
        await asyncio.sleep(0)
        self.staged.discard(int_id)
        if self.loaded.pop(int_id, None) is not None:
            self.removals.append(ref)

    def refs(self) -> set[str]:
        """What is loaded now."""
        return {str(ref) for ref in self.loaded.values()}

    def _is_broken(self, files: LocalAdapter) -> bool:
        return bool(self.broken) and (files.path / "adapter_model.safetensors").read_bytes() in self.broken
