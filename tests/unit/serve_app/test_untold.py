"""Requests that do not wait for a cold adapter learn that it can't be loaded, too."""

from __future__ import annotations

import pytest

from adapters.errors import AdapterIncompatible, AdapterLoading, LoraMuxError, StoreUnreachable
from adapters.names import AdapterRef
from serve_app.slots.untold import MAX_KEPT, TOLD_FOR_S, Untold
from tests.slots_bench import Bench, adapter

BAD = adapter("bad")


async def errors(bench: Bench, count: int) -> list[type[LoraMuxError]]:
    """What as many requests, one after the other, are told that do not wait; each load ends before the next request."""
    kinds: list[type[LoraMuxError]] = []
    for _ in range(count):
        with pytest.raises(LoraMuxError) as caught:
            await bench.slots.use(BAD, wait=False)
        kinds.append(type(caught.value))
        await bench.settle()
    return kinds


async def test_each_failure_is_told_once_to_who_did_not_wait_for_it():
    bench = Bench()
    bench.engine.failing = {BAD.ref}
    assert await errors(bench, 4) == [AdapterLoading, AdapterIncompatible] * 2
    assert len(bench.engine.loads) == 2, "who is told starts no load"
    bench.check_quiet()


async def test_a_failure_that_others_were_told_is_not_told_again():
    bench = Bench()
    bench.engine.failing = {BAD.ref}
    with pytest.raises(AdapterIncompatible):
        await bench.request(BAD)
    assert await errors(bench, 1) == [AdapterLoading]


async def test_who_waits_tries_anew_whatever_failed_before():
    bench = Bench()
    bench.cache.failures = [StoreUnreachable("down")]
    assert await errors(bench, 1) == [AdapterLoading]
    assert await bench.request(BAD) == "leader"


async def test_a_failure_is_forgotten_once_a_load_went_well():
    bench = Bench()
    bench.cache.failures = [StoreUnreachable("down")]
    await errors(bench, 1)
    await bench.request(BAD)
    await bench.slots.evict(BAD.ref)
    assert await errors(bench, 1) == [AdapterLoading]


def test_an_old_failure_says_nothing_any_more():
    now_s = 0.0
    untold = Untold(lambda: now_s)
    untold.keep(BAD.ref, StoreUnreachable("down"))
    now_s = TOLD_FOR_S + 1
    assert untold.take(BAD.ref) is None


def test_a_failure_is_kept_without_its_trace():
    untold = Untold()
    try:
        raise StoreUnreachable("down", retry_after_s=3)
    except StoreUnreachable as error:
        untold.keep(BAD.ref, error)
    told = untold.take(BAD.ref)
    assert told is not None
    assert (told.message, told.retry_after_s, told.__traceback__) == ("down", 3, None)


def test_failures_of_many_names_take_no_more_room_than_they_may():
    untold = Untold()
    for number in range(3 * MAX_KEPT):
        untold.keep(AdapterRef("base", f"a{number}", 1), StoreUnreachable("down"))
    assert sum(untold.take(AdapterRef("base", f"a{number}", 1)) is not None for number in range(3 * MAX_KEPT)) <= MAX_KEPT
