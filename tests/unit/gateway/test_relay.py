"""Clients that go away, at every moment of a relay."""

from __future__ import annotations

import asyncio
import json

import pytest

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
