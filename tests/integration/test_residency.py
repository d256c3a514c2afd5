"""What the registry wants is where it should be, on the running product: pins, promotions, restarts, damaged files."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import openai
import psutil
import pytest

from adapters.names import AdapterRef
from adapters.registry import Registry
from adapters.store import open_store
from adapters.types import By, Directive
from serve_app.residency.resident import SAVE_EVERY_S

BY = By("tests")
RESTART_S = 120


@pytest.fixture
def registry(stack) -> Registry:
    return Registry(open_store(stack.registry))


@pytest.fixture
async def pinned(stack, registry: Registry, cold) -> Any:
    """A cold adapter that is pinned from now on: its name and its sentence."""
    ((name, sentence),) = cold(1).items()
    await registry.direct("demo", name, Directive("production", "engine", True), BY)
    await asyncio.to_thread(stack.wait_until, lambda: state(stack, name) == ("engine", "ready"))
    yield name, sentence
    await registry.undirect("demo", name, "production", BY)


def row(stack, name: str, version: int = 1) -> dict[str, Any]:
    return stack.residency()["replicas"][0]["adapters"].get(f"demo:{name}@{version}", {})


def state(stack, name: str, version: int = 1) -> tuple[str | None, str | None]:
    found = row(stack, name, version)
    return found.get("tier"), found.get("state")


def production(stack, name: str) -> int:
    rows = stack.get("/registry/v1/adapters?base=demo")["adapters"]
    return next(row for row in rows if row["name"] == name)["aliases"]["production"]


def fetches(stack) -> int:
    return stack.seaweed.proxy.count("GET", "/adapter_model.safetensors")


async def restarted(stack, ask: Callable[..., Awaitable[Any]], process: psutil.Process) -> None:
    """Waits until another process answers."""
    deadline = time.monotonic() + RESTART_S
    while True:
        with contextlib.suppress(openai.APIStatusError, psutil.Error, StopIteration):
            if stack.replica("demo").pid != process.pid:
                await ask("demo")
                return
        assert time.monotonic() < deadline, "no replica came back"
        await asyncio.sleep(0.5)


async def tier_of(aclient, model: str) -> str:
    answer = await aclient.chat.completions.with_raw_response.create(
        model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=4
    )
    return answer.headers["x-loramux-tier"]


async def test_a_pinned_adapter_answers_its_first_request_from_the_engine(aclient, pinned):
    name, _ = pinned
    assert await tier_of(aclient, f"demo:{name}") == "engine"


async def test_a_killed_replica_brings_back_what_was_pinned_and_what_was_busy_without_a_fetch(
    stack, ask, aclient, published, pinned
):
    name, _ = pinned
    busy = next(other for other in sorted(published) if other != name)
    for _ in range(5):
        assert await ask(f"demo:{busy}") == (f"demo:{busy}@1", published[busy])
    await asyncio.sleep(SAVE_EVERY_S + 6)  # killed as it is, it keeps what it saved last
    process = stack.replica("demo")
    stack.seaweed.proxy.seen.clear()
    process.kill()
    await restarted(stack, ask, process)
    assert await tier_of(aclient, f"demo:{name}") == "engine"
    assert await tier_of(aclient, f"demo:{busy}") == "engine"
    assert fetches(stack) == 0


async def test_a_replica_that_is_killed_while_it_fetches_leaves_nothing_half_done(stack, ask, cold):
    ((name, sentence),) = cold(1).items()
    process = stack.replica("demo")
    stack.seaweed.proxy.latency_s = 1.0
    try:
        asking = asyncio.create_task(ask(f"demo:{name}", timeout=RESTART_S))
        await asyncio.sleep(0.7)
        process.kill()
        with contextlib.suppress(openai.APIStatusError):
            await asking
    finally:
        stack.seaweed.proxy.latency_s = 0.0
    await restarted(stack, ask, process)
    assert await ask(f"demo:{name}") == (f"demo:{name}@1", sentence)
    assert not list((stack.folder / "cache" / ".tmp").iterdir())


async def test_an_engine_that_dies_takes_its_replica_along_and_loses_no_request(stack, ask, published):
    name = sorted(published)[0]
    await ask(f"demo:{name}")
    process = stack.replica("demo")
    engine = next(child for child in process.children(recursive=True) if "EngineCore" in child.name())
    asking = [asyncio.create_task(ask(f"demo:{name}", f"Hello {number}", timeout=RESTART_S)) for number in range(4)]
    engine.kill()
    answers = await asyncio.gather(*asking, return_exceptions=True)
    for answer in answers:
        assert answer == (f"demo:{name}@1", published[name]) or isinstance(answer, openai.APIStatusError)
    await restarted(stack, ask, process)
    assert await ask(f"demo:{name}") == (f"demo:{name}@1", published[name])


async def test_a_file_that_was_damaged_on_the_disk_is_fetched_again_and_answers(stack, ask, cold):
    ((name, sentence),) = cold(1).items()
    await ask(f"demo:{name}")
    await asyncio.to_thread(stack.evict, name, "disk")
    weights = stack.on_disk(name) / "adapter_model.safetensors"
    weights.chmod(0o644)
    with weights.open("r+b") as file:
        file.write(b"\xff" * 64)  # the header: the engine can't read it
    stack.seaweed.proxy.seen.clear()
    assert await ask(f"demo:{name}") == (f"demo:{name}@1", sentence)
    assert fetches(stack) == 1


def post(stack, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(stack.url + path, json={"base": "demo", **fields}, timeout=60)


@pytest.fixture
async def second(stack, registry: Registry, cold, publish, artifacts) -> AsyncIterator[tuple[str, str, str]]:
    """An adapter with two versions, the first of them in production, also afterwards: its name and the sentences of both."""
    (one, sentence), (other, second_sentence) = cold(2).items()
    await asyncio.to_thread(publish, one, artifacts / "adapters" / other, promote=False)
    yield one, sentence, second_sentence
    await registry.promote("demo", one, "production", 1)
    await asyncio.to_thread(stack.wait_until, lambda: production(stack, one) == 1)


async def test_all_that_is_asked_after_a_promotion_is_answered_from_the_engine(stack, ask, aclient, second):
    name, old, new = second
    assert await ask(f"demo:{name}") == (f"demo:{name}@1", old)
    stop, answers = asyncio.Event(), []

    async def steady() -> None:
        while not stop.is_set():
            answers.append(await ask(f"demo:{name}"))

    asking = [asyncio.create_task(steady()) for _ in range(3)]
    moved = await asyncio.to_thread(post, stack, "/registry/v1/promote", name=name, version=2)
    assert moved.status_code == 200, moved.text
    tiers = [await tier_of(aclient, f"demo:{name}") for _ in range(20)]
    stop.set()
    await asyncio.gather(*asking)
    assert tiers == ["engine"] * 20
    assert set(answers) <= {(f"demo:{name}@1", old), (f"demo:{name}@2", new)}
    assert answers[-1] == (f"demo:{name}@2", new)


async def test_a_promotion_to_what_cannot_be_loaded_leaves_the_alias_and_says_why(stack, registry: Registry, ask, second):
    name, old, _ = second
    digest = (await registry.manifest(AdapterRef("demo", name, 2))).digest
    key = f"blobs/{digest}/adapter_model.safetensors"
    good = (await registry.store.get(key)).data
    await registry.store.delete(key)
    try:
        failed = await asyncio.to_thread(post, stack, "/registry/v1/promote", name=name, version=2)
        assert failed.status_code == 409, failed.text
        assert "blob_missing" in failed.text
        assert await ask(f"demo:{name}") == (f"demo:{name}@1", old)
    finally:
        await registry.store.put(key, good)


async def test_a_version_that_cannot_be_loaded_is_reported_with_the_reason(stack, registry: Registry, ask, publish, cold):
    ((name, sentence),) = cold(1).items()
    store = open_store(stack.registry)
    key = f"blobs/{stack.digest(name)}/adapter_model.safetensors"
    good = (await store.get(key)).data
    await store.put(key, good[:-8] + b"\x00" * 8)
    try:
        await registry.direct("demo", name, Directive("production", "engine", True), BY)
        await asyncio.to_thread(stack.wait_until, lambda: row(stack, name).get("state") == "failed")
        assert row(stack, name)["reason"] == "digest_mismatch"
        assert (await ask("demo"))[0] == "demo"
    finally:
        await store.put(key, good)
        await registry.undirect("demo", name, "production", BY)
    assert await ask(f"demo:{name}") == (f"demo:{name}@1", sentence)
