"""Which adapters a full node cache gives up. Pure: numbers in, digests out.

The worth of a file is what giving it up would cost for each byte that it frees: its uses, recent ones counting more, times the
cost of a fetch, over its size. Uses decay as in LRFU (see `adapters.popularity`), by the clock here, since several processes and
runs share a disk; cost over size is the value of GreedyDual-Size-Frequency (Cherkasova, HP Laboratories, 1998).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

HALF_LIFE_S = 6 * 3600.0
ROUND_TRIP_BYTES = 16 * 1024**2  # what a fetch costs beside its bytes, in bytes: requests, checks and renames take their time


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """An adapter on this node's disk: its size in bytes, when a lease last began or ended (Unix seconds), and how many leases
    it had by then, older ones counting less."""

    digest: str
    size_bytes: int
    last_used: float
    uses: float = 1.0


def used_again(uses: float, last_used: float, now: float) -> float:
    """The decayed number of uses right after one more at `now`; times are Unix seconds."""
    return 1.0 + uses * 2 ** -(max(0.0, now - last_used) / HALF_LIFE_S)


def choose_victims(entries: Iterable[CacheEntry], need_bytes: int) -> list[str]:
    """The digests to evict so that at least `need_bytes` come free: those worth least, and no more than it takes.

    Empty when nothing is needed, and also when all entries together don't suffice: then evicting any would be a loss
    without a gain.
    """
    victims: list[CacheEntry] = []
    missing = need_bytes
    for entry in sorted(entries, key=worth):
        if missing <= 0:
            break
        victims.append(entry)
        missing -= entry.size_bytes
    return _needed(victims, -missing) if missing <= 0 else []


def _needed(victims: list[CacheEntry], spare_bytes: int) -> list[str]:
    """Without those that a later, larger victim made needless; the most worthy is spared first."""
    needed = []
    for victim in reversed(victims):
        if victim.size_bytes <= spare_bytes:
            spare_bytes -= victim.size_bytes
        else:
            needed.append(victim.digest)
    return needed[::-1]


def worth(entry: CacheEntry) -> tuple[float, str]:
    """The logarithm of the worth, up to a number that is the same for all at any one time: sorts the least worthy first."""
    size_bytes = max(1, entry.size_bytes)
    cost = math.log2(1 + ROUND_TRIP_BYTES / size_bytes)
    return math.log2(max(entry.uses, 1e-9)) + entry.last_used / HALF_LIFE_S + cost, entry.digest
