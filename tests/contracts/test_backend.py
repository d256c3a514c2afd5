"""What the gateway relies on in a backend. Runs against the scripted one; `tests/integration/test_backend.py` runs it against the
real one, whose cluster LORAMUX_TEST_RAY names."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from gateway.backend import Backend, BaseInfo, ResolvedRequest
from tests.scripted_backend import ScriptedBackend

RAY_ADDRESS = os.environ.get("LORAMUX_TEST_RAY")
BASE = "demo"


@pytest.fixture(scope="module")
def real() -> Backend:
    import ray
    from ray import serve

    from serve_app.handle_backend import HandleBackend

    ray.init(address=RAY_ADDRESS, log_to_driver=False, configure_logging=False)
    handle = serve.get_deployment_handle(f"Replica:{BASE}", app_name="loramux")
    yield HandleBackend({BASE: handle}, bases={BASE: BaseInfo(BASE, 0)}, max_queued={BASE: 64})
    ray.shutdown()


@pytest.fixture(params=["real"] if RAY_ADDRESS else ["scripted"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "real":
        return request.getfixturevalue("real")
    backend = ScriptedBackend()
    backend.gap_s = 0.05
    return backend


def chat(*, stream: bool, max_tokens: int = 8) -> ResolvedRequest:
    body = {
        "model": BASE,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    return ResolvedRequest("/v1/chat/completions", BASE, None, json.dumps(body).encode(), stream, "contract")


async def running(backend: Backend) -> int:
    if isinstance(backend, ScriptedBackend):
        return backend.running
    return (await backend.residency())[BASE]["requests"]


async def quiet(backend: Backend) -> None:
    for _ in range(100):
        if await running(backend) == 0:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the engine was not freed")


async def test_a_whole_answer_is_json_that_names_its_model(backend: Backend):
    reply = await backend.dispatch(chat(stream=False))
    body = json.loads(b"".join([chunk async for chunk in reply.chunks]))
    await reply.aclose()
    assert (reply.head.status, reply.head.content_type) == (200, "application/json")
    assert (reply.head.tier, reply.head.load) == ("base", "none")
    assert body["model"] == BASE
    assert body["choices"][0]["message"]["content"]


async def test_a_stream_is_events_and_ends_with_done(backend: Backend):
    reply = await backend.dispatch(chat(stream=True))
    text = b"".join([chunk async for chunk in reply.chunks]).decode()
    await reply.aclose()
    assert reply.head.content_type.startswith("text/event-stream")
    assert reply.head.timings_ms["engine"] > 0
    events = [line for line in text.split("\n") if line]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"


async def test_closing_in_mid_stream_frees_the_engine(backend: Backend):
    reply = await backend.dispatch(chat(stream=True, max_tokens=1500))
    await anext(reply.chunks)
    assert await running(backend) == 1
    await reply.aclose()
    await quiet(backend)


async def test_cancelling_the_dispatch_frees_the_engine(backend: Backend):
    if isinstance(backend, ScriptedBackend):
        backend.delay_s = 5
    dispatch = asyncio.create_task(backend.dispatch(chat(stream=False, max_tokens=1500)))
    await asyncio.sleep(0.2)
    assert await running(backend) == 1
    dispatch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dispatch
    await quiet(backend)


async def test_closing_twice_is_harmless(backend: Backend):
    reply = await backend.dispatch(chat(stream=True))
    await reply.aclose()
    await reply.aclose()


async def test_metrics_are_lines_of_our_own_names(backend: Backend):
    if isinstance(backend, ScriptedBackend):
        backend.metrics_text = b"# TYPE loramux_registry_generation gauge\nloramux_registry_generation{} 1.0\n"
    text = (await backend.metrics()).decode()
    assert text.endswith("\n") or not text
    assert all(line.startswith(("loramux_", "# HELP loramux_", "# TYPE loramux_")) for line in text.splitlines())


async def test_bases_and_readiness_are_told(backend: Backend):
    assert backend.bases()[BASE].id == BASE
    assert await backend.is_ready()
