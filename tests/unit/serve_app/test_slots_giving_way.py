"""Whose slot goes, who waits for whom, what is held and what is said about it; on a clock that jumps."""

from __future__ import annotations

import asyncio
import logging

import pytest

from adapters.errors import AdapterLoading, Overloaded
from adapters.metrics import LOAD_SECONDS, LOADS, RELOADS, SLOT_EVICTIONS
from adapters.names import AdapterRef
from adapters.types import LocalAdapter
from serve_app.slots.engine_slots import SlotUse
from tests.recorded_meter import RecordedMeter
from tests.slots_bench import Bench, StrictEngine, adapter, on_a_jumping_clock


def bench(capacity: int, **options) -> Bench:
    return Bench(capacity, clock_s=asyncio.get_running_loop().time, **options)


def names(bench: Bench) -> set[str]:
    return {ref.name for ref in bench.slots.resident()}


async def used(bench: Bench, name: str) -> SlotUse:
    return await bench.slots.use(adapter(name))


class SlowEngine(StrictEngine):
    async def add(self, ref: AdapterRef, int_id: int, files: LocalAdapter) -> int:
        await asyncio.sleep(2)
        return await super().add(ref, int_id, files)

    async def remove(self, ref: AdapterRef, int_id: int) -> None:
        await asyncio.sleep(2)
        await super().remove(ref, int_id)


def slow_bench(capacity: int, **options) -> Bench:
    made = bench(capacity, **options)
    made.engine = made.slots._engine = SlowEngine(capacity)
    return made


# Popularity


@on_a_jumping_clock
async def test_a_scan_of_rare_adapters_leaves_the_busy_ones_where_they_are():
    places = bench(4)
    for _ in range(5):
        for name in ("a", "b", "c"):
            await places.request(adapter(name))
    for index in range(30):
        await places.request(adapter(f"rare{index}"))
    assert {"a", "b", "c"} < names(places)
    places.check_quiet()


@on_a_jumping_clock
async def test_a_busy_adapter_that_went_comes_back_with_its_past():
    places = bench(2)
    for _ in range(5):
        await places.request(adapter("busy"))
    assert await places.slots.evict(adapter("busy").ref)
    for name in ("busy", "x", "y", "z"):
        await places.request(adapter(name))
    assert "busy" in names(places)


# Warming and holding


@on_a_jumping_clock
async def test_warming_brings_an_adapter_in_without_a_user():
    places = bench(2)
    await places.slots.warm(adapter("a"))
    assert places.slots.resident() == {adapter("a").ref: 0}
    assert (await used(places, "a")).tier == "engine"


@on_a_jumping_clock
async def test_a_request_joins_the_warming_of_its_adapter():
    places = bench(2)
    warming = asyncio.create_task(places.slots.warm(adapter("a")))
    await asyncio.sleep(0)
    assert places.slots.loading() == {adapter("a").ref}
    assert await places.request(adapter("a")) == "follower"
    await warming
    assert len(places.engine.loads) == 1


@on_a_jumping_clock
async def test_warming_waits_until_requests_have_their_places():
    places = bench(1)
    busy = await used(places, "a")
    warming = asyncio.create_task(places.slots.warm(adapter("w")))
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(places.request(adapter("b"), 5))
    await asyncio.sleep(0.1)
    busy.release()
    await asyncio.sleep(1)
    assert names(places) == {"b"}
    await asyncio.gather(warming, waiting)
    assert names(places) == {"w"}


@on_a_jumping_clock
async def test_warming_closes_nobody_and_urgent_warming_does():
    places = bench(1, wait_s=20)
    busy = await used(places, "a")
    with pytest.raises(Overloaded):
        await places.slots.warm(adapter("w"))
    (await used(places, "a")).release()
    urgent = asyncio.create_task(places.slots.warm(adapter("w"), urgent=True))
    await asyncio.sleep(2)
    late = asyncio.create_task(places.request(adapter("a")))
    await asyncio.sleep(0.1)
    assert not late.done(), "the closed slot took a new user"
    busy.release()
    await asyncio.gather(urgent, late)
    places.check_quiet()


@on_a_jumping_clock
async def test_warming_that_is_cancelled_goes_on():
    places = bench(1)
    warming = asyncio.create_task(places.slots.warm(adapter("a")))
    await asyncio.sleep(0)
    warming.cancel()
    await asyncio.sleep(1)
    assert names(places) == {"a"}


@on_a_jumping_clock
async def test_a_request_that_joins_a_warming_waits_its_full_time_and_closes_slots():
    places = bench(1, wait_s=60)
    busy = await used(places, "a")
    warming = asyncio.create_task(places.slots.warm(adapter("w")))
    await asyncio.sleep(55)
    joined = asyncio.create_task(places.request(adapter("w")))
    await asyncio.sleep(2)
    late = asyncio.create_task(places.request(adapter("a")))
    await asyncio.sleep(40)
    assert not late.done(), "the closed slot took a new user"
    busy.release()
    assert await joined == "follower"
    await asyncio.gather(warming, late)


@on_a_jumping_clock
async def test_what_is_held_is_no_victim_and_is_not_closed():
    places = bench(2)
    places.slots.hold(adapter("a").ref)
    held = await used(places, "a")
    other = await used(places, "b")
    waiting = asyncio.create_task(places.request(adapter("c")))
    await asyncio.sleep(9)
    (await used(places, "a")).release()
    held.release()
    await asyncio.sleep(1)
    assert not waiting.done()
    other.release()
    await waiting
    assert names(places) == {"a", "c"}
    assert not await places.slots.evict(adapter("a").ref)
    places.slots.unhold(adapter("a").ref)
    assert await places.slots.evict(adapter("a").ref)


@on_a_jumping_clock
async def test_one_place_stays_free_of_holds_and_the_refusal_gives_numbers():
    places = bench(3)
    for name in ("a", "b", "a"):
        places.slots.hold(adapter(name).ref)
    with pytest.raises(Overloaded) as caught:
        places.slots.hold(adapter("c").ref)
    assert (caught.value.reason, caught.value.limit, caught.value.value) == ("too_many_pins", 2, 3)
    places.slots.unhold(adapter("a").ref)
    places.slots.hold(adapter("c").ref)
    assert places.slots.held() == {adapter("b").ref, adapter("c").ref}


@on_a_jumping_clock
async def test_an_adapter_in_use_or_on_its_way_is_not_evicted_on_demand():
    places = slow_bench(2)
    loading = asyncio.create_task(used(places, "a"))
    await asyncio.sleep(1)
    assert not await places.slots.evict(adapter("a").ref)
    use = await loading
    assert not await places.slots.evict(adapter("a").ref)
    use.release()
    assert await places.slots.evict(adapter("a").ref)
    places.check_quiet()


@on_a_jumping_clock
async def test_evicting_goes_on_when_whoever_asked_gives_up():
    places = slow_bench(1)
    await places.request(adapter("a"))
    asking = asyncio.create_task(places.slots.evict(adapter("a").ref))
    await asyncio.sleep(1)
    asking.cancel()
    await asyncio.sleep(5)
    places.check_quiet()
    assert await places.request(adapter("b")) == "leader"


# Turns


@on_a_jumping_clock
async def test_one_long_answer_does_not_hold_up_a_starved_load():
    places = bench(2)
    await places.request(adapter("long"))
    long = await used(places, "long")  # worth least, so it is closed first; it ends in an hour
    stop = asyncio.Event()

    async def steady() -> None:
        while not stop.is_set():
            await places.request(adapter("hot"), 0.4)

    busy = [asyncio.create_task(steady()) for _ in range(5)]
    await asyncio.sleep(10)
    assert await asyncio.wait_for(places.request(adapter("cold")), 6) == "leader"
    stop.set()
    await asyncio.gather(*busy)
    long.release()


@on_a_jumping_clock
async def test_a_slot_has_its_time_slice_before_it_is_closed_for_others():
    places = bench(1, slice_s=8)
    busy = await used(places, "a")
    waiting = asyncio.create_task(places.request(adapter("b")))
    await asyncio.sleep(7)
    (await used(places, "a")).release()
    await asyncio.sleep(2.1)
    late = asyncio.create_task(places.request(adapter("a")))
    await asyncio.sleep(0.1)
    assert not late.done(), "the closed slot took a new user"
    busy.release()
    await asyncio.gather(waiting, late)
    assert [ref.name for ref in places.engine.loads] == ["a", "b", "a"]


@on_a_jumping_clock
async def test_a_slot_that_was_closed_is_opened_again_without_a_load_when_nobody_waits():
    places = bench(2)
    uses = [await used(places, "a"), await used(places, "b"), await used(places, "b")]
    await asyncio.sleep(10)
    waiting = asyncio.create_task(places.request(adapter("c")))
    await asyncio.sleep(1.5)  # `a` is closed by now
    again = asyncio.create_task(places.request(adapter("a")))
    await asyncio.sleep(0.1)
    assert not again.done()
    uses[1].release()
    uses[2].release()  # `b` goes instead
    assert await waiting == "leader"
    assert await again == "leader"
    assert [ref.name for ref in places.engine.loads].count("a") == 1
    uses[0].release()
    await asyncio.sleep(1)
    places.check_quiet()


@on_a_jumping_clock
async def test_what_is_staged_ahead_of_a_place_is_bounded():
    places = bench(4, wait_s=600)
    uses = [await used(places, f"busy{index}") for index in range(4)]
    waiting = [asyncio.create_task(places.request(adapter(f"cold{index}"))) for index in range(20)]
    await asyncio.sleep(0.5)
    assert len(places.engine.staged) == 2
    for use in uses:
        use.release()
    await asyncio.gather(*waiting)
    assert places.engine.most_staged == 2
    places.check_quiet()


@on_a_jumping_clock
async def test_prewarming_leaves_room_to_stage_for_requests():
    places = bench(4, wait_s=600)
    uses = [await used(places, f"busy{index}") for index in range(4)]
    warming = [asyncio.create_task(places.slots.warm(adapter(f"warm{index}"))) for index in range(5)]
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(places.request(adapter("cold")))
    await asyncio.sleep(0.1)
    uses[0].release()
    assert await asyncio.wait_for(waiting, 0.5) == "leader"
    for use in uses[1:]:
        use.release()
    await asyncio.gather(*warming)


@on_a_jumping_clock
async def test_a_load_that_gives_up_while_its_place_is_being_freed_leaves_table_and_engine_equal():
    places = slow_bench(1, wait_s=1)
    await places.request(adapter("a"))
    with pytest.raises(Overloaded):
        await places.request(adapter("b"))  # freeing the place takes longer than it waits
    await asyncio.sleep(5)
    places.check_quiet()
    assert places.slots.resident() == {}


# Saying so


@on_a_jumping_clock
async def test_a_client_that_does_not_wait_is_told_how_long_loads_take():
    places = slow_bench(2)
    big = [adapter(name, size_bytes=100) for name in "abc"]
    await places.request(big[0])
    await asyncio.sleep(10)
    with pytest.raises(AdapterLoading) as caught:
        await places.slots.use(big[1], wait=False)
    assert caught.value.retry_after_s == 2
    await asyncio.sleep(1.5)
    with pytest.raises(AdapterLoading) as caught:
        await places.slots.use(big[1], wait=False)
    assert caught.value.retry_after_s == 1
    assert places.slots.estimate_s(adapter("d", size_bytes=300)) == pytest.approx(6)


@on_a_jumping_clock
async def test_adapters_that_push_each_other_out_are_counted_and_said(caplog):
    meter = RecordedMeter()
    places = bench(1, meter=meter)
    with caplog.at_level(logging.WARNING):
        for index in range(30):
            await places.request(adapter("ab"[index % 2]))
            await asyncio.sleep(1)
    assert meter.counted(LOADS, tier="remote", result="ok") == 2
    assert meter.counted(LOADS, tier="disk", result="ok") == 28
    assert meter.counted(SLOT_EVICTIONS) == 29
    assert meter.counted(RELOADS) == 28
    assert len(meter.observed(LOAD_SECONDS, stage="load")) == 30
    alarms = [record.getMessage() for record in caplog.records if "thrash" in record.getMessage()]
    assert len(alarms) == 1
    assert "max_cpu_loras" in alarms[0]
    assert "1 places" in alarms[0]
