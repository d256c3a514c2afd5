"""Clients that go away at every moment of a relay; limits that are kept; streams that begin before their answer."""

from __future__ import annotations

import asyncio
import json

import pytest

from adapters.errors import DeadlineExceeded, EngineUnavailable
from gateway.backend import ResolvedRequest
from gateway.relay import CLIENT_GONE, Limits, relay
from tests.scripted_backend import ScriptedBackend

LIMITS = Limits(timeout_s=5, keepalive_after_s=0.05)


class Client:
    """Goes away when it is told to, and keeps what was sent."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self.sent: list[dict] = []
        self._more = asyncio.Event()

    async def receive(self) -> dict:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        self.sent.append(message)
        self._more.set()

    async def got(self, messages: int) -> None:
        while len(self.sent) < messages:
            await self._more.wait()
            self._more.clear()


def request(stream: bool = True) -> ResolvedRequest:
    body = json.dumps({"model": "demo"}).encode()
    return ResolvedRequest("/v1/chat/completions", "demo", None, body, stream, "r1")


@pytest.fixture
def client() -> Client:
    return Client()


async def settled(backend: ScriptedBackend) -> None:
    for _ in range(10):
        await asyncio.sleep(0)
    assert backend.running == 0, "the engine was not freed"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_before_the_head_frees_the_engine(backend, client, stream):
    backend.delay_s = 5
    going = asyncio.create_task(relay(client.receive, request(stream), backend, Limits(5, 5), 0))
    await asyncio.sleep(0.01)
    client.leaves.set()
    assert (await going).status_code == CLIENT_GONE
    await settled(backend)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_between_head_and_body_frees_the_engine(backend, client, stream):
    response = await relay(client.receive, request(stream), backend, LIMITS, 0)
    client.leaves.set()
    await asyncio.sleep(0)
    await response({}, client.receive, client.send)
    await settled(backend)


async def test_a_client_that_goes_in_mid_stream_frees_the_engine(backend, client):
    backend.gap_s = 5
    response = await relay(client.receive, request(), backend, LIMITS, 0)
    sending = asyncio.create_task(response({}, client.receive, client.send))
    await asyncio.wait_for(client.got(2), 1)
    client.leaves.set()
    await asyncio.wait_for(sending, 1)
    await settled(backend)


async def test_a_client_that_goes_while_a_late_stream_waits_frees_the_engine(backend, client):
    backend.delay_s = 5
    response = await relay(client.receive, request(), backend, LIMITS, 0)
    sending = asyncio.create_task(response({}, client.receive, client.send))
    await asyncio.wait_for(client.got(2), 1)
    assert client.sent[1]["body"].startswith(b": ")
    client.leaves.set()
    await asyncio.wait_for(sending, 1)
    await settled(backend)


async def test_a_server_that_cancels_the_request_frees_the_engine(backend, client):
    backend.gap_s = 5
    response = await relay(client.receive, request(), backend, LIMITS, 0)
    sending = asyncio.create_task(response({}, client.receive, client.send))
    await asyncio.sleep(0.01)
    sending.cancel()
    await asyncio.wait({sending})
    await settled(backend)


# The limit of the client


async def answered(backend: ScriptedBackend, client: Client, limits: Limits, *, stream: bool = True) -> str:
    """The whole body, as the client got it; DeadlineExceeded's text where no headers were sent."""
    try:
        response = await relay(client.receive, request(stream), backend, limits, 0)
    except DeadlineExceeded as error:
        return str(error)
    await response({}, client.receive, client.send)
    return b"".join(message.get("body", b"") for message in client.sent).decode()


@pytest.mark.parametrize(
    ("stream", "delay_s", "gap_s"),
    [(False, 5, 0), (True, 5, 0), (True, 0, 5), (True, 0.12, 5)],
    ids=["before an answer", "while a late stream waits", "in mid-stream", "in mid-stream of a late one"],
)
async def test_the_limit_is_kept_within_100_ms(backend, client, stream, delay_s, gap_s):
    backend.delay_s, backend.gap_s = delay_s, gap_s
    loop = asyncio.get_running_loop()
    began = loop.time()
    said = await answered(backend, client, Limits(timeout_s=0.3, keepalive_after_s=0.05), stream=stream)
    assert 0.29 <= loop.time() - began <= 0.4
    assert "no whole answer within 300 ms" in said
    await settled(backend)


async def test_a_client_that_reads_too_slowly_holds_the_engine_no_longer_than_its_limit(backend, client):
    reads = asyncio.Event()
    plain_send = client.send

    async def stuck(message: dict) -> None:
        await plain_send(message)
        if message.get("body", b"").startswith(b"data: {"):
            await reads.wait()

    client.send = stuck
    response = await relay(client.receive, request(), backend, Limits(timeout_s=0.2, keepalive_after_s=1), 0)
    sending = asyncio.create_task(response({}, client.receive, client.send))
    await asyncio.sleep(0.3)
    await settled(backend)
    reads.set()
    await asyncio.wait_for(sending, 1)
    assert b"no whole answer within 200 ms" in client.sent[-2]["body"]


# Streams that began before their answer


async def test_comments_keep_coming_while_a_late_stream_waits(backend, client):
    backend.delay_s = 0.5
    said = await answered(backend, client, Limits(timeout_s=5, keepalive_after_s=0.05))
    assert 5 <= said.count(": waiting\n\n") <= 10
    assert said.endswith("data: [DONE]\n\n")


async def test_what_the_engine_refuses_late_is_an_event_like_any_error(backend, client):
    backend.delay_s, backend.refusal = 0.1, b'{"error": {"message": "too long",\n"code": 400}}'
    said = await answered(backend, client, LIMITS)
    assert said.endswith('data: {"error": {"message": "too long", "code": 400}}\n\n')


async def test_a_late_error_brings_its_advice_on_retries_as_comments(backend, client):
    backend.delay_s, backend.error = 0.1, EngineUnavailable("starting", retry_after_s=2.4)
    said = await answered(backend, client, LIMITS)
    assert ": retry-after: 3\n: retry-after-ms: 2400\n\ndata: {" in said


async def test_a_bug_behind_a_late_stream_is_an_event_without_its_text(backend, client):
    backend.delay_s, backend.error = 0.1, RuntimeError("secret bucket path /srv/x")
    said = await answered(backend, client, LIMITS)
    assert '"internal_error"' in said
    assert "secret" not in said
