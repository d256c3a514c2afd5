"""Files that were damaged on the disk after they had been verified: found when the engine refuses them, fetched again once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from adapters.cache import AdapterCache
from adapters.errors import AdapterIncompatible
from adapters.types import ResolvedAdapter

T = TypeVar("T")

ENGINE_REFUSED = "engine_refused"
SOUND_FOR_S = 60.0  # an adapter that the engine refuses though its files are right is not read again with each request
MAX_VERDICTS = 1_024


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What a look at the files said; they are right since `at_s`, whatever they were before."""

    was_damaged: bool
    at_s: float


class Mender:
    """Tries a refused load once more if the files were not what their manifest says. Belongs to one event loop."""

    def __init__(self, cache: AdapterCache, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._clock_s = clock_s
        self._checks: dict[str, asyncio.Task[bool]] = {}
        self._verdicts: dict[str, _Verdict] = {}

    async def load(self, adapter: ResolvedAdapter, load: Callable[[], Awaitable[T]]) -> T:
        """What `load` gives. Raises what it raises, AdapterCorrupt if the stored files are damaged too, or the store's errors."""
        began_s = self._clock_s()
        try:
            return await load()
        except AdapterIncompatible as error:
            if error.reason != ENGINE_REFUSED or not await self._was_damaged(adapter, began_s):
                raise
        return await load()

    async def _was_damaged(self, adapter: ResolvedAdapter, began_s: float) -> bool:
        """Whether the files had to be fetched again since `began_s`. All who ask at once share one look."""
        known = self._verdicts.get(adapter.digest)
        if known is not None and known.at_s >= began_s:
            return known.was_damaged
        if known is not None and not known.was_damaged and self._clock_s() - known.at_s < SOUND_FOR_S:
            return False
        check = self._checks.get(adapter.digest)
        if check is None:
            check = self._checks[adapter.digest] = asyncio.ensure_future(self._cache.verify(adapter))
            check.add_done_callback(lambda done: self._checked(adapter.digest, done))
        return await asyncio.shield(check)

    def _checked(self, digest: str, check: asyncio.Task[bool]) -> None:
        del self._checks[digest]
        if check.cancelled() or check.exception() is not None:
            return
        if len(self._verdicts) >= MAX_VERDICTS:
            self._verdicts.clear()
        self._verdicts[digest] = _Verdict(check.result(), self._clock_s())
