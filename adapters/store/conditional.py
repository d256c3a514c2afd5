"""Whether a store keeps its promises: conditional writes, and reads and listings that show what was written.

Some S3 look-alikes accept a condition and ignore it. A registry on such a store loses publications and alias moves without a
word, so it is asked first.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass, fields

from adapters.errors import StoreConflict, StoreDenied, StoreError, StoreMissing
from adapters.registry.layout import PROBES
from adapters.store import Store


@dataclass(frozen=True, slots=True)
class ConditionalWrites:
    """What a probe found; each field is a promise and whether it was kept. `delete` is also False if it is not allowed."""

    create_refused_when_taken: bool
    replace_refused_with_old_etag: bool
    replace_refused_when_gone: bool
    read_after_write: bool
    list_after_write: bool
    delete: bool

    @property
    def honoured(self) -> bool:
        """Whether a registry may write here. Publishing needs no right to delete; only `gc` does."""
        return not self.broken

    @property
    def broken(self) -> tuple[str, ...]:
        """The promises that a registry lives by and that were not kept, by name."""
        return tuple(field.name for field in fields(self) if field.name != "delete" and not getattr(self, field.name))


async def probe(store: Store, prefix: str = PROBES) -> ConditionalWrites:
    """Tries each promise on objects of its own under `prefix`, and removes them. About a dozen calls.

    Raises the store's errors: what can't be reached or read is not known to break a promise.
    """
    key, absent = (f"{prefix}{uuid.uuid4().hex}" for _ in range(2))
    try:
        return await _probe(store, key, absent)
    finally:
        for left in (key, absent):
            with contextlib.suppress(StoreError):
                await store.delete(left)


async def _probe(store: Store, key: str, absent: str) -> ConditionalWrites:
    # Contents differ, since some stores make ETags of them; the ETag is read, since an ignored condition has moved it.
    old = await store.create(key, b"first")
    create_refused = await _is_refused(store.create(key, b"second"))
    new = await store.replace(key, b"third", (await store.get(key)).etag)
    old_refused = await _is_refused(store.replace(key, b"fourth", old))
    read = await _content(store, key)
    listed = [row.key async for row in store.list(key)]
    absent_refused = await _is_refused(store.replace(absent, b"fifth", new))
    deleted = await _is_deleted(store, key)
    return ConditionalWrites(
        create_refused_when_taken=create_refused,
        replace_refused_with_old_etag=old_refused,
        replace_refused_when_gone=absent_refused and (not deleted or await _is_refused(store.replace(key, b"sixth", new))),
        read_after_write=read == (b"third" if old_refused else b"fourth"),
        list_after_write=listed == [key],
        delete=deleted,
    )


async def _is_refused(write: Awaitable[str]) -> bool:
    try:
        await write
    except StoreConflict:
        return True
    return False


async def _is_deleted(store: Store, key: str) -> bool:
    try:
        await store.delete(key)
    except StoreDenied:
        return False
    return await _content(store, key) is None and not [row async for row in store.list(key)]


async def _content(store: Store, key: str) -> bytes | None:
    try:
        return (await store.get(key)).data
    except StoreMissing:
        return None
