"""How long the next load will take, from how long the last ones took."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.backend import Tier

WEIGHT = 0.2  # of the newest measurement
FIRST_GUESS_S = 1.0


@dataclass(slots=True)
class _Rate:
    """Seconds for `bytes`, both averaged, so that a large adapter says more than a small one."""

    seconds: float = 0.0
    size_bytes: float = 0.0

    def saw(self, seconds: float, size_bytes: int) -> None:
        weight = WEIGHT if self.size_bytes else 1.0
        self.seconds += weight * (seconds - self.seconds)
        self.size_bytes += weight * (size_bytes - self.size_bytes)

    def guess_s(self, size_bytes: int) -> float:
        return self.seconds * size_bytes / self.size_bytes if self.size_bytes else FIRST_GUESS_S


@dataclass(slots=True)
class LoadTimes:
    """Measured fetches, loads and waits for a place. Only EngineSlots tells it."""

    _fetch: _Rate = field(default_factory=_Rate)
    _load: _Rate = field(default_factory=_Rate)

    def fetched(self, seconds: float, size_bytes: int) -> None:
        self._fetch.saw(seconds, size_bytes)

    def loaded(self, seconds: float, size_bytes: int) -> None:
        self._load.saw(seconds, size_bytes)

    def estimate_s(self, tier: Tier, size_bytes: int) -> float:
        """Seconds from the first request to the adapter in the engine, when a place is free."""
        return self._load.guess_s(size_bytes) + (self._fetch.guess_s(size_bytes) if tier == "remote" else 0.0)
