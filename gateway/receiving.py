"""Takes an upload in: to the disk as it comes, held to its limits, looked at as soon as there is something to see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from fastapi import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from adapters.contract.early import header_end
from adapters.errors import BodyTooLarge, InvalidRequest, LoraMuxError
from adapters.types import CONFIG_FILE, WEIGHTS_FILE
from gateway.errors import error_body, error_headers, row_of
from gateway.limited import announced_bytes
from gateway.multipart import Begin, Data, Event, Multipart
from gateway.settings import GatewaySettings
from gateway.uploads import SpooledFile

MAX_FILES = 64
MAX_NAME_CHARS = 200
ARCHIVES = {
    "application/x-tar": ".tar",
    "application/tar": ".tar",
    "application/gzip": ".tar.gz",
    "application/x-gzip": ".tar.gz",
    "application/x-gtar": ".tar.gz",
    "application/zip": ".zip",
    "application/x-zip-compressed": ".zip",
}
ARCHIVE_ENDS = (".tar", ".tar.gz", ".tgz", ".zip")
PROGRESS_BYTES = 64 * 2**10  # in each `upload_idle_s`: who drips keeps others from uploading
DRAIN_S = 3.0
DRAIN_BYTES = 64 * 2**20

Look = Callable[[Path, bytes], Awaitable[None]]  # configuration file, header of the weights; raises what refuses them


class Arrival:
    """One upload that comes in. `complete` says whether the client has sent all."""

    def __init__(self, request: Request, settings: GatewaySettings) -> None:
        self._request = request
        self._settings = settings
        self.complete = False
        self.size_bytes = 0

    def check_announced(self) -> None:
        """Raises BodyTooLarge for a length over the limit, InvalidRequest for a body of another kind."""
        declared = announced_bytes(self._request)
        if declared > self._settings.max_upload_bytes:
            raise self._too_large(declared)
        if self._kind not in ARCHIVES and self._kind != "multipart/form-data":
            raise InvalidRequest(
                f"an upload is multipart/form-data or an archive ({', '.join(sorted(ARCHIVES))}), not `{self._kind[:80]}`",
                param="content-type",
                reason="bad_content_type",
            )

    async def take(self, folder: Path, look: Look) -> Path:
        """The folder with the files, or the archive. Raises what `look` raises as soon as it does, BodyTooLarge, InvalidRequest
        for a body that is cut off, pauses too long or makes no sense."""
        if self._kind in ARCHIVES:
            return await self._archive(folder)
        return await self._files(folder, look)

    @property
    def _kind(self) -> str:
        return self._request.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def _archive(self, folder: Path) -> Path:
        file = SpooledFile(folder / f"adapter{ARCHIVES[self._kind]}")
        async for chunk in self._chunks():
            await file.add(chunk)
        await file.flush()
        return file.path

    async def _files(self, folder: Path, look: Look) -> Path:
        body = Multipart(self._request.headers.get("content-type", ""))
        files = Files(folder / "files", look)
        async for chunk in self._chunks():
            for event in body.feed(chunk):
                await files.take(event)
        body.close()
        return files.source()

    async def _chunks(self) -> AsyncIterator[bytes]:
        clock = asyncio.get_running_loop()
        deadline_s, asked_for = clock.time() + self._settings.upload_idle_s, PROGRESS_BYTES
        while not self.complete:
            try:
                async with asyncio.timeout_at(deadline_s):
                    message = await self._request.receive()
            except TimeoutError:
                limit = self._settings.upload_idle_s
                text = f"less than {PROGRESS_BYTES} bytes of the upload came in {limit:g} s"
                raise InvalidRequest(text, reason="upload_paused", limit=limit) from None
            if message["type"] == "http.disconnect":
                raise InvalidRequest("the upload broke off", reason="upload_cut_off", value=self.size_bytes)
            chunk = message.get("body", b"")
            self.complete = not message.get("more_body", False)
            self.size_bytes += len(chunk)
            if self.size_bytes > self._settings.max_upload_bytes:
                raise self._too_large(self.size_bytes)
            yield chunk
            if self.size_bytes >= asked_for:
                deadline_s, asked_for = clock.time() + self._settings.upload_idle_s, self.size_bytes + PROGRESS_BYTES

    def _too_large(self, size: int) -> BodyTooLarge:
        limit = self._settings.max_upload_bytes
        return BodyTooLarge(f"the upload has {size} bytes or more; at most {limit} are taken", limit=limit, value=size)


class Files:
    """The files of a multipart body in a folder of their own."""

    def __init__(self, folder: Path, look: Look) -> None:
        self._folder = folder
        self._look = look
        self._files: dict[str, SpooledFile] = {}
        self._current: SpooledFile | None = None
        self._config: Path | None = None
        self._header = bytearray()
        self._looked = False
        folder.mkdir()

    async def take(self, event: Event) -> None:
        """Raises InvalidRequest for a part that is no file, and what the look raises."""
        if isinstance(event, Begin):
            self._current = self._opened(event)
        elif isinstance(event, Data):
            assert self._current is not None
            await self._current.add(event.data)
            self._keep_header(self._current.path.name, event.data)
        else:
            assert self._current is not None
            await self._current.flush()
            if self._current.path.name == CONFIG_FILE:
                self._config = self._current.path
        if not self._looked and self._config is not None and self._header_is_whole():
            self._looked = True
            await self._look(self._config, bytes(self._header))

    def source(self) -> Path:
        """The folder; or the archive, if that is the one file. Raises InvalidRequest if there is none."""
        if not self._files:
            raise InvalidRequest("the body holds no file", reason="no_files", param="file", limit=1, value=0)
        (first, *others) = self._files.values()
        return first.path if not others and first.path.name.endswith(ARCHIVE_ENDS) else self._folder

    def _opened(self, part: Begin) -> SpooledFile:
        name = part.filename
        if name is None:
            text = f"the part `{part.name[:80]}` is no file: options are query values"
            raise InvalidRequest(text, reason="not_a_file", param=part.name[:80])
        if not _is_plain(name):
            raise InvalidRequest(f"`{_shown(name)}` is no plain file name", reason="bad_file_name", param="file")
        if name in self._files:
            raise InvalidRequest(f"`{_shown(name)}` came twice", reason="file_twice", param="file")
        if len(self._files) >= MAX_FILES:
            raise InvalidRequest(f"at most {MAX_FILES} files are taken", reason="too_many_files", limit=MAX_FILES)
        self._files[name] = SpooledFile(self._folder / name)
        return self._files[name]

    def _keep_header(self, name: str, data: bytes) -> None:
        """Keeps the beginning of the weights until their header is whole."""
        if name != WEIGHTS_FILE or self._looked or self._header_is_whole():
            return
        self._header += data
        if (end := header_end(self._header)) is not None:
            del self._header[end:]
        elif len(self._header) >= 8:
            self._looked = True  # no header that could be looked at; the whole file shows better what it is
            self._header.clear()

    def _header_is_whole(self) -> bool:
        end = header_end(self._header)
        return end is not None and len(self._header) >= end


def _is_plain(name: str) -> bool:
    return (
        0 < len(name) <= MAX_NAME_CHARS
        and len(name.encode(errors="replace")) <= 255
        and name not in (".", "..")
        and name.isprintable()
        and not set(name) & {"/", "\\"}
    )


def _shown(name: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in name[:80])


class EarlyAnswer(JSONResponse):
    """An error while the client still sends: it is sent whole, then what comes is thrown away for a moment, since a
    connection that closes on unread data may take the answer with it."""

    def __init__(self, error: LoraMuxError) -> None:
        super().__init__({"error": error_body(error)}, row_of(error).status, error_headers(error) | {"connection": "close"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await _drain(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drain(receive: Receive) -> None:
    left = DRAIN_BYTES
    try:
        async with asyncio.timeout(DRAIN_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
