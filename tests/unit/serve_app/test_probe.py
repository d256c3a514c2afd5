"""The first answer of a base, whichever routes it serves."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest

from adapters.errors import EngineUnavailable
from gateway.settings import GatewaySettings
from serve_app import probe

ANSWERS = {
    "/v1/chat/completions": {"choices": [{"message": {"content": " Hello there "}}]},
    "/v1/completions": {"choices": [{"text": "there"}]},
    "/v1/embeddings": {"data": [{"embedding": [0.0, 1.0]}]},
}


@pytest.fixture
def server():
    """A server that answers only the routes in `served`, after `failures` answers of 503."""

    class Handler(BaseHTTPRequestHandler):
        served: ClassVar[set[str]] = set()
        failures = 0

        def do_POST(self):
            cls = type(self)
            status = 503 if cls.failures else 200 if self.path in cls.served else 400
            cls.failures = max(0, cls.failures - 1)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(ANSWERS[self.path]).encode() if status == 200 else b"{}")

        def log_message(self, *arguments):
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield Handler, GatewaySettings(port=http.server_port)
    http.shutdown()


@pytest.mark.parametrize(
    ("route", "text"),
    [
        ("/v1/chat/completions", "Hello there"),
        ("/v1/completions", "there"),
        ("/v1/embeddings", "an embedding of 2 numbers"),
    ],
)
def test_a_base_is_asked_on_a_route_that_it_serves(server, route, text):
    handler, settings = server
    handler.served = {route}
    assert probe.first_answer(settings, "base") == text


def test_a_base_that_is_not_ready_yet_is_asked_again(server, monkeypatch):
    monkeypatch.setattr(probe, "RETRY_AFTER_S", 0)
    handler, settings = server
    handler.served, handler.failures = {"/v1/completions"}, 3
    assert probe.first_answer(settings, "base") == "there"


def test_a_base_that_never_answers_is_named_with_the_last_problem(server, monkeypatch):
    monkeypatch.setattr(probe, "READY_TIMEOUT_S", 0)
    _, settings = server
    with pytest.raises(EngineUnavailable, match="`base` gave no answer"):
        probe.first_answer(settings, "base")
