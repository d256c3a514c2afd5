"""The router inside Serve's own machinery: tasks, queues and caches are Ray's; only the replicas are scripted."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from adapters.names import AdapterRef
from adapters.types import ResolvedAdapter
from gateway.backend import ResolvedRequest
from serve_app.routing.router import AffinityRouter

ROOM = 8
MOST = 32
DEPLOYMENT = DeploymentID(name="Replica:demo", app_name="loramux")


class ScriptedReplica:
    """What a router sees of a replica. `asked` lists the calls that the router itself makes; probing it fails the test."""

    def __init__(self, rank: int) -> None:
        self.replica_id = ReplicaID(f"r{rank}", DEPLOYMENT)
        self.max_ongoing_requests = MOST
        self.routing_stats: dict[str, Any] = {"rank": rank, "slots": 16, "engine": [], "loading": []}
        self.asked: list[tuple[str, Any]] = []
        self.error: Exception | None = None
        self.probes = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.probes += 1
        return 0

    def try_send_request(self, call: PendingRequest, with_rejection: bool) -> Any:
        self.asked.append((call.metadata.call_method, call.args))
        if self.error:
            raise self.error

        async def answered() -> None:
            return None

        return SimpleNamespace(get_async=answered)


class Traffic:
    """Requests through a router as Serve sends them: chosen, sent, and ended when a test says so."""

    def __init__(self, count: int) -> None:
        self.replicas = [ScriptedReplica(rank) for rank in range(count)]
        self.router = AffinityRouter(
            deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.UNKNOWN, use_replica_queue_len_cache=True
        )
        self.router.initialize_state(room=ROOM)
        self.update()
        self._next = 0

    def update(self) -> None:
        self.router.update_replicas(list(self.replicas))

    def hold(self, ref: str, *replicas: ScriptedReplica) -> None:
        for replica in replicas:
            replica.routing_stats = replica.routing_stats | {"engine": [ref]}
        self.update()

    def pending(self, name: str | None) -> PendingRequest:
        self._next += 1
        metadata = RequestMetadata(str(self._next), f"internal-{self._next}", call_method="answer", is_streaming=True)
        return PendingRequest([request_for(name)], {}, metadata)

    async def ask(self, name: str | None) -> str:
        pending = self.pending(name)
        replica = await self.router._choose_replica_for_request(pending)
        self.router.on_send_request(replica.replica_id)
        return replica.replica_id.unique_id

    async def ask_all(self, name: str | None, count: int) -> Counter[str]:
        async with asyncio.timeout(5):
            return Counter(await asyncio.gather(*(self.ask(name) for _ in range(count))))

    def owners(self, name: str) -> list[ScriptedReplica]:
        by_name = {replica.replica_id.unique_id: replica for replica in self.replicas}
        return [by_name[owner] for owner in self.router._placement.owners(ref_of(name))]


def ref_of(name: str) -> str:
    return f"demo:{name}@1"


def request_for(name: str | None) -> ResolvedRequest:
    adapter = ResolvedAdapter(AdapterRef("demo", name, 1), "d" * 64, (), 8) if name else None
    return ResolvedRequest("/v1/completions", "demo", adapter, b"{}", True, "request")


@pytest.fixture
async def traffic():
    return Traffic(3)


async def test_sixty_four_requests_for_a_cold_adapter_in_one_turn_go_to_its_owner(traffic):
    for replica in traffic.replicas:
        replica.max_ongoing_requests = 256
    assert await traffic.ask_all("gold", 64) == {traffic.owners("gold")[0].replica_id.unique_id: 64}


async def test_requests_to_the_base_in_one_turn_are_shared_evenly(traffic):
    shares = await traffic.ask_all(None, 30)
    assert set(shares.values()) == {10}


async def test_what_other_routers_sent_counts_and_fades_until_it_is_heard_again(traffic, monkeypatch):
    busy, *_ = traffic.replicas
    traffic.router.on_new_queue_len_info(busy.replica_id, 9)
    assert busy.replica_id.unique_id not in await traffic.ask_all(None, 12)
    monkeypatch.setattr("serve_app.routing.router.FADE_S", 0.001)
    await asyncio.sleep(0.002)
    assert (await traffic.ask_all(None, 3))[busy.replica_id.unique_id] == 3


async def test_what_a_replica_says_of_this_router_itself_is_not_counted_twice(traffic):
    await traffic.ask_all(None, 9)
    for replica in traffic.replicas:
        traffic.router.on_new_queue_len_info(replica.replica_id, 3)
    assert [traffic.router._load(replica.replica_id.unique_id) for replica in traffic.replicas] == [3, 3, 3]


async def test_each_request_gets_the_replica_that_was_chosen_for_it(traffic):
    names = [f"a{number}" for number in range(ROOM)]  # no owner gets full
    async with asyncio.timeout(5):
        chosen = await asyncio.gather(*(traffic.ask(name) for name in names))
    assert chosen == [traffic.owners(name)[0].replica_id.unique_id for name in names]


async def test_a_replica_that_was_not_heard_of_is_not_asked_first(traffic):
    await asyncio.sleep(0.01)
    before = [replica.probes for replica in traffic.replicas]  # Serve itself greets new ones
    await traffic.ask_all("gold", 8)
    assert [replica.probes for replica in traffic.replicas] == before


async def test_requests_that_wait_for_a_full_replica_hold_up_no_others(traffic):
    first, *_ = traffic.owners("gold")
    first.max_ongoing_requests = 0
    waiting = [asyncio.ensure_future(traffic.ask("gold")) for _ in range(12)]
    await asyncio.sleep(0.05)
    free = next(f"a{n}" for n in range(99) if traffic.owners(f"a{n}")[0] is not first)
    assert await asyncio.wait_for(traffic.ask(free), 1) == traffic.owners(free)[0].replica_id.unique_id
    assert not any(task.done() for task in waiting)
    for task in waiting:
        task.cancel()


async def test_a_request_that_is_given_up_while_it_waits_leaves_nothing_behind(traffic):
    first, *_ = traffic.owners("gold")
    first.max_ongoing_requests = 0
    waiting = asyncio.ensure_future(traffic.ask("gold"))
    await asyncio.sleep(0.05)
    assert traffic.router._placement.flights
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(0)
    assert not traffic.router._placement.flights


async def test_a_request_that_was_rejected_and_is_given_up_then_leaves_nothing_behind(traffic):
    pending = traffic.pending("gold")
    await traffic.router._choose_replica_for_request(pending)
    traffic.owners("gold")[0].max_ongoing_requests = 0
    waiting = asyncio.ensure_future(traffic.router._choose_replica_for_request(pending, is_retry=True))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(0)
    assert not traffic.router._placement.flights


async def test_a_request_that_ended_leaves_nothing_behind(traffic):
    pending = traffic.pending("gold")
    replica = await traffic.router._choose_replica_for_request(pending)
    traffic.router.on_request_completed(replica.replica_id, pending.metadata.internal_request_id)
    assert not traffic.router._placement.flights


async def test_an_owner_that_died_is_replaced_by_the_next_at_once(traffic):
    first, second, _ = traffic.owners("gold")
    assert await traffic.ask("gold") == first.replica_id.unique_id
    traffic.router.on_replica_actor_died(first.replica_id)
    assert await traffic.ask("gold") == second.replica_id.unique_id


async def test_an_owner_that_can_not_be_reached_is_left_alone_for_a_while(traffic, monkeypatch):
    first, second, _ = traffic.owners("gold")
    traffic.router.on_replica_actor_unavailable(first.replica_id)
    assert await traffic.ask("gold") == second.replica_id.unique_id
    monkeypatch.setattr("serve_app.routing.router.DOUBT_S", 0)
    traffic.router.on_replica_actor_unavailable(first.replica_id)
    traffic.update()
    assert await traffic.ask("silver") is not None
    assert not traffic.router._doubted


async def test_a_replica_that_drains_gets_nothing_more(traffic):
    first, second, _ = traffic.owners("gold")
    traffic.hold(ref_of("gold"), first)
    traffic.replicas.remove(first)
    traffic.update()
    assert await traffic.ask_all("gold", 4) == {second.replica_id.unique_id: 4}


async def test_when_its_holder_is_full_one_more_owner_is_asked_once_to_load_the_adapter(traffic):
    first, second, third = traffic.owners("gold")
    traffic.hold(ref_of("gold"), first)
    assert await traffic.ask_all("gold", ROOM + 6) == {first.replica_id.unique_id: ROOM + 6}
    await asyncio.sleep(0)
    assert [method for method, _ in second.asked] == ["prewarm"]
    assert second.asked[0][1] == [request_for("gold").adapter, "engine"]
    assert not third.asked


async def test_once_it_holds_the_adapter_the_added_owner_takes_its_share(traffic):
    first, second, _ = traffic.owners("gold")
    traffic.hold(ref_of("gold"), first)
    await traffic.ask_all("gold", ROOM)
    traffic.hold(ref_of("gold"), second)
    assert await traffic.ask_all("gold", ROOM) == {second.replica_id.unique_id: ROOM}


async def test_an_added_owner_that_can_not_be_asked_is_asked_again_by_the_next_request(traffic):
    first, second, _ = traffic.owners("gold")
    traffic.hold(ref_of("gold"), first)
    second.error = ActorUnavailableError("gone for a moment", b"x" * 16)
    await traffic.ask_all("gold", ROOM + 1)
    await asyncio.sleep(0.01)
    await traffic.ask("gold")
    await asyncio.sleep(0.01)
    assert len(second.asked) == 2


async def test_two_routers_send_one_cold_adapter_to_one_replica():
    one, other = Traffic(3), Traffic(3)
    assert await one.ask_all("gold", 16) == await other.ask_all("gold", 16)


async def test_calls_that_are_no_requests_of_clients_go_to_any_replica(traffic):
    call = PendingRequest([False], {}, RequestMetadata("x", "internal-x", call_method="residency"))
    replica = await asyncio.wait_for(traffic.router._choose_replica_for_request(call), 1)
    assert replica in traffic.replicas
    assert not traffic.router._placement.flights
