"""A store in memory for tests: honest in what it does, obedient in how slow it is and when it fails."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from adapters.errors import StoreConflict, StoreError, StoreMissing
from adapters.store import Listed, Object


@dataclass(slots=True)
class FailurePlan:
    """Raises `error` in the calls number `first` to `last` (counted from 1) of `method` whose key contains `part`."""

    error: StoreError
    method: str
    part: str
    first: int
    last: float
    seen: int = 0

    def matches(self, method: str, key: str) -> bool:
        if self.method not in ("*", method) or self.part not in key:
            return False
        self.seen += 1
        return self.first <= self.seen <= self.last


@dataclass(slots=True)
class FakeStore:
    """Fulfils `adapters.store.Store`. ETags are unique for each write.

    `latency_s` delays every call; `gate`, when set to a cleared event, holds every call until the event is set;
    `fail` plans failures; `calls` counts by (method, key); `running` and `most_running` tell how many ran at once;
    `clock_s` gives the time of a write, `modified_s` holds it by key.
    """

    latency_s: float = 0.0
    gate: asyncio.Event | None = None
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    running: int = 0
    most_running: int = 0
    objects: dict[str, Object] = field(default_factory=dict)
    modified_s: dict[str, float] = field(default_factory=dict)
    clock_s: Callable[[], float] = time.time
    _plans: list[FailurePlan] = field(default_factory=list)
    _writes: int = 0

    def fail(self, error: StoreError, *, method: str = "*", key_part: str = "", at: int = 1, times: float = 1) -> FailurePlan:
        """The `at`-th matching call from now on raises `error`, and so do the `times - 1` after it (`math.inf`: all)."""
        plan = FailurePlan(error, method, key_part, at, at + times - 1)
        self._plans.append(plan)
        return plan

    def heal(self) -> None:
        """Forgets all planned failures."""
        self._plans.clear()

    def count(self, method: str = "*", key_part: str = "") -> int:
        """How many calls there were of `method` with keys that contain `key_part`, failed ones included."""
        return sum(n for (name, key), n in self.calls.items() if method in ("*", name) and key_part in key)

    # The protocol

    async def get(self, key: str) -> Object:
        with self._call("get", key):
            await self._delay()
            return self._there(key)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._call("get_range", key):
            await self._delay()
            return self._there(key).data[start : start + length]

    async def stat(self, key: str) -> Listed:
        with self._call("stat", key):
            await self._delay()
            self._there(key)
            return self._row(key)

    async def create(self, key: str, data: bytes) -> str:
        with self._call("create", key):
            await self._delay()
            if key in self.objects:
                raise StoreConflict("the key is taken")
            return self._write(key, data)

    async def replace(self, key: str, data: bytes, etag: str) -> str:
        with self._call("replace", key):
            await self._delay()
            if key not in self.objects or self.objects[key].etag != etag:
                raise StoreConflict("the object has changed")
            return self._write(key, data)

    async def put(self, key: str, data: bytes) -> str:
        with self._call("put", key):
            await self._delay()
            return self._write(key, data)

    async def delete(self, key: str) -> None:
        with self._call("delete", key):
            await self._delay()
            self.objects.pop(key, None)

    async def list(self, prefix: str) -> AsyncIterator[Listed]:
        with self._call("list", prefix):
            await self._delay()
            rows = [self._row(key) for key in self.objects if key.startswith(prefix)]
        for row in sorted(rows, key=lambda row: row.key):
            yield row

    # How

    @contextmanager
    def _call(self, method: str, key: str) -> Iterator[None]:
        self.calls[method, key] += 1
        # Every plan counts the call, whichever of them raises.
        failures = [plan.error for plan in self._plans if plan.matches(method, key)]
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if failures:
                raise failures[0]
            yield
        finally:
            self.running -= 1

    async def _delay(self) -> None:
        # At least one turn of the loop, as with a real store: what relies on no turn at all must fail here.
        await asyncio.sleep(self.latency_s)
        if self.gate is not None:
            await self.gate.wait()

    def _there(self, key: str) -> Object:
        if key not in self.objects:
            raise StoreMissing("no such object")
        return self.objects[key]

    def _row(self, key: str) -> Listed:
        found = self.objects[key]
        return Listed(key, len(found.data), found.etag, self.modified_s.get(key, 0.0))

    def _write(self, key: str, data: bytes) -> str:
        self._writes += 1
        self.modified_s[key] = self.clock_s()
        self.objects[key] = Object(bytes(data), f'"{self._writes}"')
        return self.objects[key].etag
