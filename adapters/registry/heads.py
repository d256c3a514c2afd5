"""How a head changes: read, decide, write only if nobody else did, look again after a lost answer."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable
from dataclasses import replace

from adapters.errors import StoreConflict, StoreUnreachable, VersionConflict
from adapters.registry import codec, directives, layout, moments
from adapters.registry.index import Truth
from adapters.store import Store
from adapters.types import Head

MAX_ATTEMPTS = 32
MAX_REPEATS = 2  # of a conditional write that failed without an answer and, as a look shows, did not take place
MAX_RECENT_CHANGES = 64

Change = Callable[[Head], Head | None]


async def jitter(attempt: int) -> None:
    """Lets somebody else be first for once."""
    await asyncio.sleep(random.random() * min(0.005 * 2**attempt, 0.25))


class Heads:
    """The heads of all adapters: written here only."""

    def __init__(self, store: Store, truth: Truth) -> None:
        self._store = store
        self._truth = truth

    async def ensure(self, base: str, name: str) -> Head:
        """The head, made with revision 1 if this is the adapter's first version."""
        return await self.change(base, name, lambda head: head if head.revision == 0 else None)

    async def change(self, base: str, name: str, change: Change, expected_revision: int | None = None) -> Head:
        """Writes what `change` makes of the head, unless that is None. `change` may be called several times.

        Raises what `change` raises, and VersionConflict if the head is not at `expected_revision` or the race was lost too often.
        """
        change_id, repeats = uuid.uuid4().hex, 0
        for attempt in range(MAX_ATTEMPTS):
            head, etag = await self._truth.head(base, name)
            if change_id in head.recent_changes:  # the answer to our write was lost
                return head
            _check_revision(head, expected_revision)
            new = change(head)
            if new is None:
                return head
            new = _next(new, change_id)
            try:
                if await self._swap(new, etag):
                    return new
            except StoreUnreachable:
                if repeats == MAX_REPEATS:
                    raise
                repeats += 1
            await jitter(attempt)
        raise VersionConflict(f"`{name}` is being changed by too many at once; try again", value=head.revision, retry_after_s=1)

    async def _swap(self, head: Head, etag: str | None) -> bool:
        """Whether the head was written. Unsure after a lost answer, so that is read again; raises StoreUnreachable if it
        was not written and the store can't say why."""
        key, data = layout.head_key(head.base, head.name), codec.encode_head(head)
        try:
            await (self._store.create(key, data) if etag is None else self._store.replace(key, data, etag))
            return True
        except StoreConflict:
            return False
        except StoreUnreachable:
            now, _ = await self._truth.head(head.base, head.name)
            if head.change_id not in now.recent_changes:
                raise
            return False  # the caller reads again and finds its own change


def _next(head: Head, change_id: str) -> Head:
    recent = (*head.recent_changes, change_id)[-MAX_RECENT_CHANGES:]
    kept = directives.unexpired(head.directives, moments.unix_s(moments.now()))
    return replace(head, revision=head.revision + 1, change_id=change_id, recent_changes=recent, directives=kept)


def _check_revision(head: Head, expected: int | None) -> None:
    if expected is not None and head.revision != expected:
        raise VersionConflict(
            f"`{head.name}` is at revision {head.revision}, not {expected}",
            limit=expected,
            value=head.revision,
            hint="look again, then repeat with the current revision",
        )
