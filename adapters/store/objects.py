"""S3 and memory, through obstore. Its errors end here: what leaves is our tree, without bucket, address or path."""

from __future__ import annotations

import atexit
import functools
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError
from obstore.store import MemoryStore, S3Store

from adapters.errors import (
    StoreConflict,
    StoreDenied,
    StoreError,
    StoreMisconfigured,
    StoreMissing,
    StoreThrottled,
    StoreUnreachable,
)
from adapters.registry.layout import check_key
from adapters.settings import StoreSettings
from adapters.store import Listed, Object

PART_BYTES = 8 * 2**20
LIST_CHUNK = 1000
MAX_RETRIES = 10
FINISH_AT_EXIT_S = 0.05

_STATUS = re.compile(r"status code: (\d{3})|[sS]tatus: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_THROTTLED = frozenset({"SlowDown", "TooManyRequests", "ThrottlingException", "RequestLimitExceeded", "Throttling"})
_DENIED = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "AccessDenied"})
WRONG_REGION = "AuthorizationHeaderMalformed"
_RANGE_PAST_END = ("StartTooLarge", "InvalidRange", "status code: 416")
_CREDENTIAL_SOURCES = ("169.254.169.254", "latest/api/token", "169.254.170.23", "AssumeRoleWithWebIdentity")

_memory_stores: dict[str, MemoryStore] = {}


def open_object_store(settings: StoreSettings) -> ObjectStore:
    """The store of an `s3://bucket/prefix` or `memory://` address. `memory://name` is one store per process and name, a
    bare `memory://` a fresh one. Raises StoreMisconfigured; does not call the store."""
    _finish_at_exit()
    address = urlsplit(settings.url)
    if address.scheme == "memory":
        return ObjectStore(_memory_store(address.netloc))
    if address.scheme != "s3" or not address.netloc:
        raise StoreMisconfigured("an object store's address is `s3://bucket/prefix` or `memory://`")
    try:
        return ObjectStore(_s3_store(settings, bucket=address.netloc, prefix=address.path.strip("/")))
    except (BaseError, ValueError) as error:
        raise StoreMisconfigured("the store's address, endpoint or region makes no sense") from error


def _memory_store(name: str) -> MemoryStore:
    return _memory_stores.setdefault(name, MemoryStore()) if name else MemoryStore()


def _s3_store(settings: StoreSettings, *, bucket: str, prefix: str) -> S3Store:
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
        retry_config=_retries(settings.retry_timeout_s),
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
    """A `Store` over obstore; also streams files up (`put_stream`)."""

    def __init__(self, store: S3Store | MemoryStore) -> None:
        self._store = store

    async def get(self, key: str) -> Object:
        check_key(key)
        with _our_errors():
            result = await obstore.get_async(self._store, key)
            data = (await result.bytes_async()).to_bytes()
            return Object(data, result.meta["e_tag"] or "")

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        check_key(key)
        if length <= 0:
            return b""
        with _our_errors():
            try:
                return (await obstore.get_range_async(self._store, key, start=start, length=length)).to_bytes()
            except BaseError as error:
                if any(sign in str(error) for sign in _RANGE_PAST_END):
                    return b""
                raise

    async def create(self, key: str, data: bytes) -> str:
        return await self._write(key, data, "create")

    async def replace(self, key: str, data: bytes, etag: str) -> str:
        try:
            return await self._write(key, data, {"e_tag": etag})
        except StoreMissing as error:  # AWS' answer to If-Match on a key that is gone
            raise StoreConflict("a conditional write lost: the object is gone") from error

    async def put(self, key: str, data: bytes) -> str:
        return await self._write(key, data, "overwrite")

    async def put_stream(self, key: str, chunks: AsyncIterator[bytes]) -> str:
        """Writes the chunks as one object, in parallel parts; an error of `chunks` passes through and nothing is visible."""
        check_key(key)
        with _our_errors():
            return (await obstore.put_async(self._store, key, chunks, chunk_size=PART_BYTES))["e_tag"] or ""

    async def delete(self, key: str) -> None:
        check_key(key)
        try:
            with _our_errors():
                await obstore.delete_async(self._store, key)
        except StoreMissing:
            pass

    async def list(self, prefix: str) -> AsyncIterator[Listed]:
        # obstore lists whole folders; a prefix that ends inside a name is narrowed here
        folder = prefix.rpartition("/")[0]
        batches = obstore.list(self._store, folder or None, chunk_size=LIST_CHUNK)
        rows: list[Listed] = []
        while batch := await self._next_batch(batches):
            rows += (Listed(row["path"], row["size"], row["e_tag"] or "") for row in batch if row["path"].startswith(prefix))
        # AWS lists in key order; servers that keep folders (SeaweedFS) list folder by folder
        for row in sorted(rows, key=lambda row: row.key):
            yield row

    async def _next_batch(self, batches: Any) -> Any:
        with _our_errors():
            return await anext(batches, None)

    async def _write(self, key: str, data: bytes, mode: Any) -> str:
        check_key(key)
        with _our_errors():
            # parts would make a small object's write two calls, and a condition on it is only checked at the last
            result = await obstore.put_async(self._store, key, data, mode=mode, use_multipart=False)
            return result["e_tag"] or ""


@contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise _missing(str(error)) from error
    except (AlreadyExistsError, PreconditionError) as error:
        raise _lost(str(error)) from error
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise StoreDenied("the store refuses these credentials, or a policy forbids the call") from error
    except (BaseError, OSError, TimeoutError) as error:
        raise _by_status(str(error)) from error


def _missing(text: str) -> StoreError:
    if "NoSuchBucket" in text:
        return StoreMisconfigured("the store's bucket does not exist")
    return StoreMissing("the object is not in the store")


def _lost(text: str) -> StoreError:
    if "NoSuchBucket" in text:
        return StoreMisconfigured("the store's bucket does not exist")
    return StoreConflict("a conditional write lost: the object exists or has changed")


def _by_status(text: str) -> StoreError:
    """The error behind obstore's generic one, which names status and code in its text only."""
    status, code = _status(text), _code(text)
    for applies, make in _RULES:
        if applies(status, code, text):
            return make()
    return StoreUnreachable("the store does not answer, or failed" + (f" (status {status})" if status else ""), retry_after_s=1)


def _status(text: str) -> int | None:
    match = _STATUS.search(text)
    return int(match[1] or match[2]) if match else None


def _code(text: str) -> str | None:
    match = _CODE.search(text)
    return match[1] if match else None


_Rule = tuple[Callable[[int | None, str | None, str], bool], Callable[[], StoreError]]
_RULES: tuple[_Rule, ...] = (
    (
        lambda status, code, text: any(source in text for source in _CREDENTIAL_SOURCES),
        lambda: StoreDenied("no credentials for the store were found"),
    ),
    (
        lambda status, code, text: status == 429 or code in _THROTTLED,
        lambda: StoreThrottled("the store asks to slow down", retry_after_s=1),
    ),
    (
        lambda status, code, text: code == "NoSuchBucket",
        lambda: StoreMisconfigured("the store's bucket does not exist"),
    ),
    (
        lambda status, code, text: status in (401, 403) or code in _DENIED,
        lambda: StoreDenied("the store refuses these credentials, or a policy forbids the call"),
    ),
    (
        lambda status, code, text: "without LOCATION" in text or status in (301, 307, 308) or code == WRONG_REGION,
        lambda: StoreMisconfigured("the store's bucket lies in another region than the settings say"),
    ),
    (
        lambda status, code, text: status in (409, 412),
        lambda: StoreConflict("a conditional write lost: the object exists or has changed"),
    ),
)
