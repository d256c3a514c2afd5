"""Fetches counted in front of the store."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from loadtests.counting import Fetches, counting

BODY = b"x" * 200_000


class Bucket(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(BODY)

    def do_PUT(self) -> None:
        self._answer(self.rfile.read(int(self.headers["content-length"]))[:10])

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def fetches() -> Iterator[Fetches]:
    with HTTPServer(("127.0.0.1", 0), Bucket) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with counting(f"http://127.0.0.1:{server.server_port}") as fetches:
            yield fetches
        server.shutdown()


def ask(fetches: Fetches, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> bytes:
    request = urllib.request.Request(f"{fetches.endpoint}{path}", body, headers, method=method)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
        return answer.read()


def test_bytes_pass_as_they_are_both_ways(fetches: Fetches):
    assert ask(fetches, "/bench/x") == BODY
    assert ask(fetches, "/bench/x", "PUT", BODY) == BODY[:10]


def test_a_fetch_is_counted_once_however_many_ranges_it_has(fetches: Fetches):
    weights = "/bench/blobs/ab/adapter_model.safetensors"
    for range_ in ("bytes=0-99", "bytes=100-199"):
        ask(fetches, weights, range=range_)
    assert fetches.of("blobs/ab/") == 1


def test_only_reads_of_weights_are_fetches(fetches: Fetches):
    ask(fetches, "/bench/blobs/ab/adapter_config.json")
    ask(fetches, "/bench/blobs/ab/adapter_model.safetensors", "PUT", BODY)
    assert fetches.of() == 0


def test_fetches_of_one_adapter_are_told_from_others(fetches: Fetches):
    for name in ("one", "two", "two"):
        ask(fetches, f"/bench/lora/{name}/adapter_model.safetensors")
    assert (fetches.of("/one/"), fetches.of("/two/"), fetches.of()) == (1, 2, 3)
