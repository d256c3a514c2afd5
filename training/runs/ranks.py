"""The learner's processes, as one of them sees them: all run the same loop, rank 0 plays, writes and talks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class ElsewhereFailed(OSError):
    """Another process could not do its part of what all do together."""


class Ranks(Protocol):
    """All call `shared` and `any` together: each gets what rank 0 gave, or whether any gave True."""

    rank: int
    world_size: int

    def shared(self, value: Any) -> Any: ...

    def any(self, value: bool) -> bool: ...


class Alone:
    """The only process."""

    rank = 0
    world_size = 1

    def shared(self, value: Any) -> Any:
        return value

    def any(self, value: bool) -> bool:
        return value


def together(ranks: Ranks, act: Callable[[], Any], *, only_first: bool = False) -> None:
    """All ranks go on, or none does: one that failed alone would leave the others waiting for it for ever. Raises what `act`
    raised here, and ElsewhereFailed where it failed in another process only."""
    failed: Exception | None = None
    if ranks.rank == 0 or not only_first:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - raised below, once the other ranks know
            failed = error
    any_failed = ranks.any(failed is not None)
    if failed is not None:
        raise failed
    if any_failed:
        raise ElsewhereFailed("another process of the learner could not do its part")
