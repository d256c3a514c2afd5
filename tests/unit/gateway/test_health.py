"""What operators ask a gateway: whether it lives, whether it can answer, how fresh its picture is, what was measured."""

from __future__ import annotations

import asyncio

import pytest

from adapters import metrics
from adapters.errors import (
    EngineUnavailable,
    StoreCredentialsExpired,
    StoreError,
    StoreNoBucket,
    StoreThrottled,
    StoreUnreachable,
)
from adapters.registry import Registry
from gateway.app import build_app
from gateway.settings import GatewaySettings
from tests.fake_store import FakeStore
from tests.recorded_meter import RecordedMeter
from tests.scripted_backend import ScriptedBackend


async def test_ready_tells_how_fresh_the_picture_of_the_registry_is(http) -> None:
    answer = await http.get("/readyz")
    assert answer.status_code == 200
    body = answer.json()
    assert body["status"] == "ok"
    assert body["registry_generation"] >= 1
    assert 0 <= body["registry_age_s"] < 60
    assert body["registry_error"] is None


@pytest.mark.parametrize("error", [StoreUnreachable, StoreThrottled, StoreCredentialsExpired, StoreNoBucket])
async def test_a_registry_that_cannot_be_read_any_more_is_told_and_does_not_end_the_service(error: type[StoreError]) -> None:
    store = FakeStore()
    app = build_app(GatewaySettings(), Registry(store), ScriptedBackend(), poll_interval_s=0.01)
    async with app.router.lifespan_context(app), _client(app) as http:
        await app.state.parts.view.refresh()
        store.fail(error("down"), times=1_000_000)
        body = await _until(http, lambda body: body["registry_error"])
    assert (body["status"], body["registry"], body["registry_error"]) == ("ok", True, error.default_reason)


async def test_a_gateway_that_never_saw_the_registry_is_not_ready_and_says_why() -> None:
    store = FakeStore()
    store.fail(StoreUnreachable("down"), times=1_000_000)
    app = build_app(GatewaySettings(), Registry(store), ScriptedBackend(), poll_interval_s=0.01)
    async with app.router.lifespan_context(app), _client(app) as http:
        body = await _until(http, lambda body: body["registry_error"])
        assert (await http.get("/readyz")).status_code == 503
    assert (body["status"], body["registry"], body["registry_age_s"]) == ("starting", False, None)


async def test_metrics_are_the_nodes_as_the_backend_has_them(http, backend: ScriptedBackend) -> None:
    backend.metrics_text = b'# TYPE loramux_registry_generation gauge\nloramux_registry_generation{process="a"} 3.0\n'
    answer = await http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.content == backend.metrics_text


async def test_metrics_without_an_agent_are_an_error_and_not_one_processs_part(http, backend: ScriptedBackend) -> None:
    backend.error = EngineUnavailable("the node's metrics agent does not answer", retry_after_s=5)
    answer = await http.get("/metrics")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_unavailable"


async def test_the_picture_of_the_registry_is_measured() -> None:
    meter, store = RecordedMeter(), FakeStore()
    app = build_app(GatewaySettings(), Registry(store), ScriptedBackend(), poll_interval_s=0.01, meter=meter)
    async with app.router.lifespan_context(app):
        await _until_true(lambda: meter.gauge(metrics.REGISTRY_GENERATION) == 1)
        assert meter.gauge(metrics.REGISTRY_ADAPTERS) == 0
        store.fail(StoreThrottled("slow"), times=1_000_000)
        age_s = meter.gauge(metrics.REGISTRY_AGE)
        await _until_true(lambda: meter.counted(metrics.REGISTRY_REFRESH_ERRORS, reason="throttled") > 1)
        await _until_true(lambda: meter.gauge(metrics.REGISTRY_AGE) > age_s)


async def test_the_age_grows_on_while_a_look_hangs() -> None:
    meter, store = RecordedMeter(), FakeStore()
    app = build_app(GatewaySettings(), Registry(store), ScriptedBackend(), poll_interval_s=0.01, meter=meter)
    async with app.router.lifespan_context(app):
        await _until_true(lambda: (meter.gauge(metrics.REGISTRY_AGE) or 0) > 0)
        store.gate = asyncio.Event()
        await _until_true(lambda: meter.gauge(metrics.REGISTRY_AGE) > 0.1)


def _client(app):
    import httpx2

    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://gateway")


async def _until(http, holds) -> dict:
    async with asyncio.timeout(30):
        while not holds(body := (await http.get("/readyz")).json()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return body


async def _until_true(holds) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
