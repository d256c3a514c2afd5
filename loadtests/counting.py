"""A loopback proxy in front of the S3 server that counts reads of adapters, so that fetches are counted where they arrive.

Bytes pass as they are, `Host` included, so that signed requests stay valid. It runs in a thread and an event loop of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import unquote, urlsplit

BLOCK = 2**16
WEIGHTS = "adapter_model.safetensors"


class Fetches:
    """`endpoint` leads to the server behind; `of(text)` counts the fetches whose path holds the text."""

    def __init__(self, upstream: str) -> None:
        self._upstream_port = urlsplit(upstream).port
        self._counts: Counter[str] = Counter()
        self.endpoint = ""

    def of(self, text: str = "") -> int:
        return sum(count for path, count in list(self._counts.items()) if text in path)

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        ways = [asyncio.ensure_future(self._requests(reader, up_writer)), asyncio.ensure_future(_pump(up_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            up_writer.transport.abort()
            writer.transport.abort()

    async def _requests(self, reader: asyncio.StreamReader, up: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = fetched(head)
                if path:
                    self._counts[path] += 1
                up.write(head)
                left = int(_headers(head).get("content-length", "0"))
                while left:
                    block = await reader.readexactly(min(left, BLOCK))
                    left -= len(block)
                    up.write(block)
                    await up.drain()


def fetched(head: bytes) -> str | None:
    """The path, if the request begins to read an adapter's weights: later ranges of one fetch are not counted again."""
    method, target = head.decode("latin-1").split(" ", 2)[:2]
    path, range_ = unquote(urlsplit(target).path), _headers(head).get("range", "bytes=0-")
    return path if method == "GET" and path.endswith(f"/{WEIGHTS}") and range_.startswith("bytes=0-") else None


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while block := await reader.read(BLOCK):
            writer.write(block)
            await writer.drain()


@contextmanager
def counting(upstream: str) -> Iterator[Fetches]:
    """A running proxy in front of `upstream`, an address on loopback."""
    fetches, loop = Fetches(upstream), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(fetches.listen(), loop).result(10)
    try:
        yield fetches
    finally:
        asyncio.run_coroutine_threadsafe(fetches.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
