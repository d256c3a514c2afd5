"""The table of an engine's adapter places, driven against an engine that checks the rules the real one doesn't."""

from __future__ import annotations

import asyncio
import random

import pytest

from adapters.errors import AdapterIncompatible, AdapterLoading, Overloaded, StoreUnreachable
from tests.slots_bench import Bench, adapter


async def test_a_burst_on_one_cold_adapter_makes_one_fetch_and_one_load():
    bench = Bench()
    loads = await asyncio.gather(*(bench.request(adapter("a")) for _ in range(64)))
    assert loads.count("leader") == 1
    assert loads.count("follower") == 63
    assert len(bench.cache.fetches) == len(bench.engine.loads) == 1
    bench.check_quiet()


async def test_a_second_request_finds_the_adapter_in_the_engine():
    bench = Bench()
    await bench.request(adapter("a"))
    use = await bench.slots.use(adapter("a"))
    assert (use.tier, use.load) == ("engine", "none")
    use.release()


async def test_the_longest_idle_slot_gives_way_and_is_removed_from_the_engine():
    bench = Bench(capacity=2)
    for name in ("a", "b", "a", "c"):
        await bench.request(adapter(name))
        await asyncio.sleep(0.002)
    assert {ref.name for ref in bench.slots.resident()} == {"a", "c"}
    bench.check_quiet()


async def test_a_slot_in_use_is_never_evicted():
    bench = Bench(capacity=1, wait_s=0.05)
    held = await bench.slots.use(adapter("a"))
    with pytest.raises(Overloaded) as caught:
        await bench.slots.use(adapter("b"))
    assert caught.value.limit == 1
    assert bench.engine.loads == [adapter("a").ref]
    held.release()
    assert await bench.request(adapter("b")) == "leader"
    bench.check_quiet()


async def test_a_loader_that_waits_gets_the_place_when_it_comes_free():
    bench = Bench(capacity=1)
    held = await bench.slots.use(adapter("a"))
    waiting = asyncio.create_task(bench.request(adapter("b")))
    await bench.settle()
    assert not waiting.done()
    held.release()
    assert await waiting == "leader"


async def test_a_failed_load_fails_its_own_requests_and_the_next_one_tries_again():
    bench = Bench()
    bench.engine.failing = {adapter("bad").ref}
    results = await asyncio.gather(
        *(bench.request(adapter("bad")) for _ in range(4)), bench.request(adapter("good")), return_exceptions=True
    )
    assert [type(result) for result in results[:4]] == [AdapterIncompatible] * 4
    assert results[4] == "leader"
    bench.check_quiet()
    bench.engine.failing = set()
    assert await bench.request(adapter("bad")) == "leader"
    bench.check_quiet()


async def test_a_failed_load_leaves_no_ghost_in_the_engine():
    bench = Bench(capacity=1)
    bench.engine.failing = {adapter("bad").ref}
    for _ in range(5):
        with pytest.raises(AdapterIncompatible):
            await bench.request(adapter("bad"))
    assert bench.engine.loaded == {}
    assert await bench.request(adapter("good")) == "leader"


async def test_an_adapter_that_lands_in_part_is_refused_and_removed_and_harms_no_other():
    bench = Bench()
    good = await bench.slots.use(adapter("good"))
    results = await asyncio.gather(*(bench.request(adapter("half", num_modules=6)) for _ in range(3)), return_exceptions=True)
    assert [(error.reason, error.limit, error.value) for error in results] == [("not_all_applied", 6, 4)] * 3
    assert adapter("half").ref not in bench.engine.loaded.values(), "a ghost"
    assert bench.slots.resident() == {adapter("good").ref: 1}
    good.release()
    bench.check_quiet()


async def test_what_landed_is_compared_at_every_load():
    bench = Bench(capacity=1)
    for name in ("a", "b"):
        await bench.request(adapter(name))
    bench.engine.landing = 3
    with pytest.raises(AdapterIncompatible):
        await bench.request(adapter("a"))
    bench.check_quiet()


async def test_a_manifest_that_counts_nothing_is_not_compared():
    bench = Bench()
    assert await bench.request(adapter("old", num_modules=0)) == "leader"


async def test_a_store_error_reaches_the_waiters_and_costs_no_place():
    bench = Bench(capacity=1)
    bench.cache.failures = [StoreUnreachable("down")]
    with pytest.raises(StoreUnreachable):
        await bench.request(adapter("a"))
    assert await bench.request(adapter("a")) == "leader"


async def test_a_waiter_that_gives_up_harms_neither_the_load_nor_the_others():
    bench = Bench()
    bench.engine.gate = asyncio.Event()
    first = asyncio.create_task(bench.request(adapter("a")))
    second = asyncio.create_task(bench.request(adapter("a")))
    await bench.settle()
    first.cancel()
    await bench.settle()
    bench.engine.gate.set()
    assert await second == "follower"
    assert bench.slots.resident() == {adapter("a").ref: 0}


async def test_a_load_goes_on_when_all_who_waited_have_gone():
    bench = Bench()
    bench.engine.gate = asyncio.Event()
    waiting = asyncio.create_task(bench.request(adapter("a")))
    await bench.settle()
    waiting.cancel()
    bench.engine.gate.set()
    await bench.settle()
    use = await bench.slots.use(adapter("a"))
    assert use.load == "none"
    use.release()
    assert bench.slots.resident() == {adapter("a").ref: 0}


async def test_a_request_that_does_not_wait_starts_the_load_and_says_so():
    bench = Bench()
    with pytest.raises(AdapterLoading):
        await bench.slots.use(adapter("a"), wait=False)
    await bench.settle()
    use = await bench.slots.use(adapter("a"), wait=False)
    assert use.tier == "engine"
    use.release()


async def test_two_versions_of_a_name_are_two_slots():
    bench = Bench()
    await asyncio.gather(bench.request(adapter("a", 1)), bench.request(adapter("a", 2)))
    assert {ref.version for ref in bench.slots.resident()} == {1, 2}


async def test_a_hot_adapter_does_not_starve_a_cold_one():
    bench = Bench(capacity=1, drain_after_s=0.02, slice_s=0, wait_s=5)
    stop = asyncio.Event()

    async def steady() -> None:
        while not stop.is_set():
            await bench.request(adapter("hot"), hold_s=0.004)

    busy = [asyncio.create_task(steady()) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert await asyncio.wait_for(bench.request(adapter("cold")), 2) == "leader"
    stop.set()
    await asyncio.wait_for(asyncio.gather(*busy), 3)
    await bench.settle()
    bench.check_quiet()


@pytest.mark.parametrize("seed", range(6))
async def test_any_mix_of_requests_failures_and_cancellations_keeps_the_rules(seed: int):
    rng = random.Random(seed)
    bench = Bench(capacity=3, drain_after_s=0.005, slice_s=0, wait_s=5)
    bench.engine.failing = {adapter("n3").ref}
    tasks = []
    for _ in range(300):
        name = f"n{rng.randrange(8)}"
        tasks.append(asyncio.create_task(bench.request(adapter(name), hold_s=rng.random() * 0.003)))
        if rng.random() < 0.1:
            tasks[rng.randrange(len(tasks))].cancel()
        if rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 0.002)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    unexpected = [
        r for r in results if isinstance(r, BaseException) and not isinstance(r, (AdapterIncompatible, asyncio.CancelledError))
    ]
    assert unexpected == []
    await asyncio.sleep(0.05)
    bench.check_quiet()
    assert set(bench.slots.resident().values()) <= {0}
