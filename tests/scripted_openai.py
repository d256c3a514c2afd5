"""An OpenAI server of scripted answers on a raw socket, whose own clock says when a request was there and a token left.

What it does is in the model's name: `ok`, `slow` (half a second to the first token), `late-headers`, `missing` (404), `busy`
(503), `broken` (the connection ends in mid-stream), `unfinished` (the body ends without [DONE]), `event-error`, `plain` (JSON
where a stream was asked), `swallow` (silence).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

HEADERS = {
    "x-loramux-tier": "remote",
    "x-loramux-load": "leader",
    "server-timing": "resolve;dur=0.1, relay;dur=2.5, fetch;dur=40.0, load;dur=3.0",
}
STREAM = {"content-type": "text/event-stream", "transfer-encoding": "chunked"}
REFUSED = {"missing": (404, "model_not_found"), "busy": (503, "overloaded")}
WORDS = ("one", " two", " three")
GAP_S = 0.02


@dataclass
class Scripted:
    """`bodies` and `paths` as they came; `clocks_ns` is, by request id, when a request was read whole and its first data left."""

    port: int = 0
    paths: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    clocks_ns: list[tuple[int, int]] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    connections: int = 0
    together: int = 0
    most_together: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            with suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
                while True:
                    await self._answer(reader, writer)
        finally:
            self.connections -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path, *lines = head.split("\r\n")
        length = next((int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        read_ns = time.time_ns()
        self.paths.append(path)
        self.bodies.append(body)
        self.asked.set()
        self.together += 1
        self.most_together = max(self.together, self.most_together)
        part = body.get("model", "").split(":")[0]
        try:
            if part == "swallow":
                await reader.read(1)
                raise ConnectionError("the client went away")
            await self._play(part, body, writer, read_ns)
        finally:
            self.together -= 1

    async def _play(self, part: str, body: dict[str, Any], writer: asyncio.StreamWriter, read_ns: int) -> None:
        if part in REFUSED:
            status, code = REFUSED[part]
            return _whole(writer, status, {"error": {"message": f"told by {part}", "code": code}})
        if part == "plain":
            return _whole(writer, 200, {"choices": [{"message": {"content": "one"}}]})
        if part == "late-headers":
            _head(writer, 200, STREAM)
            _chunk(writer, ": x-request-id: r1\n\n")
            await asyncio.sleep(0.2)
            _chunk(writer, "".join(f": {name}: {value}\n\n" for name, value in HEADERS.items()))
        else:
            await asyncio.sleep(0.5 if part == "slow" else 0.05)
            _head(writer, 200, STREAM | HEADERS)
        left_ns = time.time_ns()
        await self._stream(part, body["model"], writer)
        self.clocks_ns.append((read_ns, left_ns))

    async def _stream(self, part: str, model: str, writer: asyncio.StreamWriter) -> None:
        _event(writer, {"model": f"{model}@1", "choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for word in WORDS:
            _event(writer, {"model": f"{model}@1", "choices": [{"delta": {"content": word}}]})
            await writer.drain()
            await asyncio.sleep(GAP_S)
            if part == "broken":
                writer.transport.abort()
                raise ConnectionError
            if part == "event-error":
                _event(writer, {"error": {"message": "the engine went away", "code": "engine_unavailable"}})
                return _chunk(writer, "")
        _event(writer, {"model": f"{model}@1", "choices": [], "usage": {"completion_tokens": 7}})
        if part != "unfinished":
            _chunk(writer, "data: [DONE]\n\n")
        _chunk(writer, "")


def _head(writer: asyncio.StreamWriter, status: int, headers: dict[str, str]) -> None:
    writer.write("\r\n".join([f"HTTP/1.1 {status} Told", *(f"{n}: {v}" for n, v in headers.items()), "", ""]).encode())


def _whole(writer: asyncio.StreamWriter, status: int, document: dict[str, Any]) -> None:
    body = json.dumps(document)
    _head(writer, status, HEADERS | {"content-type": "application/json", "content-length": str(len(body))})
    writer.write(body.encode())


def _event(writer: asyncio.StreamWriter, document: dict[str, Any]) -> None:
    _chunk(writer, f"data: {json.dumps({'object': 'chat.completion.chunk'} | document)}\n\n")


def _chunk(writer: asyncio.StreamWriter, text: str) -> None:
    """A chunk of the body; an empty one ends it."""
    writer.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())


@asynccontextmanager
async def scripted() -> AsyncIterator[Scripted]:
    said = Scripted()
    server = await asyncio.start_server(said.connected, "127.0.0.1", 0, backlog=512)
    said.port = server.sockets[0].getsockname()[1]
    try:
        yield said
    finally:
        server.close()
