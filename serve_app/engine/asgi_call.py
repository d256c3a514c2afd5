"""Calls an ASGI app in this process: a body goes in, a status and a stream of bytes come out, no socket between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

MAX_BUFFERED_CHUNKS = 256
GOODBYE_S = 1.0


@dataclass(slots=True)
class Answer:
    """A running answer. Close it to end the app's work, whether or not it was read to the end."""

    status: int
    content_type: str
    _exchange: _Exchange
    _task: asyncio.Task[None]

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. What has piled up while the reader was busy comes as one chunk; the first never waits.

        Raises what the app raised.
        """
        queue = self._exchange.queue
        while (chunk := await queue.get()) is not None:
            parts = [chunk]
            ended = False
            while not queue.empty() and not ended:
                more = queue.get_nowait()
                ended = more is None
                parts.extend([more] if more is not None else [])
            yield b"".join(parts)
            if ended:
                break
        await self._task

    async def aclose(self) -> None:
        """Ends the app's work and waits until it has gone; harmless when it has ended."""
        await _end(self._exchange, self._task)


async def call(app: Any, path: str, body: bytes, headers: dict[str, str]) -> Answer:
    """POSTs a JSON body. Returns when the first chunk of the answer is there; raises what the app raised before it.

    Cancelling the call ends the app's work.
    """
    exchange = _Exchange(body)
    task = asyncio.ensure_future(exchange.run(app, path, headers))
    try:
        await exchange.begun.wait()
    except asyncio.CancelledError:
        await _end(exchange, task)
        raise
    if exchange.start is None:
        await task
        raise RuntimeError("the app ended without an answer")
    return Answer(exchange.start["status"], exchange.content_type(), exchange, task)


async def _end(exchange: _Exchange, task: asyncio.Task[None]) -> None:
    """First as a client that goes away, for handlers that shield their work from a plain cancellation; then by force."""
    if not task.done():
        exchange.gone.set()
        await asyncio.wait([task], timeout=GOODBYE_S)
    if not task.done():
        task.cancel()
        await asyncio.wait([task])


class _Exchange:
    def __init__(self, body: bytes) -> None:
        self.start: dict[str, Any] | None = None
        self.begun = asyncio.Event()
        self.gone = asyncio.Event()
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_BUFFERED_CHUNKS)
        self._body: bytes | None = body
        self._complete = False

    def content_type(self) -> str:
        assert self.start is not None
        headers = dict(self.start.get("headers", ()))
        return headers.get(b"content-type", b"application/json").decode("latin-1")

    async def run(self, app: Any, path: str, headers: dict[str, str]) -> None:
        try:
            await app(_scope(path, self._body or b"", headers), self._receive, self._send)
        except Exception:
            # Frameworks answer a bug with a 500 and raise it all the same, for their server's log.
            if not self._complete:
                raise
        finally:
            self.begun.set()
            await self._end()

    async def _end(self) -> None:
        if not self.gone.is_set():  # else nobody reads any more
            await self.queue.put(None)

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.start = message
        elif message["type"] == "http.response.body":
            self._complete = not message.get("more_body", False)
            if message.get("body") and not self.gone.is_set():
                await self.queue.put(message["body"])
                self.begun.set()


def _scope(path: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    sent = {"content-type": "application/json", "content-length": str(len(body)), "host": "engine"} | headers
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1", "replace")) for name, value in sent.items()],
        "client": ("127.0.0.1", 0),
        "server": ("engine", 80),
        "state": {},
        "extensions": {},
    }
