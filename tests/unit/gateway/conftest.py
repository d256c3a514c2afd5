"""A gateway in process: a memory registry with one adapter, a scripted backend, and the official client over ASGI."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Callable

import httpx2
import openai
import pytest

from adapters.registry import Registry
from adapters.settings import StoreSettings
from adapters.store import open_store
from adapters.types import CONFIG_FILE, WEIGHTS_FILE, FileDigest, PreparedAdapter, content_digest
from gateway.app import build_app
from gateway.settings import GatewaySettings
from tests.scripted_backend import ScriptedBackend


def prepared(content: bytes, rank: int = 8) -> PreparedAdapter:
    config = b"{}"
    files = tuple(
        FileDigest(name, len(data), hashlib.sha256(data).hexdigest())
        for name, data in ((CONFIG_FILE, config), (WEIGHTS_FILE, content))
    )
    return PreparedAdapter(config, content, files, content_digest(files), rank, 16.0, ("q_proj",), 2, None)


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what happens behind an answer."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for is not ours to signal
            await asyncio.sleep(0.01)


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
async def registry() -> Registry:
    registry = Registry(open_store(StoreSettings(url=f"memory://{uuid.uuid4().hex}")))
    for content in (b"one", b"two"):
        await registry.publish("demo", "parrot", prepared(content))
    await registry.promote("demo", "parrot", "production", 1)
    return registry


@pytest.fixture
def settings() -> GatewaySettings:
    return GatewaySettings(max_body_bytes=100_000, keepalive_after_s=0.1)


@pytest.fixture
async def app(settings, registry, backend):
    app = build_app(settings, registry, backend, poll_interval_s=0.05)
    async with app.router.lifespan_context(app):
        await app.state.parts.view.refresh()
        yield app


@pytest.fixture
async def http(app) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


@pytest.fixture
def client(http) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="none", http_client=http, max_retries=0)
