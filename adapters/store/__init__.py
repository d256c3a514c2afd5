"""Bytes in an object store. No meaning, only keys; every foreign error ends in this layer.

A key is a relative path of `/`-separated segments. The contract below is one test suite that runs against S3, a local
directory and memory alike (`tests/contracts/test_store.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from adapters.errors import StoreMisconfigured
from adapters.metrics import NULL_METER, Meter
from adapters.settings import StoreSettings


@dataclass(frozen=True, slots=True)
class Object:
    """A whole object and the ETag that it had when it was read."""

    data: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class Listed:
    """One row of a listing. `modified_s` is the Unix time of the last write, by the store's clock; some keep whole seconds."""

    key: str
    size_bytes: int
    etag: str
    modified_s: float


class Store(Protocol):
    """What every store can do. Any method may raise StoreUnreachable, StoreDenied, StoreThrottled or StoreMisconfigured, or a
    subclass that says more; a write also StoreFull. What passes by itself was tried again before (`adapters.store.retrying`)."""

    async def get(self, key: str) -> Object:
        """The object. Raises StoreMissing."""
        ...

    async def get_range(self, key: str, start: int, length: int) -> bytes | memoryview:
        """`length` bytes from `start` (fewer only at the end of the object), a view of them where that saves a copy of many.
        Raises StoreMissing."""
        ...

    async def stat(self, key: str) -> Listed:
        """The object's row, without its bytes. Raises StoreMissing."""
        ...

    async def create(self, key: str, data: bytes) -> str:
        """Writes the object only if the key is free; returns its ETag. Raises StoreConflict if it is taken. After
        StoreUnreachable (unless it is StoreNoConnection) the object may be written: read it again."""
        ...

    async def replace(self, key: str, data: bytes, etag: str) -> str:
        """Writes the object only if it still has `etag`; returns the new ETag. Raises StoreConflict otherwise, also when
        the key is gone. A lost answer is as with `create`."""
        ...

    async def put(self, key: str, data: bytes) -> str:
        """Writes the object whatever was there; for content-addressed keys only. Returns its ETag."""
        ...

    async def delete(self, key: str) -> None:
        """Removes the object; a missing key is fine."""
        ...

    def list(self, prefix: str) -> AsyncIterator[Listed]:
        """All objects whose key begins with `prefix`, in key order, however many there are."""
        ...


def open_store(settings: StoreSettings, *, meter: Meter = NULL_METER) -> Store:
    """The store that `settings.url` names: `s3://bucket/prefix`, `file:///dir` or `memory://`. Its calls go to `meter`."""
    scheme = urlsplit(settings.url).scheme
    if scheme in ("s3", "memory"):
        from adapters.store.objects import open_object_store

        return open_object_store(settings, meter)
    if scheme == "file":
        from adapters.store.folder import LocalStore

        return LocalStore.from_url(settings.url, meter)
    raise StoreMisconfigured(
        f"the registry address begins with `{scheme or settings.url[:40]}`; "
        "`s3://bucket/prefix`, `file:///dir` or `memory://` are taken"
    )
