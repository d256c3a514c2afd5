"""A store that is slow, narrow or faulty as far as servers can tell, and what they fetched from it."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from loadtests.scenario import Fault, StoreShape
from loadtests.shaping import MIB, Fetch, Pace, Store, shaped, unshaped

WEIGHTS = "/bench/blobs/ab/adapter_model.safetensors"
CONFIG = "/bench/blobs/ab/adapter_config.json"
BODY = bytes(range(256)) * 1600
TRIES = 5  # lateness only adds: the best of some is what the store does


class Bucket(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.startswith("/chunked"):
            return self._answer_in_chunks()
        if self.path.startswith("/missing"):
            return self._answer(b"no such key", 404)
        start, end = 0, len(BODY)
        if range_ := self.headers.get("range"):
            first, last = range_.removeprefix("bytes=").split("-")
            start, end = int(first), int(last) + 1
        return self._answer(BODY[start:end], 206 if range_ else 200)

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(BODY)))
        self.end_headers()

    def do_PUT(self) -> None:
        self._answer(self.rfile.read(int(self.headers["content-length"]))[-10:])

    def do_DELETE(self) -> None:
        self.send_response(204)
        self.end_headers()

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer_in_chunks(self) -> None:
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for part in (BODY[:1000], BODY[1000:]):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Bucket) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def proxy(upstream: str) -> Iterator[Store]:
    with shaped(upstream) as store:
        yield store


@pytest.fixture
def store(proxy: Store) -> Store:
    proxy.shape(StoreShape())
    proxy.fetches()
    return proxy


def connection(store: Store) -> http.client.HTTPConnection:
    address = urlsplit(store.endpoint)
    return http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)


def ask(store: Store, path: str = WEIGHTS, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    talk = connection(store)
    try:
        talk.request(method, path, body, headers)
        answer = talk.getresponse()
        return answer.status, answer.read()
    finally:
        talk.close()


def best_s(work: object, *args: object) -> float:
    took = []
    for _ in range(TRIES):
        began = time.perf_counter()
        work(*args)  # type: ignore[operator]
        took.append(time.perf_counter() - began)
    return min(took)


def assert_takes(took_s: float, wanted_s: float) -> None:
    assert 0.99 * wanted_s <= took_s < 1.3 * wanted_s


def failing(share: float, kind: str) -> StoreShape:
    return StoreShape(faults=(Fault(kind=kind, share=share),))  # type: ignore[arg-type]


class TestBytes:
    """What passes is what was sent."""

    @pytest.mark.parametrize("path", [WEIGHTS, CONFIG, "/chunked"])
    def test_answers_pass_as_they_are(self, store: Store, path: str):
        assert ask(store, path) == (200, BODY)

    def test_bodies_of_requests_pass_as_they_are(self, store: Store):
        assert ask(store, CONFIG, "PUT", BODY + b"0123456789") == (200, b"0123456789")

    def test_a_body_that_waits_for_leave_gets_it(self, store: Store):
        talk = connection(store)
        talk.connect()
        talk.sock.sendall(b"PUT /bench/x HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n")
        assert talk.sock.recv(1000).startswith(b"HTTP/1.1 100")
        talk.sock.sendall(b"abc")
        answer = b""
        while not answer.endswith(b"\r\n\r\nabc"):
            answer += talk.sock.recv(1000)
        talk.close()

    def test_one_connection_takes_requests_of_every_kind_in_turn(self, store: Store):
        talk = connection(store)
        seen = []
        for method, path in (("HEAD", WEIGHTS), ("DELETE", CONFIG), ("GET", "/missing"), ("GET", "/chunked"), ("GET", WEIGHTS)):
            talk.request(method, path)
            answer = talk.getresponse()
            seen.append((answer.status, len(answer.read())))
        talk.close()
        assert seen == [(200, 0), (204, 0), (404, 11), (200, len(BODY)), (200, len(BODY))]

    def test_a_shape_that_ends_leaves_nothing_behind(self, store: Store):
        store.shape(failing(1, "unavailable"))
        store.shape(StoreShape())
        assert ask(store) == (200, BODY)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class TestPace:
    """When blocks have passed a line of 1,000 bytes a second, by a clock that stands still unless it is moved."""

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def pace(self, clock: Clock) -> Pace:
        return Pace(clock)

    def test_blocks_take_their_bytes_over_the_bandwidth_one_after_another(self, pace: Pace):
        with pace.transfer():
            assert [pace.reserve(500, 1000) for _ in range(3)] == [100.5, 101.0, 101.5]

    def test_a_block_that_comes_a_little_late_makes_the_transfer_no_longer(self, pace: Pace, clock: Clock):
        with pace.transfer():
            pace.reserve(500, 1000)
            clock.now_s = 100.51
            assert pace.reserve(500, 1000) == 101.0

    def test_a_source_that_is_slow_saves_up_nothing(self, pace: Pace, clock: Clock):
        with pace.transfer():
            pace.reserve(500, 1000)
            clock.now_s = 110.0
            assert pace.reserve(500, 1000) == pytest.approx(110.5, abs=0.03)

    def test_a_line_that_was_idle_saved_up_nothing(self, pace: Pace, clock: Clock):
        with pace.transfer():
            pace.reserve(500, 1000)
        clock.now_s = 100.51
        with pace.transfer():
            assert pace.reserve(500, 1000) == 101.01

    def test_transfers_at_once_share_the_line(self, pace: Pace):
        with pace.transfer(), pace.transfer():
            assert [pace.reserve(500, 1000) for _ in range(4)][-1] == 102.0

    def test_without_a_bandwidth_nothing_waits(self, pace: Pace):
        with pace.transfer():
            assert [pace.reserve(500, None) for _ in range(3)] == [100.0] * 3


class TestTimes:
    """Never quicker than what was asked for; a busy machine may add to it."""

    @pytest.mark.parametrize("which", ["connection_mib_per_s", "total_mib_per_s"])
    @pytest.mark.parametrize("mib_per_s", [4.0, 2.0])
    def test_a_transfer_takes_its_bytes_over_the_bandwidth(self, store: Store, which: str, mib_per_s: float):
        store.shape(StoreShape(**{which: mib_per_s}))
        assert_takes(best_s(ask, store), len(BODY) / MIB / mib_per_s)

    def test_connections_share_the_total(self, store: Store):
        store.shape(StoreShape(total_mib_per_s=8))
        with ThreadPoolExecutor(4) as pool:
            took_s = best_s(lambda: list(pool.map(lambda _: ask(store), range(4))))
        assert_takes(took_s, 4 * len(BODY) / MIB / 8)

    def test_connections_do_not_share_their_own(self, store: Store):
        store.shape(StoreShape(connection_mib_per_s=4))
        with ThreadPoolExecutor(4) as pool:
            took_s = best_s(lambda: list(pool.map(lambda _: ask(store), range(4))))
        assert_takes(took_s, len(BODY) / MIB / 4)

    def test_each_request_waits_for_the_latency(self, store: Store):
        store.shape(StoreShape(latency_ms=50))
        assert 0.05 <= best_s(ask, store, CONFIG, "HEAD") < 0.1

    def test_a_transfer_under_way_takes_on_a_new_bandwidth(self, store: Store):
        store.shape(StoreShape(total_mib_per_s=0.02))  # 20 s
        with ThreadPoolExecutor(1) as pool:
            began = time.perf_counter()
            asked = pool.submit(ask, store)
            time.sleep(0.1)
            store.shape(StoreShape())
            assert asked.result() == (200, BODY)
        assert time.perf_counter() - began < 5


class TestFaults:
    def test_unavailable_is_the_error_that_s3_slows_clients_down_with(self, store: Store):
        store.shape(failing(1, "unavailable"))
        status, body = ask(store)
        assert (status, b"<Code>SlowDown</Code>" in body) == (503, True)

    def test_reset_breaks_the_connection(self, store: Store):
        store.shape(failing(1, "reset"))
        with pytest.raises(ConnectionResetError):
            ask(store)

    def test_cut_off_ends_after_half_the_bytes(self, store: Store):
        store.shape(failing(1, "cut_off"))
        with pytest.raises(http.client.IncompleteRead) as caught:
            ask(store)
        assert caught.value.partial == BODY[: len(BODY) // 2]

    def test_corrupt_changes_one_byte(self, store: Store):
        store.shape(failing(1, "corrupt"))
        _, body = ask(store)
        assert sum(a != b for a, b in zip(body, BODY, strict=True)) == 1

    def test_stall_says_nothing(self, store: Store):
        store.shape(failing(1, "stall"))
        talk = connection(store)
        talk.timeout = 0.3
        talk.request("GET", WEIGHTS)
        with pytest.raises(TimeoutError):
            talk.getresponse()
        talk.close()

    def test_only_reads_of_weights_have_faults(self, store: Store):
        store.shape(failing(1, "unavailable"))
        assert ask(store, CONFIG)[0] == 200
        assert ask(store, WEIGHTS, "PUT", BODY)[0] == 200

    def test_a_seed_decides_whom_they_befall(self, store: Store):
        def drawn(seed: int) -> list[int]:
            store.shape(failing(0.5, "unavailable"), seed)
            return [ask(store)[0] for _ in range(40)]

        assert drawn(3) == drawn(3) != drawn(4)

    def test_shares_are_of_all_reads(self, store: Store):
        store.shape(StoreShape(faults=(Fault(kind="unavailable", share=0.3), Fault(kind="reset", share=0.3))))
        statuses = []
        for _ in range(200):
            try:
                statuses.append(ask(store)[0])
            except ConnectionResetError:
                statuses.append(0)
        assert {kind: statuses.count(kind) for kind in (503, 0)} == {503: pytest.approx(60, abs=25), 0: pytest.approx(60, abs=25)}


def told(store: Store, count: int) -> list[Fetch]:
    """The fetches, when there are `count`: a client has the last byte a moment before the proxy knows that it went."""
    found, deadline_s = list(store.fetches()), time.monotonic() + 5
    while len(found) < count and time.monotonic() < deadline_s:
        time.sleep(0.01)
        found += store.fetches()
    return found


class TestFetches:
    def test_a_read_of_weights_is_told_once_with_its_bytes_and_its_time(self, store: Store):
        store.shape(StoreShape(total_mib_per_s=4))
        before_ns = time.time_ns()
        ask(store)
        (fetch,) = told(store, 1)
        assert (fetch.path, fetch.bytes) == (WEIGHTS, len(BODY))
        assert fetch.took_s >= 0.99 * len(BODY) / MIB / 4
        assert before_ns <= fetch.wall_ns <= time.time_ns()
        assert store.fetches() == ()

    def test_ranges_of_one_fetch_are_one(self, store: Store):
        for range_ in ("bytes=0-99", "bytes=100-299"):
            ask(store, range=range_)
        assert [fetch.bytes for fetch in told(store, 1)] == [300]

    def test_a_fetch_again_is_another(self, store: Store):
        ask(store)
        ask(store)
        assert len(told(store, 2)) == 2

    def test_only_reads_of_weights_are_fetches(self, store: Store):
        ask(store, CONFIG)
        ask(store, WEIGHTS, "PUT", BODY)
        ask(store, WEIGHTS, "HEAD")
        assert store.fetches() == ()

    def test_one_that_failed_is_told_with_the_bytes_that_went(self, store: Store):
        store.shape(failing(1, "cut_off"))
        with pytest.raises(http.client.IncompleteRead):
            ask(store)
        assert [fetch.bytes for fetch in told(store, 1)] == [len(BODY) // 2]


def test_ctrl_c_of_a_run_does_not_reach_the_proxy_before_its_servers_have_ended():
    """A terminal sends it to the whole group of the command."""
    run = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert run.stdout and run.stdout.readline() == "up\n"
    os.killpg(run.pid, signal.SIGINT)
    assert run.communicate(timeout=30)[0] == "interrupted\n0 fetches\n"


INTERRUPTED = """
import signal, time
from loadtests.shaping import shaped
signal.signal(signal.SIGINT, signal.default_int_handler)
with shaped("http://127.0.0.1:9") as store:
    try:
        print("up", flush=True)
        time.sleep(20)
    except KeyboardInterrupt:
        print("interrupted")
        time.sleep(0.5)
        print(len(store.fetches()), "fetches")
"""


def test_without_a_proxy_servers_see_the_store_itself(upstream: str):
    with unshaped(upstream) as store:
        assert store.endpoint == store.upstream == upstream
        assert ask(store) == (200, BODY)
        assert store.fetches() == ()
        store.shape(StoreShape())
        with pytest.raises(ValueError, match="no proxy"):
            store.shape(StoreShape(latency_ms=1))
