"""What this process knows of the registry: a picture in memory, kept fresh by one listing per poll.

The picture only moves forward: no revision falls, no version vanishes or changes its digest. While the store is in trouble the
last good picture serves on, and `age_s` and `last_error` say so.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import difflib
import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from adapters import metrics
from adapters.errors import InvalidModelName, LoraMuxError, ModelNotFound, StoreMissing, StoreUnreachable, VersionRetired
from adapters.metrics import NULL_METER, Meter
from adapters.names import AdapterRef, ModelName
from adapters.registry import Registry
from adapters.registry.index import merge
from adapters.registry.layout import AdapterName, shard_of
from adapters.registry.weights import choose, point_of
from adapters.types import AdapterEntry, ResolvedAdapter, VersionEntry

log = logging.getLogger(__name__)

MAX_HINTS = 3
NEIGHBOURS = 60  # names compared for a hint, on each side of where the unknown one would stand
FETCHES_AT_ONCE = 16
WAIT_STEP_S = 0.05

MaySee = Callable[[AdapterEntry], bool]


class RegistryView:
    """One picture; `refresh` looks now, `run` looks for ever. Not for use by several threads. `on_change` is told each row that
    changed, once the whole shard was taken over."""

    def __init__(
        self,
        registry: Registry,
        poll_interval_s: float,
        *,
        meter: Meter = NULL_METER,
        on_change: Callable[[AdapterEntry], None] = lambda entry: None,
    ) -> None:
        self._index = registry.index
        self._on_change = on_change
        self._meter = meter
        self._poll_interval_s = poll_interval_s
        self._entries: dict[AdapterName, AdapterEntry] = {}
        self._names: dict[str, list[str]] = {}
        self._etags: dict[int, str] = {}
        self._broken: dict[int, LoraMuxError] = {}
        self._refreshing = asyncio.Lock()
        self._fresh_at: float | None = None
        self.generation = 0
        self.last_error: LoraMuxError | None = None

    @property
    def loaded(self) -> bool:
        """Whether the registry was read at least once."""
        return self._fresh_at is not None

    @property
    def age_s(self) -> float | None:
        """Seconds since the picture was last known to be complete and current; None before the first time."""
        return None if self._fresh_at is None else time.monotonic() - self._fresh_at

    @property
    def error_reason(self) -> str | None:
        """What kept the last look from succeeding, as the reason of its error; None if it succeeded."""
        return _reason(self.last_error) if self.last_error else None

    # Reading

    def resolve(self, model: ModelName, sticky_key: str | None = None, *, may_see: MaySee | None = None) -> ResolvedAdapter:
        """The version that `model` names now. Pure look-up: no call to the store, nothing kept of unknown names.

        `may_see` hides adapters, which then are as unknown as invented ones; `sticky_key` decides where an alias shares its
        traffic, chance does without one. Raises ModelNotFound with near names, VersionRetired, StoreUnreachable while the picture
        is not there, InvalidModelName for a bare base.
        """
        if model.adapter is None:
            raise InvalidModelName(f"`{model}` names no adapter", param="model")
        entry = self._entry(model.base, model.adapter, may_see)
        weights = entry.weights.get(model.alias) if model.alias else None
        if weights:
            number = choose(weights, point_of(f"{entry.base}:{entry.name}", model.alias or "", sticky_key))
        else:
            number = model.version if model.version is not None else entry.version_of(model.alias or "")
        version = entry.versions.get(number) if number is not None else None
        if version is None:
            raise self._no_version(model, entry)
        resolved = _resolved(entry, version)
        return replace(resolved, chosen_by="key" if sticky_key else "chance") if weights else resolved

    def _entry(self, base: str, name: str, may_see: MaySee | None) -> AdapterEntry:
        entry = self.entry(base, name)
        if entry is None or (may_see is not None and not may_see(entry)):
            raise self._unknown(base, name, may_see)
        return entry

    def entry(self, base: str, name: str) -> AdapterEntry | None:
        """The adapter's row, or None."""
        return self._entries.get(AdapterName(base, name))

    def adapters(self) -> Iterable[AdapterEntry]:
        """All adapters, as they are now."""
        return tuple(self._entries.values())

    def near(self, base: str, name: str, may_see: MaySee | None = None) -> list[str]:
        """A few known names close to `name`, at a cost that does not grow with the registry."""
        names = self._names.get(base, [])
        at = bisect.bisect_left(names, name)
        around = names[max(0, at - NEIGHBOURS) : at + NEIGHBOURS]
        if may_see is not None:
            around = [known for known in around if may_see(self._entries[AdapterName(base, known)])]
        return difflib.get_close_matches(name, around, n=MAX_HINTS)

    def _unknown(self, base: str, name: str, may_see: MaySee | None) -> LoraMuxError:
        """Not found; but not while the part of the index that would hold the name can't be read."""
        trouble = self._broken.get(shard_of(base, name))
        if not self.loaded or trouble is not None:
            return StoreUnreachable("the registry has not been read yet; try again", retry_after_s=1)
        near = ", ".join(f"`{base}:{known}`" for known in self.near(base, name, may_see))
        return ModelNotFound(
            f"the model `{base}:{name}` does not exist", param="model", hint=f"did you mean {near}?" if near else None
        )

    def _no_version(self, model: ModelName, entry: AdapterEntry) -> LoraMuxError:
        if model.version is not None:
            newest = f"the newest is {entry.latest}" if entry.latest else None
            return ModelNotFound(f"`{entry.base}:{entry.name}` has no version {model.version}", param="model", hint=newest)
        aliases = ", ".join(f"`@{alias}`" for alias in sorted(entry.aliases))
        return ModelNotFound(
            f"`{entry.base}:{entry.name}` has no alias `{model.alias}`",
            param="model",
            hint=f"it has {aliases}" if aliases else "none of its versions was promoted yet; name one, as in `@1`",
        )

    # Keeping fresh

    async def run(self) -> None:
        """Polls until it is cancelled. Store trouble is remembered in `last_error` and survived; so is a bug, with a trace."""
        reporting = asyncio.create_task(self._report_for_ever())
        try:
            while True:
                await self._poll()
                # spread, so that many processes that started together don't ask together
                await asyncio.sleep(self._poll_interval_s * random.uniform(0.9, 1.1))
        finally:
            reporting.cancel()

    async def _poll(self) -> None:
        try:
            await self.refresh()
        except LoraMuxError as error:
            log.debug("the registry could not be read: %s", error)
        except Exception:
            log.exception("a look at the registry failed")
            self._meter.count(metrics.REGISTRY_REFRESH_ERRORS, reason=LoraMuxError.code)

    async def _report_for_ever(self) -> None:
        """Beside the polling, so that the age grows on also while a look hangs."""
        while True:
            self._meter.set(metrics.REGISTRY_GENERATION, self.generation)
            self._meter.set(metrics.REGISTRY_ADAPTERS, len(self._entries))
            if self.age_s is not None:
                self._meter.set(metrics.REGISTRY_AGE, self.age_s)
            await asyncio.sleep(self._poll_interval_s)

    async def refresh(self) -> None:
        """Looks now: one listing, then one read for each shard that changed. What could be read is applied even if a part
        fails. Raises the store's errors."""
        async with self._refreshing:
            try:
                await self._look()
            except LoraMuxError as error:
                self.last_error = error
                self._meter.count(metrics.REGISTRY_REFRESH_ERRORS, reason=_reason(error))
                raise
            self.last_error = None
            self._fresh_at = time.monotonic()
            self.generation = max(1, self.generation)

    async def _look(self) -> None:
        etags = await self._index.etags()
        if not etags and not self.loaded:  # lost, or never made: a registry that was copied, or an older release's
            await self._index.sweep()
            etags = await self._index.etags()
        changed = [shard for shard, etag in etags.items() if self._etags.get(shard) != etag]
        gate = asyncio.Semaphore(FETCHES_AT_ONCE)
        errors = [error for error in await asyncio.gather(*(self._load(shard, gate) for shard in changed)) if error]
        if errors:
            raise errors[0]

    async def _load(self, shard: int, gate: asyncio.Semaphore) -> LoraMuxError | None:
        async with gate:
            try:
                entries, etag = await self._index.fetch(shard)
            except StoreMissing:
                return None  # gone since the listing; the next one tells
            except LoraMuxError as error:
                self._broken[shard] = error
                return error
        self._broken.pop(shard, None)
        self._etags[shard] = etag
        self._apply(entries)
        return None

    def _apply(self, entries: Iterable[AdapterEntry]) -> None:
        """Takes what is newer. No awaits: readers see either picture, never half of one."""
        changed: list[AdapterEntry] = []
        for entry in entries:
            adapter = AdapterName(entry.base, entry.name)
            old = self._entries.get(adapter)
            new = merge(old, entry)
            if new == old:
                continue
            if old is None:
                bisect.insort(self._names.setdefault(entry.base, []), entry.name)
            self._entries[adapter] = new
            changed.append(new)
        self.generation += bool(changed)
        for entry in changed:
            self._on_change(entry)

    async def wait_seen(
        self, base: str, name: str, revision: int = 0, *, version: int | None = None, timeout_s: float = 5.0
    ) -> bool:
        """Waits until this view shows at least `revision` (and `version`), looking by itself; False if time ran out."""
        deadline = time.monotonic() + timeout_s
        while not self._shows(base, name, revision, version):
            if time.monotonic() > deadline:
                return False
            with contextlib.suppress(LoraMuxError):  # in last_error
                await self.refresh()
            if not self._shows(base, name, revision, version):
                await asyncio.sleep(WAIT_STEP_S)
        return True

    def _shows(self, base: str, name: str, revision: int, version: int | None) -> bool:
        entry = self.entry(base, name)
        return entry is not None and entry.revision >= revision and (version is None or version in entry.versions)


def _reason(error: LoraMuxError) -> str:
    return error.reason or error.code


def _resolved(entry: AdapterEntry, version: VersionEntry) -> ResolvedAdapter:
    ref = AdapterRef(entry.base, entry.name, version.version)
    if version.retired:
        reason = "collected" if version.collected else None
        text = f"`{ref}` was collected: its files are gone" if version.collected else f"`{ref}` is retired"
        raise VersionRetired(text, reason=reason, value=version.version, param="model")
    return ResolvedAdapter(ref, version.digest, version.files, version.rank, version.num_modules)
