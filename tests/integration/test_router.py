"""The router, the backend and the residents on a real Ray Serve with three replicas, whose engine alone is scripted."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter

import pytest

from serve_app.routing.router import FADE_S
from tests.scripted_replicas import ROOM, Answer, Cluster

REPLICAS = 3
EIGHT = 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    import ray
    from ray import serve

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        cluster = Cluster(tmp_path_factory.mktemp("scripted"))
        cluster.run(REPLICAS)
        yield cluster
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture
async def settled(cluster: Cluster):
    """Three replicas that answer, idle, and no router that still counts what they were busy with."""

    async def idle() -> bool:
        rows = await cluster.rows()
        return [row["rank"] for row in rows] == list(range(REPLICAS)) and not any(row["requests"] for row in rows)

    await cluster.until(idle, 40)
    await cluster.reported()
    await asyncio.sleep(FADE_S)
    return cluster


def errors(answers: list[Answer]) -> list[str]:
    return [answer.error for answer in answers if answer.error]


def replicas(answers: list[Answer]) -> Counter[str]:
    return Counter(answer.replica for answer in answers)


def leaders(answers: list[Answer]) -> int:
    return sum(answer.load == "leader" for answer in answers)


async def test_sixty_four_cold_requests_are_one_fetch_and_one_load_on_one_of_three_replicas(settled):
    adapter = await settled.publish("cold")
    answers = await settled.door.ask.remote(adapter, 64)
    assert not errors(answers)
    assert (len(replicas(answers)), leaders(answers)) == (1, 1)
    assert len(await settled.holders(adapter)) == 1


async def test_two_gateways_that_never_talk_load_a_cold_adapter_once(settled):
    adapter = await settled.publish("shared")
    both = await asyncio.gather(*(door.ask.remote(adapter, 32) for door in settled.doors))
    answers = [answer for answers in both for answer in answers]
    assert not errors(answers)
    assert (len(replicas(answers)), leaders(answers)) == (1, 1)


async def test_different_cold_adapters_are_spread_over_the_replicas(settled):
    adapters = [await settled.publish(f"many-{number}") for number in range(12)]
    answers = await asyncio.gather(*(settled.door.ask.remote(adapter) for adapter in adapters))
    assert not errors([answer for one in answers for answer in one])
    assert len(replicas([one for (one,) in answers])) == REPLICAS


async def test_requests_to_the_base_are_balanced(settled):
    answers = await settled.door.ask.remote(None, 60, 0.3)
    assert sorted(replicas(answers).values()) == [20, 20, 20]


async def test_a_hot_adapter_spreads_without_a_cold_answer_and_shrinks_back(settled):
    adapter = await settled.publish("hot")
    await settled.door.ask.remote(adapter)
    await settled.reported()
    hot = await settled.door.keep_asking.remote(adapter, ROOM + 4, 0.1, 5)
    assert not errors(hot)
    assert {answer.tier for answer in hot} == {"engine"}
    assert len(await settled.holders(adapter)) == 2
    assert len(replicas(hot)) == 2
    few = await settled.door.keep_asking.remote(adapter, 1, 0.05, 1)
    assert len(replicas(few)) == 1


async def test_an_adapter_that_was_evicted_meanwhile_is_loaded_again(settled):
    adapter = await settled.publish("evicted")
    await settled.door.ask.remote(adapter)
    await settled.reported()
    rows = await settled.door.evict.remote(str(adapter.ref), "remote")
    assert [(row["tier"], row["reason"]) for row in rows] == [("remote", None)] * REPLICAS
    (answer,) = await settled.door.ask.remote(adapter)
    assert (answer.tier, answer.load) == ("remote", "leader")


async def test_a_replica_that_dies_loses_no_request_that_had_not_begun_to_answer(settled):
    adapter = await settled.publish("dying")
    await settled.door.ask.remote(adapter)
    running = [settled.door.ask.remote(adapter, ROOM - 1, 2), settled.door.ask.remote(None, 6, 2)]
    await asyncio.sleep(0.7)
    (holder,) = await settled.holders(adapter)
    victim = next(row for row in await settled.rows() if row["replica"] == holder)
    os.kill(victim["pid"], signal.SIGKILL)
    answers = [answer for one in await asyncio.gather(*running) for answer in one]
    assert not errors(answers)
    assert holder not in replicas(answers)


async def test_a_replica_that_is_killed_while_it_loads_leaves_the_load_to_another(settled):
    adapter = await settled.publish("halfway")
    asking = settled.door.ask.remote(adapter, 8, 1)
    victims: list[dict] = []

    async def begun() -> bool:
        victims[:] = [row for row in await settled.rows() if str(adapter.ref) in row["adapters"]]
        return bool(victims)

    await settled.until(begun)
    os.kill(victims[0]["pid"], signal.SIGKILL)
    answers = await asking
    assert not errors(answers)
    assert victims[0]["replica"] not in replicas(answers)
    assert leaders(answers) == 1


async def test_the_replacement_of_a_dead_replica_owns_what_that_owned(settled):
    await settled.empty()  # where places are free, owners get all that is theirs
    adapters = [await settled.publish(f"owned-{number}") for number in range(6)]

    async def ranks() -> list[int]:
        rank_of = {row["replica"]: row["rank"] for row in await settled.rows()}
        answers = await asyncio.gather(*(settled.door.ask.remote(adapter) for adapter in adapters))
        return [rank_of[answer.replica] for (answer,) in answers]

    before = await ranks()
    await settled.empty()
    victim = (await settled.rows())[before[0]]
    os.kill(victim["pid"], signal.SIGKILL)

    async def replaced() -> bool:
        rows = await settled.rows()
        return len(rows) == REPLICAS and all(row["rank"] is not None and row["replica"] != victim["replica"] for row in rows)

    await settled.until(replaced, 40)
    await settled.reported()
    assert await ranks() == before


async def test_a_replica_that_hangs_is_listed_empty_and_hides_no_other(settled):
    victim = (await settled.rows())[0]
    os.kill(victim["pid"], signal.SIGSTOP)
    try:
        rows = await settled.rows()
    finally:
        os.kill(victim["pid"], signal.SIGCONT)
    assert [row["rank"] for row in rows] == [1, 2, None]


async def test_replicas_that_are_replaced_under_traffic_lose_no_request(settled):
    adapter = await settled.publish("moving")
    await settled.door.ask.remote(adapter)
    traffic = [settled.door.keep_asking.remote(adapter, 4, 0.2, 12), settled.doors[1].keep_asking.remote(None, 4, 0.2, 12)]
    before = {row["replica"] for row in await settled.rows()}
    await asyncio.to_thread(settled.run, REPLICAS)
    answers = [answer for one in await asyncio.gather(*traffic) for answer in one]
    assert not errors(answers)
    assert before.isdisjoint({row["replica"] for row in await settled.rows()})


async def test_eight_replicas_load_each_of_many_cold_adapters_once_and_lose_nothing_when_one_dies(settled):
    await asyncio.to_thread(settled.run, EIGHT)

    async def all_there() -> bool:
        return [row["rank"] for row in await settled.rows()] == list(range(EIGHT))

    await settled.until(all_there, 120)
    await settled.reported()
    adapters = [await settled.publish(f"eight-{number}") for number in range(3 * EIGHT)]
    asked = await asyncio.gather(*(settled.door.ask.remote(adapter, 4) for adapter in adapters))
    assert not errors([answer for answers in asked for answer in answers])
    assert [(len(replicas(answers)), leaders(answers)) for answers in asked] == [(1, 1)] * len(adapters)
    assert len(replicas([answer for answers in asked for answer in answers])) == EIGHT

    running = [settled.door.ask.remote(adapter, 2, 2) for adapter in adapters]
    await asyncio.sleep(0.7)
    os.kill((await settled.rows())[0]["pid"], signal.SIGKILL)
    assert not errors([answer for one in await asyncio.gather(*running) for answer in one])
