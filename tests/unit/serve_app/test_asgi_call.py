"""Calling an ASGI app in process."""

from __future__ import annotations

import asyncio

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from serve_app.engine import asgi_call


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    app.state.ended = asyncio.Event()
    app.state.gate = asyncio.Event()

    @app.post("/echo")
    async def echo(request: Request) -> JSONResponse:
        return JSONResponse({"body": (await request.body()).decode(), "id": request.headers["x-request-id"]}, 202)

    @app.post("/stream")
    async def stream() -> StreamingResponse:
        async def parts():
            try:
                yield "first"
                await app.state.gate.wait()
                for word in ("second", "third", "fourth"):
                    yield word
            finally:
                app.state.ended.set()

        return StreamingResponse(parts(), media_type="text/event-stream")

    @app.post("/broken")
    async def broken() -> None:
        raise RuntimeError("bug")

    return app


async def read(answer: asgi_call.Answer) -> list[bytes]:
    return [chunk async for chunk in answer.chunks()]


async def test_status_type_and_body_come_back(app):
    answer = await asgi_call.call(app, "/echo", b"hello", {"x-request-id": "r1"})
    assert (answer.status, answer.content_type) == (202, "application/json")
    assert b"".join(await read(answer)) == b'{"body":"hello","id":"r1"}'


async def test_the_first_chunk_does_not_wait_for_the_second(app):
    answer = await asgi_call.call(app, "/stream", b"{}", {})
    chunks = answer.chunks()
    assert await asyncio.wait_for(anext(chunks), 1) == b"first"
    app.state.gate.set()
    assert b"".join([chunk async for chunk in chunks]) == b"secondthirdfourth"


async def test_chunks_that_piled_up_are_joined(app):
    app.state.gate.set()
    answer = await asgi_call.call(app, "/stream", b"{}", {})
    await asyncio.sleep(0.05)
    assert await read(answer) == [b"firstsecondthirdfourth"]


async def test_closing_ends_the_apps_generator(app):
    answer = await asgi_call.call(app, "/stream", b"{}", {})
    await answer.aclose()
    await asyncio.wait_for(app.state.ended.wait(), 1)


async def test_cancelling_the_call_ends_the_app(app):
    async def slow(scope, receive, send):
        try:
            await asyncio.Event().wait()
        finally:
            app.state.ended.set()

    task = asyncio.create_task(asgi_call.call(slow, "/", b"", {}))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait_for(app.state.ended.wait(), 3)


async def test_work_that_is_shielded_from_cancellation_ends_as_when_a_client_goes():
    ended = asyncio.Event()

    async def shielded(scope, receive, send):
        async def work():
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        working = asyncio.create_task(work())
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        working.cancel()

    task = asyncio.create_task(asgi_call.call(shielded, "/", b"{}", {}))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait_for(ended.wait(), 1)


async def test_a_reader_that_stops_in_mid_stream_does_not_block_the_close(app):
    app.state.gate.set()

    async def flood(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(10_000):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})

    answer = await asgi_call.call(flood, "/", b"{}", {})
    await asyncio.wait_for(answer.aclose(), 3)


async def test_a_bug_that_the_app_answered_is_its_answer(app):
    answer = await asgi_call.call(app, "/broken", b"{}", {})
    assert answer.status == 500
    await read(answer)


async def test_a_bug_before_any_answer_reaches_the_caller():
    async def broken(scope, receive, send):
        raise RuntimeError("bug")

    with pytest.raises(RuntimeError, match="bug"):
        await asgi_call.call(broken, "/", b"", {})
