"""The adapters of a running server: which are in each pool now, and what changes have left to use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from loadtests.scenario import Phase, Pool, Scenario

if TYPE_CHECKING:
    from loadtests.material import Adapter
    from loadtests.running.changes import Done

NEEDS_CONTENT = ("publish", "republish", "promote")


def needed(scenario: Scenario) -> dict[str, Pool]:
    """The pools with all the adapters that a run makes use of: its members, then what changes publish, in every phase."""
    more = Counter[str]()
    for phase in scenario.phases:
        for change in phase.changes:
            more[change.pool] += change.count if change.do in NEEDS_CONTENT else 0
    return {name: pool.model_copy(update={"count": pool.count + more[name]}) for name, pool in scenario.pools.items()}


def used(phases: Iterable[Phase]) -> set[str]:
    """The pools that have a part in these phases."""
    found: set[str] = set()
    for phase in phases:
        found |= {*phase.put, *(load.pool for load in phase.loads if load.pool), *(change.pool for change in phase.changes)}
    return found


class Shelf:
    """`made` holds for each pool what `needed` asked for."""

    def __init__(self, pools: Mapping[str, Pool], made: Mapping[str, tuple[Adapter, ...]]) -> None:
        self._members = {name: made[name][: pool.count] for name, pool in pools.items()}
        self._spare: dict[str, Iterator[Adapter]] = {name: iter(made[name][pool.count :]) for name, pool in pools.items()}
        self._renewed = 0
        self._says: dict[str, str | None] = {}

    def members(self, pool: str) -> tuple[Adapter, ...]:
        return self._members[pool]

    def spare(self, pool: str) -> Adapter:
        """One that nobody has seen yet; each is given out once."""
        return next(self._spare[pool])

    def renewal(self) -> int:
        """A number that no variant of an adapter has had yet."""
        self._renewed += 1
        return self._renewed

    def replace(self, pool: str, members: tuple[Adapter, ...]) -> None:
        self._members[pool] = members

    def says(self, adapter: Adapter) -> str | None:
        """What the adapter's alias stands for now; None where that is not known."""
        return self._says.get(adapter.name, adapter.sentence)

    def note(self, done: Iterable[Done]) -> None:
        """What changes made of aliases; one that failed may have been made all the same."""
        for one in done:
            if one.step.do in ("republish", "promote") and one.step.content:
                self._says[one.step.adapter.name] = None if one.failed else one.step.content.sentence
