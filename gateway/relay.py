"""Relays a reply to the client: headers with the first bytes, then chunk by chunk, until it ends, fails or the client goes.

The server in front may be told by a client's header not to report that the client went away, so the gateway listens for it
itself: a client that disconnects frees the engine at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from adapters.errors import DeadlineExceeded, InternalError, LoraMuxError
from gateway.backend import Backend, Reply, ReplyHead, ResolvedRequest
from gateway.errors import error_event, error_headers

logger = logging.getLogger("loramux.gateway")

Receive = Callable[[], Awaitable[dict[str, Any]]]
Write = Callable[[bytes], Awaitable[None]]

CLIENT_GONE = 499
EVENTS = "text/event-stream"
SSE = f"{EVENTS}; charset=utf-8"
COMMENT = b": waiting\n\n"


@dataclass(frozen=True, slots=True)
class Limits:
    """How long the whole answer may take, and when a silent stream begins with comments."""

    timeout_s: float
    keepalive_after_s: float


async def relay(receive: Receive, request: ResolvedRequest, backend: Backend, limits: Limits, resolve_ms: float) -> Response:
    """The response to send. Raises what `dispatch` raised as long as nothing was sent, DeadlineExceeded among it."""
    exchange = _Exchange(receive, request, backend, limits, resolve_ms)
    patience_s = limits.keepalive_after_s if request.stream else limits.timeout_s
    outcome = await exchange.wait_for_head(patience_s)
    if outcome == "gone":
        return Response(status_code=CLIENT_GONE)
    if outcome == "late" and not request.stream:
        exchange.stop()
        raise exchange.deadline_error()
    if outcome == "late":
        return RelayResponse(exchange, 200, known_headers(request), SSE)
    reply = exchange.reply()
    return RelayResponse(exchange, reply.head.status, exchange.headers(reply.head), reply.head.content_type)


class _Exchange:
    """One request under way: the dispatch, the watch for the client's going, the clock."""

    def __init__(self, receive: Receive, request: ResolvedRequest, backend: Backend, limits: Limits, resolve_ms: float) -> None:
        self.request = request
        self.limits = limits
        self.gone = asyncio.ensure_future(_until_gone(receive))
        self._begin_s = time.monotonic()
        self._resolve_ms = resolve_ms
        self._relay_ms = 0.0
        self._dispatch = asyncio.ensure_future(backend.dispatch(request))

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._begin_s + self.limits.timeout_s - time.monotonic())

    async def wait_for_head(self, patience_s: float) -> str:
        """ "head" when the reply or its error is there, "gone" when the client went, "late" when patience or time ran out."""
        try:
            await asyncio.wait(
                {self._dispatch, self.gone}, timeout=min(patience_s, self.remaining_s), return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            self.stop()
            raise
        if self._dispatch.done():
            self._relay_ms = (time.monotonic() - self._begin_s) * 1e3
            return "head"
        if self.gone.done():
            self.stop()
            return "gone"
        return "late"

    def reply(self) -> Reply:
        """The reply that is there. Raises what the dispatch raised."""
        try:
            return self._dispatch.result()
        except BaseException:
            self.gone.cancel()
            raise

    def stop(self) -> None:
        self.gone.cancel()
        self._dispatch.cancel()

    async def close(self) -> None:
        """Ends whatever is left, also a reply that nobody began to read."""
        self.stop()
        if self._dispatch.done() and not self._dispatch.cancelled() and self._dispatch.exception() is None:
            await self._dispatch.result().aclose()

    def deadline_error(self) -> DeadlineExceeded:
        limit_ms = round(self.limits.timeout_s * 1e3)
        return DeadlineExceeded(f"no whole answer within {limit_ms} ms", limit=limit_ms, param="x-loramux-timeout-ms")

    def headers(self, head: ReplyHead) -> dict[str, str]:
        stages = {"resolve": self._resolve_ms, "relay": self._relay_ms} | head.timings_ms
        headers = {
            "x-loramux-tier": head.tier,
            "x-loramux-load": head.load,
            "server-timing": ", ".join(f"{stage};dur={ms:.2f}" for stage, ms in stages.items()),
        }
        return headers | known_headers(self.request)

    async def pass_on(self, write: Write) -> None:
        """Writes the body: comments while a late stream waits, then the reply's chunks, all within the limit, also when it is the
        client that reads too slowly. Raises LoraMuxError, DeadlineExceeded too."""
        reply = None
        limit = asyncio.timeout(self.remaining_s)
        try:
            async with limit:
                was_late = await self._waited(write)
                reply = self.reply()
                if was_late and not reply.head.content_type.startswith(EVENTS):
                    await write(await _as_event(reply))
                    return
                if was_late:
                    await write(_late_headers(self.headers(reply.head)))
                async for chunk in reply.chunks:
                    await write(chunk)
        except TimeoutError:
            if not limit.expired():
                raise
            raise self.deadline_error() from None
        finally:
            if reply is not None:
                await reply.aclose()

    async def _waited(self, write: Write) -> bool:
        """Whether the reply was not there yet; comments were written until it came, failed, or the client went."""
        was_late = not self._dispatch.done()
        while not self._dispatch.done():
            await write(COMMENT)
            await self.wait_for_head(self.limits.keepalive_after_s)
        return was_late


class RelayResponse(Response):
    """Sends an exchange. A failure after the first bytes is one last event in a stream, a broken body otherwise."""

    def __init__(self, exchange: _Exchange, status: int, headers: dict[str, str], content_type: str) -> None:
        super().__init__(None, status, headers, media_type=content_type)
        del self.headers["content-length"]
        self._exchange = exchange

    async def __call__(self, scope, receive, send) -> None:
        exchange = self._exchange
        sending = asyncio.ensure_future(self._send(send))
        try:
            await asyncio.wait({sending, exchange.gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            if not sending.done():
                sending.cancel()
                await asyncio.wait({sending})
            await exchange.close()

    async def _send(self, send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        async def write(chunk: bytes) -> None:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

        try:
            await self._exchange.pass_on(write)
        except Exception as error:
            if not self._exchange.request.stream:
                raise InternalError("the answer broke off") from error
            known = error if isinstance(error, LoraMuxError) else _bug(self._exchange.request)
            await write(_late_headers(error_headers(known)) + error_event(known))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _bug(request: ResolvedRequest) -> InternalError:
    logger.exception("unexpected error in mid-stream on %s, request %s", request.route, request.request_id)
    return InternalError("something went wrong here; the log has it under the request id")


def known_headers(request: ResolvedRequest) -> dict[str, str]:
    """What is known before the dispatch: the ref, and how it was chosen where the alias shares its traffic."""
    if request.adapter is None:
        return {}
    sticky = {"key": "key", "chance": "none"}.get(request.adapter.chosen_by)
    return {"x-loramux-adapter": str(request.adapter.ref)} | ({"x-loramux-sticky": sticky} if sticky else {})


def _late_headers(headers: dict[str, str]) -> bytes:
    """What came too late for the headers, as SSE comments: the official client takes every data event for a chunk."""
    return b"".join(f": {name}: {value}\n".encode() for name, value in headers.items()) + b"\n" if headers else b""


async def _as_event(reply: Reply) -> bytes:
    """An answer that is no stream, an error of the engine say, as the one event of a stream that has begun, on one line."""
    body = b"".join([chunk async for chunk in reply.chunks])
    return b"data: " + b" ".join(body.split(b"\n")) + b"\n\n"


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
