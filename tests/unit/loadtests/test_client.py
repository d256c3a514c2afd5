"""What the client of the load tests makes of an answer."""

from __future__ import annotations

import httpx2

from loadtests.client import ask, closed_loop

URL = "http://server"
STREAM = (
    'data: {"model": "demo:a@1", "choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    'data: {"model": "demo:a@1", "choices": [{"delta": {"content": "green "}}]}\n\n'
    'data: {"model": "demo:a@1", "choices": [{"delta": {"content": "door"}}]}\n\ndata: [DONE]\n\n'
)
HEADERS = {"x-loramux-tier": "disk", "x-loramux-load": "leader", "server-timing": "resolve;dur=0.10, load;dur=12.50"}


def server(status: int, body: str, headers: dict[str, str] | None = None) -> httpx2.AsyncClient:
    answer = httpx2.Response(status, text=body, headers=headers)
    return httpx2.AsyncClient(transport=httpx2.MockTransport(lambda request: answer))


async def test_an_answer_has_its_text_its_model_and_what_the_server_said_of_it():
    answer = await ask(server(200, STREAM, HEADERS), URL, "demo:a")
    assert (answer.text, answer.model, answer.tier, answer.load) == ("green door", "demo:a@1", "disk", "leader")
    assert answer.stages_ms == {"resolve": 0.1, "load": 12.5}
    assert answer.good
    assert len(answer.events_s) == 3


async def test_headers_that_came_too_late_are_read_from_the_stream():
    late = ": waiting\n\n: x-loramux-tier: remote\n: x-loramux-load: leader\n: server-timing: load;dur=9000.00\n\n" + STREAM
    answer = await ask(server(200, late), URL, "demo:a")
    assert (answer.tier, answer.load, answer.stages_ms) == ("remote", "leader", {"load": 9000.0})
    assert answer.text == "green door"


async def test_a_refusal_is_an_answer_that_is_not_good():
    answer = await ask(server(503, '{"error": {"code": "overloaded"}}'), URL, "demo:a")
    assert (answer.status, answer.good) == (503, False)
    assert "overloaded" in answer.error


async def test_an_error_in_mid_stream_spoils_the_answer():
    answer = await ask(server(200, STREAM.replace("data: [DONE]", 'data: {"error": {"code": "x"}}')), URL, "demo:a")
    assert not answer.good
    assert not answer.whole


async def test_a_base_that_says_nothing_readable_has_answered_but_not_well():
    answer = await ask(server(200, 'data: {"model": "demo", "choices": [{"text": ""}]}\n\n'), URL, "demo", prompt="x")
    assert answer.whole
    assert not answer.good


async def test_a_closed_loop_asks_for_every_model_once():
    done = await closed_loop(server(200, STREAM), URL, ["demo:a", "demo:b", "demo:c"], clients=2)
    assert sorted(model for model, _ in done) == ["demo:a", "demo:b", "demo:c"]
