"""Moves through the gateway are told behind the answers, and trouble with that stays behind them too."""

from __future__ import annotations

import asyncio
import contextlib
import json

import httpx2
import pytest

from adapters import metrics
from adapters.settings import WebhookSettings
from gateway.app import Outside, build_app
from tests.recorded_meter import RecordedMeter
from tests.unit.adapters.test_webhook import receiving
from tests.unit.gateway.conftest import until
from tests.unit.gateway.test_promoter import NEW, replicas, row

PARROT = {"base": "demo", "name": "parrot"}


@pytest.fixture
def meter() -> RecordedMeter:
    return RecordedMeter()


@pytest.fixture
def gateway(settings, registry, backend, meter):
    """Makes a client of a gateway that tells `url`."""

    def make(url: str, **fields) -> httpx2.AsyncClient:
        hook = WebhookSettings(url=url, secret="s", **fields)
        app = build_app(settings, registry, backend, outside=Outside(webhook=hook), meter=meter)
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://gateway")

    return make


@contextlib.asynccontextmanager
async def running(http: httpx2.AsyncClient):
    """The gateway with its work in the background."""
    app = http._transport.app
    async with app.router.lifespan_context(app):
        yield


async def test_every_kind_of_move_is_told_and_nothing_else(gateway):
    async with receiving(200) as receiver, gateway(receiver.url) as http:
        for verb, body in [
            ("promote", {"version": 2, "now": True}),
            ("promote", {"version": 2, "now": True}),  # is there already
            ("weights", {"weights": {"1": 1, "2": 1}}),
            ("rollback", {}),
            ("tag", {"version": 1, "tags": {"a": "b"}}),  # moves nothing
            ("protect", {}),
            ("unset", {"unlock": True}),
            ("retire", {"version": 1}),
            ("restore", {"version": 1}),
        ]:
            answer = await http.post(f"/registry/v1/{verb}", json=PARROT | body)
            assert answer.status_code == 200, answer.text
        await until(lambda: len(receiver.requests) >= 7)
        await asyncio.sleep(0.1)
    told = sorted((json.loads(body) for _, _, body in receiver.requests), key=lambda move: move["revision"])
    assert [move["row"]["kind"] for move in told] == ["promote", "weights", "rollback", "protect", "unset", "retire", "restore"]


async def test_a_receiver_that_never_answers_holds_no_answer_up(gateway, meter):
    async with receiving("silent") as receiver, gateway(receiver.url, timeout_s=2, attempts=1) as http:
        assert (await http.post("/registry/v1/promote", json=PARROT | {"version": 2, "now": True})).status_code == 200
        assert meter.counted(metrics.WEBHOOK_DELIVERIES) == 0, "the answer came after the delivery"
        await until(lambda: meter.counted(metrics.WEBHOOK_DELIVERIES, result="timed_out") == 1)


async def test_a_receiver_that_is_gone_fails_no_move_and_is_counted(gateway, meter, caplog):
    async with gateway("http://127.0.0.1:9/", attempts=1) as http:
        answer = await http.post("/registry/v1/promote", json=PARROT | {"version": 2, "now": True})
        assert answer.json()["aliases"] == {"production": 2}
        await until(lambda: meter.counted(metrics.WEBHOOK_DELIVERIES, result="unreachable") == 1)
    assert "unreachable" in caplog.text


async def test_a_move_that_waited_is_told_when_it_has_ended_and_a_failed_one_as_that(gateway, backend):
    async with receiving(200) as receiver, gateway(receiver.url) as http, running(http):
        for status, limits in ((200, {}), (409, {"timeout_s": 0.1})):
            backend.resident = replicas() if status == 200 else replicas({NEW: row()})
            version = 2 if status == 200 else 1
            answer = await http.post("/registry/v1/promote", json=PARROT | {"version": version} | limits)
            assert answer.status_code == status, answer.text
        await until(lambda: len(receiver.requests) >= 2)
    told = [json.loads(body)["row"] for _, _, body in receiver.requests]
    assert [(move["kind"], move["to_version"]) for move in told] == [("promote", 2), ("promote_failed", 2)]
