"""Adapters on request: bursts, slots, the node cache and versions, on the running product."""

from __future__ import annotations

import asyncio
import random
import time

from tests.integration.stack import SLOTS


def fetches_of(stack, name: str) -> int:
    """How many GETs the store saw for the weights of version 1 of an adapter."""
    return stack.seaweed.proxy.count("GET", f"blobs/{stack.digest(name)}/adapter_model.safetensors")


async def test_a_burst_of_32_on_one_cold_adapter_is_one_fetch_and_32_answers(stack, ask, cold):
    ((name, sentence),) = cold(1).items()
    stack.seaweed.proxy.seen.clear()
    answers = await asyncio.gather(*(ask(f"demo:{name}", f"Hello {number}") for number in range(32)))
    assert answers == [(f"demo:{name}@1", sentence)] * 32
    assert fetches_of(stack, name) == 1


async def test_8_different_cold_adapters_at_once_all_answer(stack, ask, cold):
    names = cold(8)
    stack.seaweed.proxy.seen.clear()
    answers = await asyncio.gather(*(ask(f"demo:{name}") for name in names))
    assert answers == [(f"demo:{name}@1", sentence) for name, sentence in names.items()]
    assert [fetches_of(stack, name) for name in names] == [1] * 8


async def test_200_requests_over_three_times_the_slots_all_come_from_the_right_adapter(stack, ask, published):
    rng = random.Random(5)
    names = sorted(published)[: 3 * SLOTS]
    gate = asyncio.Semaphore(24)

    async def one(number: int) -> None:
        name = rng.choice(names)
        async with gate:
            assert await ask(f"demo:{name}", f"Number {number}") == (f"demo:{name}@1", published[name])

    await asyncio.gather(*(one(number) for number in range(200)))
    await asyncio.to_thread(stack.wait_until, lambda: stack.residency()["requests"] == 0)
    view = stack.residency(audit=True)
    assert view["int_ids"] == view["engine_ids"], "the table and the engine disagree"
    assert len(view["engine_ids"]) <= SLOTS
    assert set(view["resident"].values()) == {0}


async def test_base_and_adapters_mix_without_a_mix_up(ask, published):
    names = sorted(published)[:6]
    base = (await ask("demo"))[1]
    models = [f"demo:{name}" if name else "demo" for name in names + [""] * 6] * 4
    random.Random(1).shuffle(models)
    answers = await asyncio.gather(*(ask(model) for model in models))
    for model, (ref, text) in zip(models, answers, strict=True):
        expected = (f"{model}@1", published[model.partition(":")[2]]) if ":" in model else ("demo", base)
        assert (ref, text) == expected


async def test_a_second_request_is_served_from_the_engine(aclient, published):
    name = sorted(published)[0]
    tiers = []
    for _ in range(2):
        raw = await aclient.chat.completions.with_raw_response.create(
            model=f"demo:{name}", messages=[{"role": "user", "content": "Hello"}], max_tokens=2
        )
        tiers.append(raw.headers["x-loramux-tier"])
    assert tiers[1] == "engine"


async def test_an_adapter_evicted_from_the_engine_comes_back_from_disk_without_the_store(stack, aclient, ask, published):
    names = sorted(published)[: SLOTS + 1]
    for name in names:
        await ask(f"demo:{name}")
    evicted = next(name for name in names if f"demo:{name}@1" not in stack.residency()["resident"])
    stack.seaweed.proxy.seen.clear()
    raw = await aclient.chat.completions.with_raw_response.create(
        model=f"demo:{evicted}", messages=[{"role": "user", "content": "Hello"}], max_tokens=2
    )
    assert raw.headers["x-loramux-tier"] == "disk"
    assert raw.headers["x-loramux-load"] == "leader"
    assert fetches_of(stack, evicted) == 0


async def test_cold_fail_answers_at_once_and_the_adapter_warms_up(stack, ask, aclient, cold):
    import openai

    ((name, sentence),) = cold(1).items()
    try:
        await ask(f"demo:{name}", extra_headers={"x-loramux-cold": "fail"})
        raise AssertionError("a cold adapter answered")
    except openai.APIStatusError as error:
        assert error.code == "adapter_loading"
        assert "retry-after-ms" in error.response.headers
    await asyncio.to_thread(stack.wait_until, lambda: f"demo:{name}@1" in stack.residency()["resident"])
    assert await ask(f"demo:{name}", extra_headers={"x-loramux-cold": "fail"}) == (f"demo:{name}@1", sentence)


async def test_a_promotion_reaches_new_requests_while_running_streams_end_on_their_version(
    stack, ask, aclient, publish, published, artifacts
):
    first, second = sorted(published)[:2]
    await asyncio.to_thread(publish, "moving", artifacts / "adapters" / first)
    await asyncio.to_thread(
        stack.wait_until, lambda: any(model["id"] == "demo:moving" for model in stack.get("/v1/models")["data"])
    )
    stream = await aclient.chat.completions.create(
        model="demo:moving",
        messages=[{"role": "user", "content": "Hello"}],
        temperature=0,
        max_tokens=1200,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = [await anext(stream)]
    await asyncio.to_thread(publish, "moving", artifacts / "adapters" / second)
    moved_at = sent_at = time.monotonic()
    while (answer := await ask("demo:moving"))[0] != "demo:moving@2":
        assert answer == ("demo:moving@1", published[first])
        # A name is resolved when its request arrives, however long the answer then takes.
        assert sent_at - moved_at < 1.5, "a request sent 1.5 s after the move got version 1"
        sent_at = time.monotonic()
    assert answer == ("demo:moving@2", published[second])
    chunks += [chunk async for chunk in stream]
    assert {chunk.model for chunk in chunks} == {"demo:moving@1"}
    assert await ask("demo:moving@1") == ("demo:moving@1", published[first])


async def test_republishing_under_load_never_mixes_versions(stack, ask, publish, published, artifacts):
    folders = sorted(published)[:3]
    await asyncio.to_thread(publish, "soak", artifacts / "adapters" / folders[0])
    await asyncio.to_thread(
        stack.wait_until, lambda: any(model["id"] == "demo:soak" for model in stack.get("/v1/models")["data"])
    )
    done = asyncio.Event()
    seen: set[str] = set()

    async def client() -> None:
        while not done.is_set():
            ref, text = await ask("demo:soak")
            version = int(ref.rpartition("@")[2])
            assert text == published[folders[version - 1]], f"{ref} answered with another version's sentence"
            seen.add(ref)

    clients = [asyncio.create_task(client()) for _ in range(6)]
    for folder in folders[1:]:
        await asyncio.sleep(1.5)
        await asyncio.to_thread(publish, "soak", artifacts / "adapters" / folder)
    await asyncio.sleep(2.5)
    done.set()
    await asyncio.gather(*clients)
    assert seen == {"demo:soak@1", "demo:soak@2", "demo:soak@3"}
