"""What a load test asks of a server, whoever made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import psutil

from loadtests.material import Adapter
from loadtests.records import Tier


class Peer(Protocol):
    """A running server. `base` is the base's model field; `pid` is of its first process, None for one that was not started here.

    Calls that change something raise CannotDo where the server has no such thing, and httpx2.HTTPError when it refuses.
    """

    name: str
    url: str
    base: str
    pid: int | None

    def model(self, adapter: Adapter, *, alias: str | None = None) -> str:
        """The model field that asks for the adapter: for this very content where the server tells contents apart, or for what
        `alias` names now."""

    def version(self, adapter: Adapter) -> int | None:
        """The number that the server gave this content; None where there are no numbers."""

    def adapter_of(self, path: str) -> str | None:
        """The name of the adapter whose weights lie at `path` in the store, as far as it was added here."""

    def can_put(self, tier: Tier) -> bool: ...

    def needs_fresh(self, tier: Tier) -> bool:
        """Whether only adapters that it has never been asked for are in that tier."""

    def put(self, adapters: Sequence[Adapter], tier: Tier) -> None:
        """All of them are in that tier when it returns. Raises NotPut otherwise, with what was seen."""

    def add(self, adapter: Adapter) -> None:
        """From now on the server answers for it."""

    def republish(self, adapter: Adapter, content: Adapter) -> None:
        """The bytes of `content` go under the name of `adapter`, and are what the name stands for at once."""

    def promote(self, adapter: Adapter, content: Adapter) -> float | None:
        """The bytes of `content` go under the name of `adapter`, which stands for them as soon as that makes nobody wait. Gives
        the seconds of the move alone, None where it is not apart from the rest."""

    def evict(self, adapter: Adapter, tier: Tier) -> None:
        """Down to that tier."""

    def loads(self) -> float | None:
        """Adapters loaded into engines so far; None where the answers say it themselves. May take seconds."""

    def processes(self) -> Mapping[str, Sequence[psutil.Process]]:
        """Those of each part of the server; none where it was not started here."""


class NotPut(Exception):
    """An adapter that is not in the tier where it should be."""

    def __init__(self, adapter: str, wanted: Tier, seen: str) -> None:
        super().__init__(f"{adapter} should be in {wanted}: {seen}")
        self.adapter, self.wanted, self.seen = adapter, wanted, seen


class CannotDo(Exception):
    """Something that this server has no way to do."""


def check_room(adapters: Sequence[Adapter], slots: int) -> None:
    """Raises NotPut if so many adapters can't be in the engine at once."""
    if len(adapters) > slots:
        raise NotPut(adapters[slots].name, "engine", f"{len(adapters)} adapters are wanted there, and it has {slots} places")
