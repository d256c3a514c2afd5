"""Three replicas of the demo base on the running product: who loads, who answers, and what a death costs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest

from adapters.publishing import Publication, publish_folder
from adapters.registry import Registry
from adapters.store import open_store
from adapters.types import By, Directive
from tests.integration.stack import Stack
from tests.seaweed import Seaweed

REPLICAS = 3
ROOM = 8
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def three(tmp_path_factory, seaweed: Seaweed, demo_base: Path, sentences) -> Iterator[Stack]:
    more = {"replicas": REPLICAS, "room": ROOM}
    stack = Stack(tmp_path_factory.mktemp("three"), seaweed, {"demo": demo_base}, prefix="three", more=more)
    try:
        stack.start()
        stack.wait_until(lambda: len(rows(stack)) == REPLICAS, 120)
        yield stack
    finally:
        stack.stop()


@pytest.fixture
async def client(three: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{three.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def unused(sentences: dict[str, str]) -> Iterator[str]:
    return iter(sorted(sentences))


@pytest.fixture
async def names(three: Stack, unused: Iterator[str], artifacts: Path) -> list[str]:
    """Three adapters that nobody has asked for, just published."""
    chosen = list(itertools.islice(unused, 3))
    registry = Registry(open_store(three.registry))
    for name in chosen:
        await publish_folder(registry, Publication("demo", name, artifacts / "adapters" / name, promote="production"))
    await asyncio.to_thread(three.wait_until, lambda: {f"demo:{name}" for name in chosen} <= models(three))
    return chosen


def models(stack: Stack) -> set[str]:
    return {row["id"] for row in stack.get("/v1/models")["data"]}


def rows(stack: Stack) -> list[dict]:
    """The rows of replicas that answer and know their rank."""
    return [row for row in stack.residency()["replicas"] if row["rank"] is not None]


def holders(stack: Stack, name: str) -> set[int]:
    ref = f"demo:{name}@1"
    return {row["rank"] for row in rows(stack) if row["adapters"].get(ref, {}).get("tier") == "engine"}


async def ask(client: openai.AsyncOpenAI, model: str) -> tuple[str, str, str]:
    """Where the adapter was, the ref that answered, and the text."""
    raw = await client.chat.completions.with_raw_response.create(model=model, messages=HELLO, temperature=0, max_tokens=48)
    answer = raw.parse()
    return raw.headers["x-loramux-tier"], answer.model, answer.choices[0].message.content.strip()


async def ask_long(client: openai.AsyncOpenAI) -> int:
    """The number of tokens of a base's answer of a second or more."""
    answer = await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=300, extra_body={"ignore_eos": True})
    return answer.usage.completion_tokens


async def keep_asking(client: openai.AsyncOpenAI, model: str, at_once: int, for_s: float) -> list[tuple[str, str, str]]:
    end_s = asyncio.get_running_loop().time() + for_s

    async def one() -> list[tuple[str, str, str]]:
        answers = []
        while asyncio.get_running_loop().time() < end_s:
            answers.append(await ask(client, model))
        return answers

    return [answer for answers in await asyncio.gather(*(one() for _ in range(at_once))) for answer in answers]


async def test_64_requests_for_a_cold_adapter_are_one_fetch_one_load_and_64_answers(three, client, names, sentences):
    name = names[0]
    three.seaweed.proxy.seen.clear()
    answers = await asyncio.gather(*(ask(client, f"demo:{name}") for _ in range(64)))
    assert {answer[1:] for answer in answers} == {(f"demo:{name}@1", sentences[name])}
    assert three.seaweed.proxy.count("GET", "adapter_model.safetensors") == 1
    assert len(holders(three, name)) == 1


async def test_requests_to_the_base_are_balanced(three, client):
    asking = asyncio.gather(*(ask_long(client) for _ in range(18)))
    await asyncio.to_thread(three.wait_until, lambda: three.residency()["requests"] == 18)
    assert [row["requests"] for row in rows(three)] == [6, 6, 6]
    assert await asking == [300] * 18


async def test_a_hot_adapter_comes_to_more_replicas_and_no_request_waits_for_that(three, client, names, sentences):
    name = names[0]
    await ask(client, f"demo:{name}")
    await asyncio.sleep(1.5)
    answers = await keep_asking(client, f"demo:{name}", 2 * ROOM, 8)
    assert set(answers) == {("engine", f"demo:{name}@1", sentences[name])}
    assert len(holders(three, name)) >= 2


async def test_a_pin_on_one_replica_warms_the_one_that_the_request_goes_to(three, client, names, sentences):
    name = names[0]
    directive = Directive("production", "engine", pin=True, replicas=1)
    await Registry(open_store(three.registry)).direct("demo", name, directive, By("tests"))
    await asyncio.to_thread(three.wait_until, lambda: len(holders(three, name)) == 1)
    await asyncio.sleep(1.5)
    assert await ask(client, f"demo:{name}") == ("engine", f"demo:{name}@1", sentences[name])
    assert len(holders(three, name)) == 1


async def test_a_replica_that_dies_loses_no_answer_and_another_takes_its_rank(three, client, names, sentences):
    for name in names:
        await ask(client, f"demo:{name}")
    asking = asyncio.gather(*(ask(client, f"demo:{name}") for name in names for _ in range(4)))
    long = asyncio.gather(*(ask_long(client) for _ in range(6)))
    await asyncio.sleep(0.3)
    (*_, victim) = [process for process in three.family() if "Replica:demo" in " ".join(process.cmdline())]
    victim.kill()
    assert {answer[1:] for answer in await asking} == {(f"demo:{name}@1", sentences[name]) for name in names}
    assert await long == [300] * 6
    await asyncio.to_thread(three.wait_until, lambda: len(rows(three)) < REPLICAS)
    await asyncio.to_thread(three.wait_until, lambda: [row["rank"] for row in rows(three)] == [0, 1, 2], 90)
