"""Which adapters a full node cache gives up. Pure: numbers in, digests out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """An adapter on this node's disk: its size in bytes and when a lease last began or ended (Unix seconds)."""

    digest: str
    size_bytes: int
    last_used: float


def choose_victims(entries: Iterable[CacheEntry], need_bytes: int) -> list[str]:
    """The digests to evict so that at least `need_bytes` come free, least recently used first and no more than it takes.

    Empty when nothing is needed, and also when all entries together don't suffice: then evicting any would be a loss
    without a gain.
    """
    victims: list[str] = []
    missing = need_bytes
    for entry in sorted(entries, key=lambda entry: (entry.last_used, entry.digest)):
        if missing <= 0:
            break
        victims.append(entry.digest)
        missing -= entry.size_bytes
    return victims if missing <= 0 else []
