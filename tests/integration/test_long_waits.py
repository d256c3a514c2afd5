"""Answers that are long in coming, through the whole product: limits that are kept, connections that stay alive."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from tests.integration.stack import Stack

HELLO = [{"role": "user", "content": "Hello"}]
STORE_LATENCY_S = 4.0
KEEPALIVE_AFTER_S = 2.0  # as the stack is configured


@pytest.fixture
def slow_cold(stack: Stack, cold) -> Iterator[str]:
    """A cold adapter in a store that takes long for everything."""
    ((name, _),) = cold(1).items()
    stack.seaweed.proxy.latency_s = STORE_LATENCY_S
    yield f"demo:{name}"
    stack.seaweed.proxy.latency_s = 0.0
    stack.wait_until(lambda: f"demo:{name}@1" in stack.residency()["resident"])


def body(model: str, *, stream: bool = False) -> dict:
    return {"model": model, "messages": HELLO, "max_tokens": 4, "temperature": 0, "stream": stream}


def ask(stack: Stack, model: str, *, stream: bool = False, **headers: str) -> tuple[httpx.Response, float]:
    """The whole answer, and how many seconds it took; on a connection that is there, or the client's own start would count."""
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        client.get("/healthz").raise_for_status()
        began = time.monotonic()
        answer = client.post("/v1/chat/completions", json=body(model, stream=stream), headers=headers)
        return answer, time.monotonic() - began


def test_the_limit_on_time_is_kept_within_100_ms_before_an_answer_and_in_a_stream_that_began(stack: Stack, slow_cold: str):
    answer, took_s = ask(stack, slow_cold, **{"x-loramux-timeout-ms": "600"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"
    assert 0.6 <= took_s <= 0.7
    answer, took_s = ask(stack, slow_cold, stream=True, **{"x-loramux-timeout-ms": "2300"})
    assert answer.status_code == 200
    assert answer.text.startswith(": waiting\n\n")
    assert "no whole answer within 2300 ms" in answer.text
    assert "[DONE]" not in answer.text
    assert 2.3 <= took_s <= 2.4


def test_a_stream_that_waits_begins_with_comments_and_brings_tier_and_times_as_comments_too(stack: Stack, slow_cold: str):
    began, first_s = time.monotonic(), None
    with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=body(slow_cold, stream=True), timeout=60) as answer:
        chunks = []
        for chunk in answer.iter_text():
            first_s = first_s or time.monotonic() - began
            chunks.append(chunk)
    text = "".join(chunks)
    assert KEEPALIVE_AFTER_S <= first_s <= KEEPALIVE_AFTER_S + 0.5
    assert (answer.status_code, answer.headers["x-loramux-adapter"]) == (200, f"{slow_cold}@1")
    assert "x-loramux-tier" not in answer.headers
    assert ": x-loramux-tier: remote\n" in text
    assert ": x-loramux-load: leader\n" in text
    assert text.endswith("data: [DONE]\n\n")


def test_who_does_not_wait_gets_the_estimate_at_once_and_the_load_goes_on(stack: Stack, slow_cold: str):
    answer, took_s = ask(stack, slow_cold, **{"x-loramux-cold": "fail"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "adapter_loading")
    assert took_s < 1
    assert answer.headers["x-should-retry"] == "false"
    assert int(answer.headers["retry-after"]) >= 1
    assert 0 < int(answer.headers["retry-after-ms"]) <= 1000 * int(answer.headers["retry-after"])
