"""The client for cold starts, against a scripted server that knows where each adapter is."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from loadtests import coldstart

NAMES = [f"a{number}" for number in range(6)]
COST_MS = {"remote": 30.0, "disk": 10.0, "engine": 0.0}


class Server:
    """Answers as LoraMux does; an adapter that was loaded stays in the engine until it is evicted."""

    def __init__(self) -> None:
        self.tiers = dict.fromkeys(NAMES, "remote")
        self.asked: Counter[str] = Counter()
        self.busy_evictions = 0
        self.url = ""
        self.app = Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/registry/v1/adapters", self.adapters),
                Route("/registry/v1/evict", self.evict, methods=["POST"]),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/metrics", self.metrics),
            ]
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "demo"}, *({"id": f"demo:{name}"} for name in NAMES)]})

    async def adapters(self, request: Request) -> Response:
        rows = [{"name": name, "aliases": {"production": 1}, "versions": [{"version": 1}]} for name in NAMES]
        return JSONResponse({"adapters": rows})

    async def evict(self, request: Request) -> Response:
        asked = await request.json()
        if self.busy_evictions:
            self.busy_evictions -= 1
            return JSONResponse({"replicas": [{"replica": "r", "tier": "engine", "reason": "in_use"}]})
        self.tiers[asked["name"]] = asked["tier"]
        return JSONResponse({"replicas": [{"replica": "r", "tier": asked["tier"], "reason": None}]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        name = body["model"].partition(":")[2].partition("@")[0]
        self.asked[name] += 1
        tier = self.tiers[name] if name else "base"
        if name:
            self.tiers[name] = "engine"
        cost_ms = COST_MS.get(tier, 0.0)
        headers = {
            "x-loramux-tier": tier,
            "x-loramux-load": "leader" if tier in ("remote", "disk") else "none",
            "server-timing": f"load;dur={cost_ms}",
        }

        async def events():
            await asyncio.sleep(cost_ms / 1e3)
            for _ in range(min(body["max_tokens"], 400)):
                yield f"data: {json.dumps({'model': body['model'], 'choices': [{'text': 'x'}]})}\n\n"
                await asyncio.sleep(0.001)

        return StreamingResponse(events(), headers=headers, media_type="text/event-stream")

    async def metrics(self, request: Request) -> Response:
        lines = [f'loramux_requests_total{{process="{p}",name="all"}} {self.asked.total() / 2}' for p in ("a", "b")]
        return PlainTextResponse("\n".join(lines) + "\n")


@pytest.fixture
def server() -> Iterator[Server]:
    scripted = Server()
    running = uvicorn.Server(uvicorn.Config(scripted.app, port=0, log_level="error"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        thread.join(0.01)
    scripted.url = f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    yield scripted
    running.should_exit = True
    thread.join(10)


def run(monkeypatch, out: Path, *words: str) -> dict:
    monkeypatch.setattr(coldstart, "QUIET_S", 0.2)
    monkeypatch.setattr(coldstart, "METRICS_AGE_S", 0)
    small = [
        "--times",
        "3",
        "--hot",
        "3",
        "--tokens",
        "2",
        "--streams",
        "2",
        "--different",
        "2",
        "--at-once",
        "4",
        "--rate",
        "20",
    ]
    monkeypatch.setattr("sys.argv", ["coldstart", "--out", str(out), *small, *words])
    coldstart.main()
    return json.loads((out / "summary.json").read_text())


def test_each_tier_is_set_before_it_is_measured(monkeypatch, tmp_path: Path, server: Server):
    summary = run(monkeypatch, tmp_path, "--url", server.url)
    seen = {tier: {row["tier"] for row in rows} for tier, rows in summary["tiers"].items()}
    assert seen == {"base": {"base"}, "hot": {"engine"}, "remote": {"remote"}, "disk": {"disk"}}
    assert {row["stages_ms"]["load"] for row in summary["tiers"]["remote"]} == {30.0}


def test_an_adapter_in_use_is_evicted_when_it_is_free(monkeypatch, tmp_path: Path, server: Server):
    server.busy_evictions = 3
    summary = run(monkeypatch, tmp_path, "--url", server.url)
    assert {row["tier"] for row in summary["tiers"]["remote"]} == {"remote"}


def test_many_at_once_on_one_cold_begin_one_load(monkeypatch, tmp_path: Path, server: Server):
    summary = run(monkeypatch, tmp_path, "--url", server.url)
    assert sum(row["load"] == "leader" for row in summary["bursts"]["same"]) == 1


def test_gaps_are_those_of_streams_that_ran_before_the_first_cold_request(monkeypatch, tmp_path: Path, server: Server):
    gaps = run(monkeypatch, tmp_path, "--url", server.url)["gaps"]
    assert (gaps["streams"], gaps["loads"], gaps["failures"]) == (2, 2, 0)
    assert gaps["quiet"]["gaps"] > 10
    assert gaps["loading"]["gaps"] > 10


def test_without_tier_routes_every_fresh_adapter_is_asked_for_cold_once(monkeypatch, tmp_path: Path, server: Server):
    server.tiers |= {f"f{number}": "remote" for number in range(9)}
    fresh = [f"demo:f{number}" for number in range(9)]
    summary = run(monkeypatch, tmp_path, "--url", server.url, "--fresh", "--models", *fresh)
    assert set(summary["tiers"]) == {"base", "hot", "remote"}
    assert {row["tier"] for row in summary["tiers"]["remote"]} == {"remote"}
    assert {row["tier"] for row in summary["bursts"]["different"]} == {"remote"}


def test_too_few_fresh_adapters_are_said_not_asked_twice(monkeypatch, tmp_path: Path, server: Server):
    with pytest.raises(SystemExit, match="fresh adapters are wanted"):
        run(monkeypatch, tmp_path, "--url", server.url, "--fresh", "--models", "demo:a0", "demo:a1")


def test_metrics_are_added_over_processes_and_only_what_grew_is_kept(monkeypatch, tmp_path: Path, server: Server):
    server.asked["before"] = 100
    summary = run(monkeypatch, tmp_path, "--url", server.url, "--gateway-metrics")
    assert summary["metrics"] == {"loramux_requests_total{name=all}": server.asked.total() - 100}


def test_aims_stand_beside_the_figures_only_where_they_are_asked_for(monkeypatch, tmp_path: Path, server: Server):
    assert all(row["aim"] is None for row in run(monkeypatch, tmp_path, "--url", server.url)["figures"])
    aimed = run(monkeypatch, tmp_path, "--url", server.url, "--aims")["figures"]
    assert {row["name"]: row["aim"] for row in aimed}["from the store: TTFT p50"] == 800
