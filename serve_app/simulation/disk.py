"""A made-up node's disk: files give way by production's rules, are fetched once however many want them, and stay while leased."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from adapters.cache.policy import CacheEntry, choose_victims, used_again, worth
from serve_app.simulation.clock import Clock


@dataclass(slots=True)
class Loads:
    """What was loaded and fetched anywhere. `blocked`: loads that found every place in use by running answers."""

    loads: int = 0
    blocked: int = 0
    fetches: int = 0
    fetched_bytes: int = 0


class Disk:
    """`budget_bytes` for the files of all replicas of a node. Goes over it only where all that is there is leased."""

    def __init__(
        self,
        budget_bytes: int,
        bytes_of: Callable[[int], int],
        fetch_s: Callable[[int], float],
        clock: Clock,
        loads: Loads,
    ) -> None:
        self._budget_bytes, self._bytes_of, self._fetch_s = budget_bytes, bytes_of, fetch_s
        self._clock, self._loads = clock, loads
        self._entries: dict[int, CacheEntry] = {}
        self._used_bytes = 0
        self._leases: Counter[int] = Counter()
        self._fetching: dict[int, list[Callable[[], None]]] = {}
        # The order of worth changes only with uses, so rows stay right until their adapter is used; older ones are skipped.
        self._least: list[tuple[tuple[float, str], int]] = []

    def has(self, adapter: int) -> bool:
        return adapter in self._entries

    def restore(self, entries: Iterable[CacheEntry]) -> None:
        """What earlier traffic left: as many of the entries as fit, the most worthy ones."""
        for entry in sorted(entries, key=worth, reverse=True):
            if self._used_bytes + entry.size_bytes <= self._budget_bytes:
                self._put(int(entry.digest), entry)

    def lease(self, adapter: int, there: Callable[[], None]) -> None:
        """Calls `there` once the files are, which then stay until `release`."""
        self._leases[adapter] += 1
        entry = self._entries.get(adapter)
        if entry is not None:
            self._use(adapter, entry)
            self._clock.after(0.0, there)
            return
        if adapter not in self._fetching:
            self._clock.after(self._fetch_s(adapter), lambda: self._fetched(adapter))
        self._fetching.setdefault(adapter, []).append(there)

    def release(self, adapter: int) -> None:
        self._leases[adapter] -= 1
        entry = self._entries.get(adapter)
        if entry is None:
            return
        uses = used_again(entry.uses, entry.last_used, self._clock.now_s) - 1
        self._note(adapter, CacheEntry(entry.digest, entry.size_bytes, self._clock.now_s, uses))

    def _fetched(self, adapter: int) -> None:
        size_bytes = self._bytes_of(adapter)
        self._loads.fetches += 1
        self._loads.fetched_bytes += size_bytes
        self._make_room(self._used_bytes + size_bytes - self._budget_bytes)
        waiting = self._fetching.pop(adapter)
        self._put(adapter, CacheEntry(str(adapter), size_bytes, self._clock.now_s, float(len(waiting))))
        for there in waiting:
            there()

    def _make_room(self, need_bytes: int) -> None:
        spare: list[tuple[tuple[float, str], int]] = []
        spare_bytes = 0
        while self._least and spare_bytes < need_bytes:
            row = heapq.heappop(self._least)
            entry = self._entries.get(row[1])
            # What is leased comes back into the order when it is released.
            if entry is not None and worth(entry) == row[0] and not self._leases[row[1]]:
                spare.append(row)
                spare_bytes += entry.size_bytes
        victims = {int(one) for one in choose_victims((self._entries[adapter] for _, adapter in spare), need_bytes)}
        for row in spare:
            if row[1] in victims:
                self._used_bytes -= self._entries.pop(row[1]).size_bytes
            else:
                heapq.heappush(self._least, row)

    def _use(self, adapter: int, entry: CacheEntry) -> None:
        now_s = self._clock.now_s
        uses = used_again(entry.uses, entry.last_used, now_s)
        self._note(adapter, CacheEntry(entry.digest, entry.size_bytes, now_s, uses))

    def _put(self, adapter: int, entry: CacheEntry) -> None:
        self._used_bytes += entry.size_bytes
        self._note(adapter, entry)

    def _note(self, adapter: int, entry: CacheEntry) -> None:
        self._entries[adapter] = entry
        heapq.heappush(self._least, (worth(entry), adapter))
