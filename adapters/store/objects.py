"""S3 and memory, through obstore, whose errors end in `adapters.store.troubles`.

There is one layer of retries, `adapters.store.retrying`, and obstore's own are off. Only a streamed upload keeps those: its
source can't be read twice, and its parts are obstore's business.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import MemoryStore, S3Store

from adapters.errors import (
    StoreConflict,
    StoreError,
    StoreMisconfigured,
    StoreMissing,
    StoreNoConnection,
    StoreThrottled,
    StoreTimedOut,
)
from adapters.metrics import NULL_METER, Meter
from adapters.registry.layout import check_key
from adapters.settings import StoreSettings
from adapters.store import Listed, Object
from adapters.store.retrying import Caller, RetryPolicy, budget_of, if_nothing_written, if_passing, if_passing_or_busy, never
from adapters.store.troubles import our_errors

PART_BYTES = 8 * 2**20
LIST_CHUNK = 1000
MAX_RETRIES = 10
FINISH_AT_EXIT_S = 0.05

_RANGE_PAST_END = ("StartTooLarge", "InvalidRange", "status code: 416")

_memory_stores: dict[str, MemoryStore] = {}


def open_object_store(settings: StoreSettings, meter: Meter = NULL_METER) -> ObjectStore:
    """The store of an `s3://bucket/prefix` or `memory://` address. `memory://name` is one store per process and name, a
    bare `memory://` a fresh one. Raises StoreMisconfigured; does not call the store."""
    _finish_at_exit()
    address = urlsplit(settings.url)
    if address.scheme == "memory":
        return ObjectStore(_memory_store(address.netloc), Caller(meter))
    if address.scheme != "s3" or not address.netloc:
        raise StoreMisconfigured("an object store's address is `s3://bucket/prefix` or `memory://`")
    where = {"bucket": address.netloc, "prefix": address.path.strip("/")}
    try:
        single, streams = _s3_store(settings, retry_s=0, **where), _s3_store(settings, retry_s=settings.retry_timeout_s, **where)
    except (BaseError, ValueError) as error:
        raise StoreMisconfigured("the store's address, endpoint or region makes no sense") from error
    budget = budget_of(f"{settings.endpoint} {address.netloc}")
    return ObjectStore(single, Caller(meter, RetryPolicy(settings.retry_timeout_s), budget), streams)


def _memory_store(name: str) -> MemoryStore:
    return _memory_stores.setdefault(name, MemoryStore()) if name else MemoryStore()


def _s3_store(settings: StoreSettings, *, bucket: str, prefix: str, retry_s: float) -> S3Store:
    secret = settings.secret_access_key
    config: dict[str, Any] = {
        "endpoint": settings.endpoint,
        "region": settings.region,
        "access_key_id": settings.access_key_id,
        "secret_access_key": secret.get_secret_value() if secret else None,
    }
    return S3Store(
        bucket,
        prefix=prefix or None,
        client_options={
            "allow_http": bool(settings.endpoint) and settings.endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=settings.connect_timeout_s),
            "timeout": timedelta(seconds=settings.request_timeout_s),
        },
        retry_config=_retries(retry_s),
        **{key: value for key, value in config.items() if value is not None},
    )


def _retries(limit_s: float) -> dict[str, Any]:
    backoff = {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2}
    return {"backoff": backoff, "max_retries": MAX_RETRIES if limit_s else 0, "retry_timeout": timedelta(seconds=limit_s)}


@functools.cache
def _finish_at_exit() -> None:
    """obstore's threads still let go of the last call's objects when its answer is already here. An interpreter that ends
    in that instant aborts (a third of short commands did), so the end waits a moment without the GIL."""
    atexit.register(time.sleep, FINISH_AT_EXIT_S)


class ObjectStore:
    """A `Store` over obstore; also streams files up (`put_stream`), through `streams` if that is another client."""

    def __init__(self, store: S3Store | MemoryStore, caller: Caller, streams: S3Store | None = None) -> None:
        self._store = store
        self._streams = streams or store
        self._caller = caller

    async def get(self, key: str) -> Object:
        check_key(key)
        return await self._caller.run("get", lambda: self._get(key), if_passing)

    async def get_range(self, key: str, start: int, length: int) -> bytes | memoryview:
        check_key(key)
        if length <= 0:
            return b""
        return await self._caller.run("get_range", lambda: self._get_range(key, start, length), if_passing)

    async def stat(self, key: str) -> Listed:
        check_key(key)
        return await self._caller.run("stat", lambda: self._stat(key), if_passing)

    async def create(self, key: str, data: bytes) -> str:
        check_key(key)
        return await self._caller.run("create", lambda: self._write_if(key, data, "create"), if_nothing_written)

    async def replace(self, key: str, data: bytes, etag: str) -> str:
        check_key(key)
        return await self._caller.run("replace", lambda: self._write_if(key, data, {"e_tag": etag}), if_nothing_written)

    async def put(self, key: str, data: bytes) -> str:
        check_key(key)
        return await self._caller.run("put", lambda: self._write(key, data, "overwrite"), if_passing_or_busy)

    async def put_stream(self, key: str, chunks: AsyncIterator[bytes]) -> str:
        """Writes the chunks as one object, in parallel parts; an error of `chunks` passes through and nothing is visible."""
        check_key(key)
        return await self._caller.run("put_stream", lambda: self._put_stream(key, chunks), never)

    async def delete(self, key: str) -> None:
        check_key(key)
        await self._caller.run("delete", lambda: self._delete(key), if_passing_or_busy)

    async def list(self, prefix: str) -> AsyncIterator[Listed]:
        for row in await self._caller.run("list", lambda: self._list(prefix), if_passing):
            yield row

    # One attempt each

    async def _get(self, key: str) -> Object:
        with our_errors():
            result = await obstore.get_async(self._store, key)
            data = (await result.bytes_async()).to_bytes()
            return Object(data, result.meta["e_tag"] or "")

    async def _get_range(self, key: str, start: int, length: int) -> bytes | memoryview:
        with our_errors():
            try:
                # No copy: it would be made on the event loop, and takes a tenth of a second for a large adapter.
                return memoryview(await obstore.get_range_async(self._store, key, start=start, length=length))
            except BaseError as error:
                if any(sign in str(error) for sign in _RANGE_PAST_END):
                    return b""
                raise

    async def _stat(self, key: str) -> Listed:
        try:
            with our_errors():
                return _row(key, await obstore.head_async(self._store, key))
        except (StoreNoConnection, StoreTimedOut, StoreThrottled):
            raise
        except StoreError:
            return await self._stat_by_reading(key)

    async def _stat_by_reading(self, key: str) -> Listed:
        """The answer to a HEAD has no body, so it can't say what the trouble is; the answer to a GET can."""
        with our_errors():
            return _row(key, (await obstore.get_async(self._store, key)).meta)

    async def _put_stream(self, key: str, chunks: AsyncIterator[bytes]) -> str:
        with our_errors():
            return (await obstore.put_async(self._streams, key, chunks, chunk_size=PART_BYTES))["e_tag"] or ""

    async def _delete(self, key: str) -> None:
        with contextlib.suppress(StoreMissing), our_errors():
            await obstore.delete_async(self._store, key)

    async def _list(self, prefix: str) -> list[Listed]:
        # obstore lists whole folders; a prefix that ends inside a name is narrowed here
        folder = prefix.rpartition("/")[0]
        batches = obstore.list(self._store, folder or None, chunk_size=LIST_CHUNK)
        rows: list[Listed] = []
        with our_errors():
            while batch := await anext(batches, None):
                rows += (_row(row["path"], row) for row in batch if row["path"].startswith(prefix))
        # AWS lists in key order; servers that keep folders (SeaweedFS) list folder by folder
        return sorted(rows, key=lambda row: row.key)

    async def _write_if(self, key: str, data: bytes, mode: Any) -> str:
        try:
            return await self._write(key, data, mode)
        except StoreMissing as error:  # AWS' answer to a condition on a key that is gone, or just went
            raise StoreConflict("a conditional write lost: the object is gone") from error

    async def _write(self, key: str, data: bytes, mode: Any) -> str:
        with our_errors():
            # parts would make a small object's write two calls, and a condition on it is only checked at the last
            result = await obstore.put_async(self._store, key, data, mode=mode, use_multipart=False)
            return result["e_tag"] or ""


def _row(key: str, meta: Any) -> Listed:
    return Listed(key, meta["size"], meta["e_tag"] or "", meta["last_modified"].timestamp())
