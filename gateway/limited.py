"""Bodies that are read whole: never more than the limit, refused as soon as it is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute

from adapters.errors import BodyTooLarge


async def read_limited(request: Request, limit: int) -> bytes:
    """The body. Raises BodyTooLarge as soon as it is known to be over `limit` bytes."""
    declared = announced_bytes(request)
    if declared > limit:
        raise too_large(declared, limit)
    parts, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large(size, limit)
        parts.append(chunk)
    return b"".join(parts)


def announced_bytes(request: Request) -> int:
    """The body's length as the client announces it; 0 without one."""
    text = request.headers.get("content-length", "")
    return int(text[:18]) if text.isascii() and text.isdigit() else 0


def too_large(size: int, limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has {size} bytes or more; at most {limit} are taken", limit=limit, value=size)


class LimitedRoute(APIRoute):
    """A route whose body, which FastAPI parses, is held to `gateway.max_body_bytes`."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def limited(request: Request) -> Any:
            request = _LimitedRequest(request.scope, request.receive)
            await request.body()  # here, since FastAPI makes a plain 400 of whatever its own reading meets
            return await handle(request)

        return limited


class _LimitedRequest(Request):
    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            self._body = await read_limited(self, self.app.state.parts.settings.max_body_bytes)
        return self._body
