"""A loopback proxy between an S3 server and the servers under test: latency, bandwidth, faults, and what was fetched.

It runs in a process of its own, a thread for each connection, so that it takes no turns from whoever measures. Bytes pass as
they are, `Host` included, so that signed requests stay valid. `python -m loadtests.shaping PORT` is that process: a line of JSON
on its standard input is a command, a line on its standard output the answer.
"""

from __future__ import annotations

import json
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO, Protocol
from urllib.parse import unquote, urlsplit

from loadtests.scenario import StoreShape

WEIGHTS = "adapter_model.safetensors"
BLOCK_BYTES = 2**20
PACED_S = 0.005  # a paced block takes so long: small enough for even streams, long enough for a clock
CREDIT_S = 0.02  # a paced transfer that came late, by its thread's turn or its source, may catch up so much
HEAD_BYTES = 2**16
MIB = 2**20
FIRST_BYTE = re.compile(r"bytes=0*(\d+)-")
SLOW_DOWN = b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>SlowDown</Code><Message>Slow down.</Message></Error>'


@dataclass(frozen=True)
class Fetch:
    """A read of an adapter's weights at the store, all ranges of it together: when it began by the wall clock, the bytes
    that were sent, and how long it took from the first request to the last byte."""

    path: str
    wall_ns: int
    bytes: int
    took_s: float


class Store(Protocol):
    """The store as servers see it at `endpoint`; `upstream` is the S3 server itself."""

    endpoint: str
    upstream: str

    def shape(self, shape: StoreShape, seed: int = 1) -> None:
        """From now on, also for what is on its way. `seed` decides which reads a fault befalls."""

    def fetches(self) -> tuple[Fetch, ...]:
        """Those that ended since the last call."""


# -- for whoever measures ----------------------------------------------------------------------------------------------


class Shaped:
    """A proxy in a process of its own. Its calls raise BrokenPipeError or EOFError when that process is gone."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self._turn = threading.Lock()
        command = [sys.executable, "-m", "loadtests.shaping", str(urlsplit(upstream).port)]
        # Out of the terminal's reach: Ctrl-C is for the run, which ends the servers before their store.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0)
        self.endpoint = f"http://127.0.0.1:{self._answer()['port']}"

    def shape(self, shape: StoreShape, seed: int = 1) -> None:
        self._do(do="shape", shape=shape.model_dump(mode="json"), seed=seed)

    def fetches(self) -> tuple[Fetch, ...]:
        return tuple(Fetch(**one) for one in self._do(do="fetches")["fetches"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with suppress(BrokenPipeError):
                pipe.close()

    def _do(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin
        with self._turn:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"the proxy in front of the store ended with {self._process.wait(10)}")
        return json.loads(line)


@dataclass(frozen=True)
class Unshaped:
    """No proxy at all: servers talk to the S3 server itself, and nobody counts what they fetch."""

    endpoint: str

    @property
    def upstream(self) -> str:
        return self.endpoint

    def shape(self, shape: StoreShape, seed: int = 1) -> None:
        if shape != StoreShape():
            raise ValueError("this store has no proxy in front of it that could shape it")

    def fetches(self) -> tuple[Fetch, ...]:
        return ()


@contextmanager
def shaped(upstream: str) -> Iterator[Store]:
    """A proxy in front of `upstream`, an address on loopback; it shapes nothing until it is told to."""
    store = Shaped(upstream)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def unshaped(upstream: str) -> Iterator[Store]:
    """For stores that are faster than a proxy; fetches are not counted then."""
    yield Unshaped(upstream)


# -- pacing ------------------------------------------------------------------------------------------------------------


class Pace:
    """Bandwidth that is shared by all transfers under way. A transfer alone takes its bytes over the bandwidth, no less.

    Each block reserves its time on the line, one after another. What comes late within a transfer may catch up a little, or
    lateness would add up; a line that was idle has saved nothing.
    """

    def __init__(self, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._transfers = 0
        self._free_s = 0.0

    @contextmanager
    def transfer(self) -> Iterator[None]:
        with self._lock:
            self._transfers += 1
            if self._transfers == 1:
                self._free_s = max(self._free_s, self._clock_s())
        try:
            yield
        finally:
            with self._lock:
                self._transfers -= 1

    def reserve(self, size_bytes: int, bytes_per_s: float | None) -> float:
        """When the block has passed, by the clock."""
        now_s = self._clock_s()
        if bytes_per_s is None:
            return now_s
        with self._lock:
            self._free_s = max(self._free_s, now_s - CREDIT_S) + size_bytes / bytes_per_s
            return self._free_s


def _sleep_until(moment_s: float) -> None:
    left_s = moment_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)


# -- the process -------------------------------------------------------------------------------------------------------


@dataclass
class Reading:
    """A fetch under way: `left` of its requests have not ended."""

    path: str
    wall_ns: int
    began_s: float
    ended_s: float
    bytes: int = 0
    left: int = 0


class Fetches:
    """What is fetched. A read from the first byte on begins a fetch; later ranges belong to the last one of their path."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readings: list[Reading] = []
        self._last: dict[str, Reading] = {}

    def begin(self, path: str, first_byte: int) -> Reading:
        with self._lock:
            reading = self._last.get(path)
            if first_byte == 0 or reading is None:
                now_s = time.perf_counter()
                reading = self._last[path] = Reading(path, time.time_ns(), now_s, now_s)
                self._readings.append(reading)
            reading.left += 1
            return reading

    def end(self, reading: Reading, sent_bytes: int) -> None:
        with self._lock:
            reading.bytes += sent_bytes
            reading.left -= 1
            reading.ended_s = time.perf_counter()

    def take(self) -> list[Fetch]:
        """Those that ended; they are told once."""
        with self._lock:
            ended = [reading for reading in self._readings if not reading.left]
            self._readings = [reading for reading in self._readings if reading.left]
            for reading in ended:
                if self._last.get(reading.path) is reading:
                    del self._last[reading.path]
        return [Fetch(one.path, one.wall_ns, one.bytes, one.ended_s - one.began_s) for one in ended]


@dataclass
class State:
    """What all connections share."""

    shape: StoreShape = field(default_factory=StoreShape)
    dice: random.Random = field(default_factory=lambda: random.Random(1))
    total: Pace = field(default_factory=Pace)
    fetches: Fetches = field(default_factory=Fetches)
    dice_lock: threading.Lock = field(default_factory=threading.Lock)

    def fault(self) -> str | None:
        """What befalls the next read of weights."""
        with self.dice_lock:
            drawn = self.dice.random()
        for fault in self.shape.faults:
            if drawn < fault.share:
                return fault.kind
            drawn -= fault.share
        return None


@dataclass(frozen=True)
class Head:
    """The first line of a request or an answer, its headers, and all of it as it came."""

    first: str
    headers: dict[str, str]
    raw: bytes

    @property
    def is_chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    @property
    def length(self) -> int | None:
        return int(self.headers["content-length"]) if "content-length" in self.headers else None

    @property
    def path(self) -> str:
        return unquote(urlsplit(self.first.split(" ")[1]).path)

    @property
    def reads_weights(self) -> bool:
        return self.first.startswith("GET ") and self.path.endswith(f"/{WEIGHTS}")

    @property
    def first_byte(self) -> int:
        found = FIRST_BYTE.match(self.headers.get("range", "bytes=0-"))
        return int(found[1]) if found else 0


class Ended(Exception):
    """The connection is over."""


class Connection:
    """One client's connection and its own to the S3 server: requests and answers in turn, as S3 clients send them."""

    def __init__(self, client: socket.socket, upstream_port: int, state: State) -> None:
        self._client = client
        self._upstream_port = upstream_port
        self._state = state
        self._pace = Pace()
        self._block = memoryview(bytearray(BLOCK_BYTES))

    def run(self) -> None:
        with suppress(OSError, Ended), self._client, socket.create_connection(("127.0.0.1", self._upstream_port)) as up:
            for one in (self._client, up):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._client.makefile("rb", HEAD_BYTES) as requests, up.makefile("rb", HEAD_BYTES) as answers:
                while True:
                    self._turn(requests, answers, up)

    def _turn(self, requests: BinaryIO, answers: BinaryIO, up: socket.socket) -> None:
        request = read_head(requests)
        reading = self._state.fetches.begin(request.path, request.first_byte) if request.reads_weights else None
        sent = Sent()
        try:
            time.sleep(self._state.shape.latency_ms / 1e3)
            fault = self._state.fault() if reading else None
            if fault in ("reset", "stall", "unavailable"):
                self._befall(fault)
                return
            self._pass_request(request, requests, up)
            self._pass_answer(request, answers, fault, sent)
        finally:
            if reading:
                self._state.fetches.end(reading, sent.bytes)

    def _befall(self, fault: str) -> None:
        """What needs no answer of the server's."""
        if fault == "unavailable":
            head = f"HTTP/1.1 503 Slow Down\r\ncontent-type: application/xml\r\ncontent-length: {len(SLOW_DOWN)}\r\n\r\n"
            self._client.sendall(head.encode() + SLOW_DOWN)
            return
        if fault == "stall":
            while self._client.recv(HEAD_BYTES):
                pass
            raise Ended
        # A socket that must not linger resets its connection when it is closed.
        self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise Ended

    def _pass_request(self, request: Head, requests: BinaryIO, up: socket.socket) -> None:
        raw = request.raw
        if "expect" in request.headers:
            raw = re.sub(rb"(?i)\r\nexpect:[^\r]*", b"", raw)
            self._client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        up.sendall(raw)
        for block in body_of(request, requests, self._block, lambda: BLOCK_BYTES):
            up.sendall(block)

    def _pass_answer(self, request: Head, answers: BinaryIO, fault: str | None, sent: Sent) -> None:
        answer = read_head(answers)
        status = int(answer.first.split(" ")[1])
        self._client.sendall(answer.raw)
        if request.first.startswith("HEAD ") or status in (204, 304):
            return
        if status >= 300:
            fault = None
        half = (answer.length or 0) // 2
        with self._pace.transfer(), self._state.total.transfer():
            for block in body_of(answer, answers, self._block, self._block_bytes, to_the_end=True):
                if fault == "corrupt" and sent.bytes <= half < sent.bytes + len(block):
                    block[half - sent.bytes] ^= 1
                if fault == "cut_off" and sent.bytes + len(block) > half:
                    self._send(block[: half - sent.bytes], sent)
                    raise Ended
                self._send(block, sent)
        if answer.length is None and not answer.is_chunked:
            raise Ended

    def _send(self, block: memoryview, sent: Sent) -> None:
        shape = self._state.shape
        alone = self._pace.reserve(len(block), rate(shape.connection_mib_per_s))
        shared = self._state.total.reserve(len(block), rate(shape.total_mib_per_s))
        _sleep_until(max(alone, shared))
        self._client.sendall(block)
        sent.bytes += len(block)

    def _block_bytes(self) -> int:
        shape = self._state.shape
        rates = [one for one in (rate(shape.connection_mib_per_s), rate(shape.total_mib_per_s)) if one]
        return min(BLOCK_BYTES, max(512, int(min(rates) * PACED_S))) if rates else BLOCK_BYTES


@dataclass
class Sent:
    """Bytes of a body that went to the client."""

    bytes: int = 0


def rate(mib_per_s: float | None) -> float | None:
    return None if mib_per_s is None else mib_per_s * MIB


def read_head(stream: BinaryIO) -> Head:
    """Raises Ended where the connection ends first."""
    lines = []
    while not lines or lines[-1] not in (b"\r\n", b"\n"):
        line = stream.readline(HEAD_BYTES)
        if not line:
            raise Ended
        lines.append(line)
    texts = [line.decode("latin-1").strip() for line in lines]
    headers = {name.strip().lower(): value.strip() for name, _, value in (text.partition(":") for text in texts[1:-1])}
    return Head(texts[0], headers, b"".join(lines))


def body_of(
    head: Head, stream: BinaryIO, room: memoryview, block_bytes: Callable[[], int], *, to_the_end: bool = False
) -> Iterator[memoryview]:
    """The body that follows `head`, as it came, in blocks that lie in `room` until the next one. Without a length a request has
    no body, and an answer lasts `to_the_end`. Raises Ended where the connection ends first."""
    if head.is_chunked:
        yield from _chunks(stream, room, block_bytes)
    elif head.length is not None:
        yield from _bytes(stream, head.length, room, block_bytes)
    elif to_the_end:
        with suppress(Ended):
            yield from _bytes(stream, sys.maxsize, room, block_bytes)


def _bytes(stream: BinaryIO, left: int, room: memoryview, block_bytes: Callable[[], int]) -> Iterator[memoryview]:
    while left:
        read = stream.readinto1(room[: min(left, block_bytes())])  # type: ignore[attr-defined]
        if not read:
            raise Ended
        left -= read
        yield room[:read]


def _chunks(stream: BinaryIO, room: memoryview, block_bytes: Callable[[], int]) -> Iterator[memoryview]:
    while True:
        line = stream.readline(HEAD_BYTES)
        yield memoryview(bytearray(line))
        size = int(line.split(b";")[0] or b"0", 16)
        yield from _bytes(stream, size, room, block_bytes)
        while True:
            ending = stream.readline(HEAD_BYTES)
            yield memoryview(bytearray(ending))
            if size or ending in (b"\r\n", b""):
                break
        if not size:
            return


def serve(upstream_port: int) -> None:
    """Until its standard input ends."""
    state = State()
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        threading.Thread(target=_accept, args=(listening, upstream_port, state), daemon=True).start()
        print(json.dumps({"port": listening.getsockname()[1]}), flush=True)
        for line in sys.stdin:
            print(json.dumps(obey(state, json.loads(line))), flush=True)


def obey(state: State, command: dict[str, Any]) -> dict[str, Any]:
    if command["do"] == "fetches":
        return {"fetches": [asdict(one) for one in state.fetches.take()]}
    state.shape = StoreShape.model_validate(command["shape"])
    state.dice = random.Random(command["seed"])
    return {}


def _accept(listening: socket.socket, upstream_port: int, state: State) -> None:
    with suppress(OSError):
        while True:
            client, _ = listening.accept()
            threading.Thread(target=Connection(client, upstream_port, state).run, daemon=True).start()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
