"""What a request says about cold adapters and about time, and what the official client makes of the answers.

Each attempt of the client is counted at a door in front of the gateway.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import openai
import pytest

from tests.counting_proxy import CountingProxy
from tests.integration.stack import KEEPALIVE_AFTER_S, Stack

HELLO = [{"role": "user", "content": "Hello"}]
SLOW_S = 2 * KEEPALIVE_AFTER_S + 0.5
LIMITS_MS = (150, 700)
TRIES = 3  # whatever else the machine does may hold up one of them
KEPT_WITHIN_S = 0.1
LONG = {"max_tokens": 1_900, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def door(stack: Stack) -> Iterator[CountingProxy]:
    proxy = CountingProxy(stack.port)
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.fixture
async def eager(door: CountingProxy) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client, which tries again as often as it is let."""
    door.reset()
    async with openai.AsyncOpenAI(base_url=f"{door.endpoint}/v1", api_key="none", max_retries=5, timeout=60) as client:
        yield client


@pytest.fixture
def attempts(door: CountingProxy) -> Callable[[], int]:
    return lambda: door.count("POST", "/v1/chat/completions")


@pytest.fixture
def one_cold(stack: Stack, published: dict[str, str]) -> tuple[str, str]:
    """An adapter that is in the store alone: its name and its sentence."""
    name = stack.alone(published)[0]
    stack.evict(name, "remote")
    return name, published[name]


@pytest.fixture
def slow_store(stack: Stack) -> Iterator[None]:
    stack.seaweed.proxy.latency_s = SLOW_S
    yield
    stack.seaweed.proxy.reset()


async def create(client: openai.AsyncOpenAI, model: str, **options: Any) -> Any:
    """The raw answer to a request: headers, and by `parse` what the client makes of it."""
    wanted = {"model": model, "messages": HELLO, "temperature": 0, "max_tokens": 48} | options
    return await client.chat.completions.with_raw_response.create(**wanted)


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices).strip()


@pytest.mark.parametrize("stream", [False, True])
async def test_who_does_not_wait_is_told_when_to_come_back_and_asks_once(stack: Stack, eager, attempts, one_cold, stream):
    name, sentence = one_cold
    with pytest.raises(openai.InternalServerError) as caught:
        await create(eager, f"demo:{name}", stream=stream, extra_headers={"x-loramux-cold": "fail"})
    assert (caught.value.status_code, caught.value.code) == (503, "adapter_loading")
    assert attempts() == 1
    await asyncio.sleep(int(caught.value.response.headers["retry-after"]))
    answer = await create(eager, f"demo:{name}", extra_headers={"x-loramux-cold": "fail"})
    assert answer.headers["x-loramux-tier"] == "engine", "the load had begun, and the estimate was long enough"
    assert answer.parse().choices[0].message.content.strip() == sentence


async def test_a_limit_that_passed_is_no_reason_to_try_again(eager, attempts, one_cold, slow_store):
    name, _ = one_cold
    with pytest.raises(openai.InternalServerError) as caught:
        await create(eager, f"demo:{name}", extra_headers={"x-loramux-timeout-ms": "300"})
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    assert attempts() == 1


async def test_trouble_of_the_store_is_one_and_the_client_gets_its_answer_when_it_is_over(
    stack: Stack, eager, attempts, one_cold
):
    name, sentence = one_cold
    stack.seaweed.proxy.refuse = True
    asking = asyncio.create_task(create(eager, f"demo:{name}"))
    try:
        async with asyncio.timeout(20):
            while attempts() < 2:  # noqa: ASYNC110 - what is waited for happens in other processes
                await asyncio.sleep(0.05)
    finally:
        stack.seaweed.proxy.refuse = False
    answer = await asking
    assert answer.headers["x-loramux-adapter"] == f"demo:{name}@1"
    assert answer.parse().choices[0].message.content.strip() == sentence


async def test_a_stream_that_waits_long_is_a_stream_like_any_other_to_the_client(eager, attempts, one_cold, slow_store):
    name, sentence = one_cold
    began = time.monotonic()
    answer = await create(eager, f"demo:{name}", stream=True)
    assert time.monotonic() - began < SLOW_S, "the headers come with the first comment"
    assert answer.headers["x-loramux-adapter"] == f"demo:{name}@1"
    assert answer.headers["x-request-id"]
    assert "x-loramux-tier" not in answer.headers
    chunks = [chunk async for chunk in answer.parse()]
    assert (text_of(chunks), {chunk.model for chunk in chunks}) == (sentence, {f"demo:{name}@1"})
    assert attempts() == 1


async def test_an_answer_that_is_no_stream_waits_silently_and_comes_whole_with_its_tier(eager, attempts, one_cold, slow_store):
    name, sentence = one_cold
    answer = await create(eager, f"demo:{name}")
    assert (answer.headers["x-loramux-tier"], answer.headers["x-loramux-load"]) == ("remote", "leader")
    assert answer.parse().choices[0].message.content.strip() == sentence
    assert attempts() == 1


async def test_a_failure_after_the_first_comment_is_raised_from_the_stream_and_not_tried_again(
    stack: Stack, eager, attempts, one_cold, slow_store
):
    name, _ = one_cold
    stack.seaweed.proxy.lose_answer_next(100, method="GET", contains=f"blobs/{stack.digest(name)}")
    answer = await create(eager, f"demo:{name}", stream=True)
    assert answer.headers["x-loramux-adapter"] == f"demo:{name}@1"
    with pytest.raises(openai.APIError) as caught:
        [chunk async for chunk in answer.parse()]
    assert caught.value.code == "storage_unavailable"
    assert attempts() == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_limit_is_kept_while_a_load_is_waited_for(eager, one_cold, slow_store, stream):
    name, _ = one_cold
    await eager.models.list()  # a first request has the client load half of itself
    for limit_ms in LIMITS_MS:
        over_s = [await over_limit_s(eager, f"demo:{name}", limit_ms, stream) for _ in range(TRIES)]
        assert 0 <= min(over_s) <= KEPT_WITHIN_S


@pytest.mark.parametrize("stream", [False, True])
async def test_the_limit_is_kept_in_an_answer_that_goes_on_and_the_engine_is_free_then(stack: Stack, eager, published, stream):
    name = sorted(published)[1]
    await create(eager, f"demo:{name}", max_tokens=1)
    for limit_ms in LIMITS_MS:
        over_s = [await over_limit_s(eager, f"demo:{name}", limit_ms, stream) for _ in range(TRIES)]
        assert 0 <= min(over_s) <= KEPT_WITHIN_S
    await asyncio.to_thread(stack.wait_until, lambda: stack.residency()["requests"] == 0, timeout_s=1.5)


async def over_limit_s(client: openai.AsyncOpenAI, model: str, limit_ms: int, stream: bool) -> float:
    """How much later than its limit a request that can't be answered within it ends, as it should, with an error."""
    began = time.monotonic()
    with pytest.raises(openai.APIError) as caught:
        answer = await create(client, model, stream=stream, **LONG, extra_headers={"x-loramux-timeout-ms": str(limit_ms)})
        [chunk async for chunk in answer.parse()]
    over_s = time.monotonic() - began - limit_ms / 1e3
    assert caught.value.code == "deadline_exceeded"
    print(f"limit {limit_ms} ms: {over_s * 1e3:.0f} ms over")
    return over_s
