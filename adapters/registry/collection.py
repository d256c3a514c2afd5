"""Retention and collection: which versions may go, which files nobody needs, and how they go without harming anybody.

`survey` reads, `plan` decides (pure), `run` does. A manifest is never deleted, so that no number is ever used twice: a version
that goes is first marked in its head, and its files follow when the mark is `grace_s` old and no other version names them.

Files are deleted under a notice, an object beside them. Whoever deletes writes the notice first and looks at manifests and ages
then; whoever publishes uploads first and looks for notices then (`adapters.registry.uploads`). One of the two sees the other.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from adapters.errors import InvalidRequest
from adapters.names import AdapterRef
from adapters.registry import aliases, codec, layout
from adapters.registry.index import SweepReport
from adapters.registry.layout import AdapterName
from adapters.registry.registry import Registry
from adapters.registry.uploads import GRACE_S, NOTICE_LIFE_S, is_notice, notice_key
from adapters.store import Listed
from adapters.types import ADAPTER_FILES, By, Head, HistoryRow, Manifest

BATCH = 200  # digests deleted under one look at the manifests
READS_AT_ONCE = 16
HELD_KEYS = ("pins", "prewarm", "pending")  # what holds versions in a head beside aliases
LEFTOVER_NOTICE_S = 3600.0

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Which versions stay. One that no rule keeps is collected; without `keep_last` and `keep_younger_s` all stay.

    `keep_last` counts the newest versions of each adapter that are not retired; `keep_younger_s` is the age in seconds since a
    version was published or retired; `keep_tagged` are tag keys. Whatever the policy, these stay: what an alias, its weights or
    a rollback would go to, what `pins`, `prewarm` or `pending` of the head name, the newest version, and what is in use.

    `grace_s` is how long files outlive the mark of their version, and how old files without a version must be. Less than
    `GRACE_S` is safe only while nobody publishes.
    """

    keep_last: int | None = None
    keep_younger_s: float | None = None
    keep_tagged: tuple[str, ...] = ()
    grace_s: float = GRACE_S


@dataclass(frozen=True, slots=True)
class AdapterState:
    """An adapter as a survey found it."""

    head: Head
    manifests: tuple[Manifest, ...]


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything that decides, as one look found it: adapters, all rows under `blobs/`, and keys that are none of ours."""

    adapters: tuple[AdapterState, ...]
    blobs: tuple[Listed, ...]
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kept:
    """A version that stays, and why: `alias:production`, `rollback:production`, `newest`, `in_use`, `pinned`, `keep_last`,
    `younger`, `tagged:<key>`, `no_policy`."""

    ref: AdapterRef
    why: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Blob:
    """A file in the store that goes. `why` is `collected` (its versions were) or `orphan` (no version names it)."""

    key: str
    size_bytes: int
    why: str

    @property
    def digest(self) -> str:
        return self.key.split("/")[1]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A file that will go when its grace is over; `due_s` is the Unix time of that."""

    key: str
    size_bytes: int
    why: str
    due_s: float


@dataclass(frozen=True, slots=True)
class CollectionPlan:
    """What a run would do, for a reader to agree to. `collect` are versions to be given up, `blobs` files to be deleted now,
    `waiting` files that a later run deletes, those of `collect` among them; `unknown` keys are reported and never touched."""

    policy: RetentionPolicy
    collect: tuple[AdapterRef, ...]
    kept: tuple[Kept, ...]
    blobs: tuple[Blob, ...]
    waiting: tuple[Waiting, ...] = ()
    unknown: tuple[str, ...] = ()
    in_use: frozenset[AdapterRef] = frozenset()

    @property
    def bytes_now(self) -> int:
        """Bytes that the run deletes."""
        return sum(blob.size_bytes for blob in self.blobs)

    @property
    def bytes_later(self) -> int:
        """Bytes that become free when the grace of `waiting` is over."""
        return sum(blob.size_bytes for blob in self.waiting)

    @property
    def is_empty(self) -> bool:
        return not self.collect and not self.blobs


@dataclass(frozen=True, slots=True)
class CollectionReport:
    """What a run did. `spared` are versions and files of the plan that were needed after all, with the reason."""

    collected: tuple[AdapterRef, ...]
    deleted: tuple[Blob, ...]
    spared: tuple[tuple[str, str], ...]
    index: SweepReport
    plan: CollectionPlan

    @property
    def bytes_freed(self) -> int:
        return sum(blob.size_bytes for blob in self.deleted)


async def survey(registry: Registry) -> Survey:
    """Reads every manifest and head and lists the store. Changes nothing. Raises the store's errors."""
    raise NotImplementedError


def plan(
    found: Survey, policy: RetentionPolicy | None = None, *, in_use: Collection[AdapterRef] = (), now_s: float
) -> CollectionPlan:
    """What `policy` means for what was found at the Unix time `now_s`; pure. Raises InvalidRequest for a policy without sense."""
    raise NotImplementedError


async def plan_for(
    registry: Registry, policy: RetentionPolicy | None = None, *, in_use: Collection[AdapterRef] = ()
) -> CollectionPlan:
    """`plan` over a survey of now: the dry run."""
    return plan(await survey(registry), policy, in_use=in_use, now_s=time.time())


async def run(
    registry: Registry,
    decided: CollectionPlan,
    by: By | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> CollectionReport:
    """Does what was planned, looks again before each step, and repairs the index. Safe to repeat and to interrupt.

    `progress` is told files done and files in all. Raises the store's errors.
    """
    raise NotImplementedError
