"""A loopback proxy in front of an HTTP server that counts requests and injects faults.

Bytes pass through as they are, `Host` included, so that signed requests stay valid. It runs in its own thread and event loop:
synchronous and asynchronous tests use it alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable
from dataclasses import dataclass
from urllib.parse import unquote

BLOCK = 2**16


@dataclass(frozen=True, slots=True)
class Seen:
    """One request: its method and its path with the query, as it was sent."""

    method: str
    path: str

    def matches(self, method: str | None, contains: str) -> bool:
        return method in (None, self.method) and (contains in self.path or contains in unquote(self.path))


@dataclass(slots=True)
class Fault:
    """What happens to the next `times` requests that match: `drop` closes before the server sees them, `lose` lets the server
    work and closes before its answer is seen."""

    kind: str
    times: int
    method: str | None = None
    contains: str = ""


class CountingProxy:
    """`start`, point the client at `endpoint`, read `count(...)`, `stop`."""

    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self.port = 0
        self.latency_s = 0.0
        self.refuse = False
        self.seen: list[Seen] = []
        self._faults: list[Fault] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def reset(self) -> None:
        """Forgets counts and faults."""
        self.seen.clear()
        self._faults.clear()
        self.latency_s, self.refuse = 0.0, False

    def count(self, method: str | None = None, contains: str = "") -> int:
        """Requests of `method` whose path, plain or decoded, contains the text."""
        return sum(seen.matches(method, contains) for seen in list(self.seen))

    def drop_next(self, times: int = 1, *, method: str | None = None, contains: str = "") -> None:
        self._faults.append(Fault("drop", times, method, contains))

    def lose_answer_next(self, times: int = 1, *, method: str | None = None, contains: str = "") -> None:
        self._faults.append(Fault("lose", times, method, contains))

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not self.refuse:
                await _Connection(self, reader, writer).run()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    def fault_of(self, seen: Seen) -> str | None:
        """The fault that hits this request, used up by one."""
        for fault in self._faults:
            if fault.times > 0 and seen.matches(fault.method, fault.contains):
                fault.times -= 1
                return fault.kind
        return None


class _Connection:
    """One client connection and its own connection to the server."""

    def __init__(self, proxy: CountingProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writer = writer
        self._lose_answer = False

    async def run(self) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._proxy.upstream_port)
        try:
            await _first_of(self._requests(up_writer), self._answers(up_reader))
        finally:
            up_writer.transport.abort()

    async def _requests(self, up: asyncio.StreamWriter) -> None:
        while True:
            head = await self._reader.readuntil(b"\r\n\r\n")
            method, path = head.split(b" ", 2)[:2]
            seen = Seen(method.decode(), path.decode())
            self._proxy.seen.append(seen)
            fault = self._proxy.fault_of(seen)
            if self._proxy.refuse or fault == "drop":
                return
            self._lose_answer = fault == "lose"
            if self._proxy.latency_s:
                await asyncio.sleep(self._proxy.latency_s)
            up.write(head)
            await self._body(_headers(head), up)
            await up.drain()

    async def _body(self, headers: dict[str, str], up: asyncio.StreamWriter) -> None:
        if "chunked" in headers.get("transfer-encoding", ""):
            up.write(await self._reader.readuntil(b"0\r\n\r\n"))
            return
        left = int(headers.get("content-length", "0"))
        while left:
            block = await self._reader.readexactly(min(left, BLOCK))
            left -= len(block)
            up.write(block)
            await up.drain()

    async def _answers(self, up: asyncio.StreamReader) -> None:
        while block := await up.read(BLOCK):
            if self._lose_answer:
                return
            self._writer.write(block)
            await self._writer.drain()


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}


async def _first_of(*works: Awaitable[None]) -> None:
    """Runs all until one ends; a peer that closes ends the connection."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
