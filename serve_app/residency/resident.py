"""Resident: the adapters of one replica, whatever its engine is. Requests use them, the registry's directives are followed.

It joins the parts, each of which owns its state: `EngineSlots` the engine's places, `AdapterCache` the node's disk,
`RegistryView` what the registry says, `Follower` the wishes. What they come to goes out small (`stats`, for the router) and in
full (`report`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from adapters import metrics
from adapters.cache import AdapterCache
from adapters.errors import AdapterIncompatible, LoraMuxError
from adapters.metrics import NULL_METER, Meter
from adapters.names import AdapterRef
from adapters.registry import Registry
from adapters.registry.moments import unix_s
from adapters.registry.view import RegistryView
from adapters.types import AdapterEntry, ResolvedAdapter, WarmTier
from serve_app.residency import usage
from serve_app.residency.follower import Account, Follower
from serve_app.residency.mending import Mender
from serve_app.residency.wishes import Seat, Wish, choose, of_publication, of_use, wishes_of
from serve_app.slots.engine_slots import EngineSlots, SlotUse

log = logging.getLogger(__name__)

Outcome = dict[str, Any]
EvictTier = Literal["disk", "remote"]

SAVE_EVERY_S = 10.0
GAUGES_EVERY_S = 5.0
MAX_KNOWN = 4_096  # adapters whose files are known without asking the view
MAX_ASKED = 256
MAX_DISK_ROWS = 256  # each costs a look at the disk
LOOK_FIRST_S = 1.0  # what the registry says goes before what was busy, but a store in trouble holds nothing up
JUST_NOW_S = 300.0  # since a publication; clocks may be apart


@dataclass(frozen=True, slots=True)
class ResidentOptions:
    """`cache_dir` is where the usage of the last run is kept; `prewarm_on_publish` brings new versions to the disk; `max_rank` is
    the engine's limit, None for one without."""

    base: str
    cache_dir: Path
    poll_interval_s: float
    prewarm_on_publish: bool = True
    max_rank: int | None = None


class Resident:
    """What a replica's engine and node hold of one base's adapters, and what they should. Belongs to one event loop."""

    def __init__(
        self,
        options: ResidentOptions,
        registry: Registry,
        cache: AdapterCache,
        slots: EngineSlots,
        *,
        rank: int = 0,
        world_size: int = 1,
        meter: Meter = NULL_METER,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._options = options
        self._cache = cache
        self._slots = slots
        self._meter = meter
        self._now_s = now_s
        self._seat = Seat(rank, world_size, slots.capacity)
        self._view = RegistryView(registry, options.poll_interval_s, meter=meter, on_change=self._changed)
        self._mender = Mender(cache)
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()  # the registry was looked at, and all that was wished for then was tried
        self._looked = asyncio.Event()
        # A gateway sees the move up to one poll later than this replica, and so does the request that it sends.
        self._follower = Follower(slots, cache, self._warm, linger_s=2 * options.poll_interval_s + 1, on_change=self._wake.set)
        self._meant: dict[str, AdapterEntry] = {}  # by name: adapters with directives or pending moves
        self._asked: dict[AdapterRef, Wish] = {}
        self._known: OrderedDict[AdapterRef, ResolvedAdapter] = OrderedDict()
        self._disk_evictions = 0
        self._is_saved = True
        self._running: list[asyncio.Task[None]] = []

    # The life of a replica

    async def start(self, budget_s: float) -> None:
        """Brings back what the registry wants and the busiest adapters of the last run, for `budget_s` at most; what is left
        goes on in the background. Never raises for store trouble: the disk serves on without the store."""
        await self._cache.sweep()
        self._running = [asyncio.create_task(self._watch()), asyncio.create_task(self._tend())]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(budget_s, LOOK_FIRST_S)):
                await self._looked.wait()
        await self._recall()
        self._running.append(asyncio.create_task(self._follow()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(budget_s):
                await self._settled.wait()

    async def _recall(self) -> None:
        """Asks for what was busy in the last run."""
        for used in await asyncio.to_thread(usage.read, self._usage_file()):
            self._remember(used.adapter)
            self._slots.popularity.restore({used.adapter.ref: used.value})
        for ref in self._slots.popularity.busiest(self._slots.capacity):
            if adapter := self._known.get(ref):
                self._ask(of_use(adapter))

    async def close(self) -> None:
        """Stops following, gives leases back, keeps the usage for the next run and closes the cache."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._follower.close()
        await self._save()
        await self._cache.close()

    def set_rank(self, rank: int, world_size: int) -> None:
        """This replica's place among those of its base; what it should hold follows from that."""
        seat = Seat(rank, world_size, self._slots.capacity)
        if seat != self._seat:
            self._seat = seat
            self._wake.set()

    # Requests

    async def use(self, adapter: ResolvedAdapter, *, wait: bool = True) -> SlotUse:
        """A hold on the adapter's slot, loading it first if need be. Raises what `EngineSlots.use` raises, and AdapterCorrupt
        where the engine refused files that are damaged on the disk and in the store."""
        self._check_rank(adapter)
        self._remember(adapter)
        self._is_saved = False
        return await self._mender.load(adapter, lambda: self._slots.use(adapter, wait=wait))

    async def prewarm(self, adapter: ResolvedAdapter, tier: WarmTier) -> None:
        """Returns when the adapter is in `tier`; loads that requests wait for go first. Raises what `use` raises."""
        self._remember(adapter)
        if tier == "disk":
            await self._cache.fetch(adapter)
        else:
            await self._warm(adapter, False)

    async def _warm(self, adapter: ResolvedAdapter, urgent: bool) -> None:
        self._check_rank(adapter)
        await self._mender.load(adapter, lambda: self._slots.warm(adapter, urgent=urgent))

    def _check_rank(self, adapter: ResolvedAdapter) -> None:
        """Says it better than the engine, which would have to read the files for it."""
        limit = self._options.max_rank
        if limit is not None and adapter.rank > limit:
            raise AdapterIncompatible(
                f"`{adapter.ref}` has rank {adapter.rank}; this base takes at most {limit}",
                reason="rank_too_large",
                limit=limit,
                value=adapter.rank,
            )

    async def evict(self, ref: AdapterRef, tier: EvictTier) -> Outcome:
        """Takes the adapter out of the engine, with `remote` off the disk as well. `tier` is where it is then, `reason` why it is
        still further up than asked: `in_use` or `pinned`; None otherwise."""
        self._asked.pop(ref, None)
        if self._follower.is_held(ref, "engine" if tier == "disk" else "disk"):
            return {"tier": self._tier(ref), "reason": "pinned"}
        in_engine = ref in self._slots.resident() or ref in self._slots.loading()
        if in_engine and not await self._slots.evict(ref):
            return {"tier": self._tier(ref), "reason": "in_use"}
        adapter = self._adapter(ref)
        if tier == "remote" and adapter is not None and not await self._cache.remove(adapter.digest):
            return {"tier": self._tier(ref), "reason": "in_use"}
        return {"tier": self._tier(ref), "reason": None}

    # Telling

    def stats(self) -> dict[str, Any]:
        """What the router needs, small and without times: it is told to all gateways whenever it changes."""
        return {
            "rank": self._seat.rank,
            "slots": self._slots.capacity,
            "engine": sorted(map(str, self._slots.resident())),
            "loading": sorted(map(str, self._slots.loading())),
        }

    def report(self) -> dict[str, Any]:
        """This replica's part of the residency view: rank, slots, generation, engine ids, and a row for each adapter that is in
        the engine, under way, wished for, or on the disk and used here or brought here lately."""
        accounts = self._follower.accounts()
        resident, loading = self._slots.resident(), self._slots.loading()
        rows = {str(ref): self._row(ref, accounts.get(ref)) for ref in {*resident, *loading, *accounts}}
        for ref, adapter in itertools.islice(reversed(self._known.items()), MAX_DISK_ROWS):
            if str(ref) not in rows and self._cache.has(adapter.digest):
                rows[str(ref)] = self._row(ref, None)
        return {
            "rank": self._seat.rank,
            "slots": self._slots.capacity,
            "generation": self._view.generation,
            "int_ids": sorted(self._slots.int_ids()),
            "adapters": dict(sorted(rows.items())),
        }

    def _row(self, ref: AdapterRef, account: Account | None) -> dict[str, Any]:
        adapter = account.wish.adapter if account else self._adapter(ref)
        is_loading = ref in self._slots.loading() and (account is None or account.state != "failed")
        return {
            "tier": self._tier(ref),
            "users": self._slots.resident().get(ref, 0),
            "pinned": self._follower.is_held(ref, "disk"),
            "state": "loading" if is_loading else account.state if account else "ready",
            "reason": account.reason if account else None,
            "move_id": account.wish.move_id if account else None,
            "size_bytes": adapter.size_bytes if adapter else 0,
        }

    def _tier(self, ref: AdapterRef) -> Literal["engine", "disk", "remote"]:
        if ref in self._slots.resident():
            return "engine"
        adapter = self._adapter(ref)
        return "disk" if adapter is not None and self._cache.has(adapter.digest) else "remote"

    def _adapter(self, ref: AdapterRef) -> ResolvedAdapter | None:
        known = self._known.get(ref)
        if known is not None:
            return known
        entry = self._view.entry(ref.base, ref.name)
        version = entry.versions.get(ref.version) if entry else None
        return ResolvedAdapter(ref, version.digest, version.files, version.rank, version.num_modules) if version else None

    # Following

    def _changed(self, entry: AdapterEntry) -> None:
        """The view shows another row; only those of this base that ask for something are kept."""
        if entry.base != self._options.base:
            return
        if entry.directives or entry.pending:
            self._meant[entry.name] = entry
        else:
            self._meant.pop(entry.name, None)
        if self._options.prewarm_on_publish:
            self._notice_publication(entry)
        self._wake.set()

    def _notice_publication(self, entry: AdapterEntry) -> None:
        """Asks for a version that was published just now. One that is there already costs a look at the disk."""
        newest = entry.versions.get(entry.latest or 0)
        if newest is None or abs(self._now_s() - unix_s(newest.created_at)) > JUST_NOW_S:
            return
        adapter = self._adapter(AdapterRef(entry.base, entry.name, newest.version))
        wish = adapter and of_publication(entry, adapter, self._seat, self._slots.resident())
        if wish:
            self._ask(wish)

    def _ask(self, wish: Wish) -> None:
        """A wish of this process alone, fulfilled once; the newest are kept."""
        self._asked.pop(wish.ref, None)
        self._asked[wish.ref] = wish
        if len(self._asked) > MAX_ASKED:
            del self._asked[next(iter(self._asked))]
        self._wake.set()

    async def _watch(self) -> None:
        with contextlib.suppress(LoraMuxError):  # in the view's last_error
            await self._view.refresh()
        self._looked.set()
        self._wake.set()
        await self._view.run()

    def _is_served(self, ref: AdapterRef) -> bool:
        """Whether requests for it are answered, as far as is known: what was busy in the last run may be retired by now."""
        entry = self._view.entry(ref.base, ref.name)
        version = entry.versions.get(ref.version) if entry else None
        return not self._view.loaded or (version is not None and not version.retired)

    async def _follow(self) -> None:
        while True:
            self._wake.clear()
            try:
                self._step()
            except Exception:
                log.exception("following the registry's directives failed")
            if self._looked.is_set() and self._follower.is_idle():
                self._settled.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.poll_interval_s):  # `wait_for` may swallow a cancellation
                    await self._wake.wait()

    def _step(self) -> None:
        now_s, resident = self._now_s(), self._slots.resident()
        wishes = [wish for entry in self._meant.values() for wish in wishes_of(entry, self._seat, resident, now_s)]
        self._asked = {ref: wish for ref, wish in self._asked.items() if self._is_served(ref)}
        for wish in (*wishes, *self._asked.values()):
            if wish.ref not in self._known:
                self._remember(wish.adapter)  # the report shows it on the disk when the wish is over, too
        self._follower.follow(choose([*wishes, *self._asked.values()], self._seat.slots))
        accounts = self._follower.accounts()
        self._asked = {ref: wish for ref, wish in self._asked.items() if not self._is_over(wish, accounts.get(ref))}

    def _is_over(self, wish: Wish, account: Account | None) -> bool:
        """Whether nothing is left to do for a wish of this process: it is there, or it was tried."""
        if account is not None and account.wish.key == wish.key:
            return account.state != "loading"
        return self._tier(wish.ref) in ("engine", wish.tier)

    # Remembering and measuring

    def _remember(self, adapter: ResolvedAdapter) -> None:
        self._known[adapter.ref] = adapter
        self._known.move_to_end(adapter.ref)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    async def _tend(self) -> None:
        saved_at_s = time.monotonic()
        while True:
            await asyncio.sleep(GAUGES_EVERY_S)
            try:
                await self._measure()
                if time.monotonic() - saved_at_s > SAVE_EVERY_S:
                    saved_at_s = time.monotonic()
                    await self._save()
            except Exception:
                log.exception("the state of the adapters could not be kept")

    async def _measure(self) -> None:
        entries, used_bytes = await asyncio.to_thread(lambda: (self._cache.entries(), self._cache.used_bytes()))
        accounts = self._follower.accounts().values()
        self._meter.set(metrics.RESIDENT, len(self._slots.resident()), tier="engine")
        self._meter.set(metrics.RESIDENT, len(entries), tier="disk")
        self._meter.set(metrics.SLOTS, self._slots.capacity)
        self._meter.set(metrics.SLOTS_HELD, len(self._slots.held()))
        self._meter.set(metrics.WISHES_FAILING, sum(account.state == "failed" for account in accounts))
        self._meter.set(metrics.CACHE_BYTES, used_bytes)
        evictions, self._disk_evictions = self._cache.evictions - self._disk_evictions, self._cache.evictions
        self._meter.count(metrics.CACHE_EVICTIONS, evictions)

    def _usage_file(self) -> Path:
        return usage.usage_file(self._options.cache_dir, self._options.base, self._seat.rank)

    async def _save(self) -> None:
        if self._is_saved:
            return
        self._is_saved = True
        values = self._slots.popularity.snapshot()
        rows = [usage.Used(adapter, values[ref]) for ref, adapter in self._known.items() if values.get(ref, 0) > 0]
        try:
            await asyncio.to_thread(usage.write, self._usage_file(), rows)
        except OSError as error:
            log.warning("the usage of this run can't be kept: %s", error.strerror)
