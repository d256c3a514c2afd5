"""A version's two files back to whoever asks: a tar of both, or one of them, read from the store in ranges."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import tarfile
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from adapters.errors import AdapterCorrupt, StoreMissing, VersionRetired
from adapters.names import AdapterRef
from adapters.registry import layout
from adapters.store import Store
from adapters.types import FileDigest, VersionEntry
from gateway.documents import errors
from gateway.registry_routes.asked import Alias, BaseId, Name, QueryVersion
from gateway.registry_routes.reading import pick, seen

router = APIRouter()

RANGE_BYTES = 4 * 2**20
SLICE_BYTES = 256 * 2**10
_BLOCK = tarfile.BLOCKSIZE
_HEADERS = {
    "x-loramux-adapter": {"description": "The ref.", "schema": {"type": "string"}},
    "x-loramux-digest": {"description": "The version's digest, as its manifest names it.", "schema": {"type": "string"}},
    "repr-digest": {"description": "SHA-256 of one file.", "schema": {"type": "string"}},
}
_BYTES = {"type": "string", "format": "binary"}
_FILES = {
    200: {
        "description": "The files.",
        "headers": _HEADERS,
        "content": {
            "application/x-tar": {"schema": _BYTES},
            "application/octet-stream": {"schema": _BYTES},
            "application/json": {"schema": {"type": "object"}},
        },
    }
}
_TYPES = {"adapter_config.json": "application/json", "adapter_model.safetensors": "application/octet-stream"}


@router.get("/pull", responses=_FILES | errors(404, 410, 422), response_class=Response)
async def pull(
    request: Request,
    base: BaseId,
    name: Name,
    version: QueryVersion | None = None,
    alias: Alias | None = None,
    file: Annotated[
        Literal["adapter_config.json", "adapter_model.safetensors"] | None, Query(description="Only this file.")
    ] = None,
) -> Response:
    """The canonical files of a version, as any PEFT tool takes them. Retired versions too; collected ones are a 410."""
    found = pick(seen(request, base, name), version, alias)
    ref = AdapterRef(base, name, found.version)
    if found.collected:
        raise VersionRetired(f"`{ref}` was collected: its files are gone", reason="collected", value=found.version)
    store = request.app.state.parts.registry.store
    headers = {"x-loramux-adapter": str(ref), "x-loramux-digest": f"sha256:{found.digest}"}
    if file is None:
        return await _tar(store, ref, found, headers)
    return await _one(store, found, next(row for row in found.files if row.name == file), headers)


async def _one(store: Store, version: VersionEntry, file: FileDigest, headers: dict[str, str]) -> Response:
    digest = base64.b64encode(bytes.fromhex(file.sha256)).decode()
    headers = headers | {"content-length": str(file.size_bytes), "repr-digest": f"sha-256=:{digest}:", "etag": f'"{file.sha256}"'}
    return await _streamed(_content(store, version, file), _TYPES[file.name], headers, file.name)


async def _tar(store: Store, ref: AdapterRef, version: VersionEntry, headers: dict[str, str]) -> Response:
    folder = f"{ref.name.replace('/', '-')}-{ref.version}"
    size = sum(_BLOCK + _padded(file.size_bytes) for file in version.files) + 2 * _BLOCK
    return await _streamed(
        _members(store, version), "application/x-tar", headers | {"content-length": str(size)}, f"{folder}.tar"
    )


async def _members(store: Store, version: VersionEntry) -> AsyncIterator[bytes]:
    when_s = int(datetime.fromisoformat(version.created_at).timestamp())
    for file in version.files:
        info = tarfile.TarInfo(file.name)
        info.size, info.mtime = file.size_bytes, when_s
        yield info.tobuf(tarfile.PAX_FORMAT)
        async for chunk in _content(store, version, file):
            yield chunk
        yield b"\0" * (_padded(file.size_bytes) - file.size_bytes)
    yield b"\0" * (2 * _BLOCK)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


async def _content(store: Store, version: VersionEntry, file: FileDigest) -> AsyncIterator[bytes]:
    """The file in ranges. What differs from its digest is found before the last range is handed out: the body breaks off."""
    key, digest = layout.blob_key(version.digest, file.name), hashlib.sha256()
    for start in range(0, file.size_bytes, RANGE_BYTES):
        length = min(RANGE_BYTES, file.size_bytes - start)
        try:
            chunk = await store.get_range(key, start, length)
        except StoreMissing:
            raise VersionRetired(f"the files of version {version.version} are gone", reason="collected") from None
        await asyncio.to_thread(digest.update, chunk)
        if len(chunk) != length or (start + length == file.size_bytes and digest.hexdigest() != file.sha256):
            raise AdapterCorrupt(f"`{file.name}` is not what was published", reason="digest_differs")
        for slice_start in range(0, length, SLICE_BYTES):  # in one piece it would hold up the loop while it is sent
            yield bytes(chunk[slice_start : slice_start + SLICE_BYTES])


async def _streamed(chunks: AsyncIterator[bytes], kind: str, headers: dict[str, str], name: str) -> Response:
    """The first bytes are there before the headers go out, so that trouble at the start is an error as any other."""
    headers = headers | {"content-disposition": f'attachment; filename="{name}"'}
    first = [await anext(chunks, b"") for _ in range(2)]  # of a tar, the first is only a header

    async def body() -> AsyncIterator[bytes]:
        for chunk in first:
            yield chunk
        async for chunk in chunks:
            yield chunk

    return StreamingResponse(body(), media_type=kind, headers=headers)
