"""Promotions that wait: the alias moves when replicas hold the version, exactly once, and stays where it was if they can't."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from adapters.errors import EngineUnavailable, StoreUnreachable
from adapters.registry import Registry
from adapters.registry.promotion import outcome
from adapters.registry.standing import Standing, standing
from adapters.registry.view import RegistryView
from adapters.settings import WebhookSettings
from adapters.types import By, PendingMove
from gateway.promoter import Promoter
from gateway.telling import Telling
from tests.scripted_backend import ScriptedBackend
from tests.unit.gateway.conftest import prepared, until

OLD, NEW = "demo:parrot@1", "demo:parrot@2"


def row(state: str = "ready", tier: str = "engine", **more: Any) -> dict[str, Any]:
    return {"tier": tier, "users": 0, "pinned": False, "state": state, "reason": None, "size_bytes": 8, "move_id": None} | more


def replicas(*held: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The residency of the base, with a replica for each mapping of refs to rows."""
    reports = [{"replica": f"r{rank}", "rank": rank, "slots": 4, "adapters": adapters} for rank, adapters in enumerate(held)]
    return {"demo": {"requests": 0, "resident": {}, "int_ids": [], "slots": 4, "replicas": reports}}


class Gateway:
    """A view and a promoter on the registry, driven by hand: `looks` lets it see and act once."""

    def __init__(self, registry: Registry, backend: ScriptedBackend, **settings: float) -> None:
        self.view = RegistryView(registry, 0.05, on_change=lambda entry: self.promoter.notice(entry))
        telling = Telling(WebhookSettings(), registry, None)
        self.promoter = Promoter(registry, self.view, backend, telling, **settings)

    async def looks(self, times: int = 1) -> None:
        for _ in range(times):
            await self.view.refresh()
            await self.promoter.look()


@pytest.fixture
def gateway(registry, backend) -> Gateway:
    return Gateway(registry, backend)


async def begun(registry: Registry, version: int = 2, *, min_ready: int | None = None, timeout_s: float = 60) -> PendingMove:
    by = By("ann", "better")
    head = await registry.begin_move("demo", "parrot", "production", version, by, min_ready=min_ready, timeout_s=timeout_s)
    return head.pending["production"]


async def named(registry: Registry) -> int:
    return (await registry.head("demo", "parrot")).aliases["production"]


async def end_of(registry: Registry, move: PendingMove) -> tuple[str, str | None] | None:
    ended = outcome(await registry.head("demo", "parrot"), move.id)
    return None if ended is None else (ended.kind, ended.message)


# What replicas report


async def test_ready_are_replicas_that_have_it_in_their_engine_and_can_answer(registry, gateway):
    move = await begun(registry)
    await gateway.view.refresh()
    entry = gateway.view.entry("demo", "parrot")
    view = replicas(
        {OLD: row(), NEW: row()}, {OLD: row(), NEW: row("loading")}, {OLD: row(tier="disk"), NEW: row(tier="disk")}, {}
    )
    assert standing(view["demo"]["replicas"], entry, move) == Standing(1, 2, 4, None)


async def test_every_version_that_shares_the_alias_counts_as_the_one_before(registry, gateway):
    await registry.set_weights("demo", "parrot", "production", {1: 90, 2: 10})
    move = await begun(registry)
    await gateway.view.refresh()
    entry = gateway.view.entry("demo", "parrot")
    assert standing(replicas({OLD: row()}, {NEW: row()})["demo"]["replicas"], entry, move).holders_of_old == 1


async def test_only_a_failure_of_this_very_move_counts(registry, gateway):
    move = await begun(registry)
    await gateway.view.refresh()
    entry = gateway.view.entry("demo", "parrot")
    for move_id, failure in (("an older one", None), (None, None), (move.id, "rank_too_large")):
        reports = replicas({NEW: row("failed", "disk", reason="rank_too_large", move_id=move_id)})["demo"]["replicas"]
        assert standing(reports, entry, move).failure == failure


# Moving


async def test_the_alias_moves_when_as_many_replicas_hold_it_as_hold_the_version_before(registry, backend, gateway):
    backend.resident = replicas({OLD: row()}, {OLD: row()}, {})
    move = await begun(registry)
    await gateway.looks()
    backend.resident = replicas({OLD: row(), NEW: row()}, {OLD: row(), NEW: row("loading")}, {})
    await gateway.looks()
    assert await named(registry) == 1
    backend.resident = replicas({OLD: row(), NEW: row()}, {OLD: row(), NEW: row()}, {})
    await gateway.looks()
    assert await named(registry) == 2
    assert await end_of(registry, move) == ("promote", "better")


async def test_a_move_that_waits_is_taken_once_and_tells_by_whom(registry, backend, gateway):
    backend.resident = replicas({OLD: row()})
    await begun(registry)
    await gateway.looks(3)
    head = await registry.head("demo", "parrot")
    assert head.pending["production"].taken_by == gateway.promoter.id
    assert head.revision == 4  # first promotion, begun, taken


async def test_a_replica_that_is_silent_is_waited_for_since_it_may_hold_the_version_before(registry, backend, gateway):
    backend.resident = replicas({OLD: row(), NEW: row()}, {})
    backend.resident["demo"]["replicas"][1]["replica"] = None
    await begun(registry)
    await gateway.looks()
    assert await named(registry) == 1
    backend.resident = replicas({OLD: row(), NEW: row()}, {OLD: row(), NEW: row()})
    await gateway.looks()
    assert await named(registry) == 2


async def test_a_replica_that_stays_silent_keeps_nobody_beyond_the_deadline(registry, backend, gateway):
    backend.resident = replicas({OLD: row(), NEW: row()}, {})
    backend.resident["demo"]["replicas"][1]["replica"] = None
    await begun(registry, timeout_s=0.1)
    await asyncio.sleep(0.15)
    await gateway.looks()
    assert await named(registry) == 2


async def test_with_no_replica_it_moves_at_once_and_the_history_says_so(registry, backend, gateway):
    backend.resident = replicas()
    move = await begun(registry)
    await gateway.looks()
    assert await named(registry) == 2
    assert "no replica" in (await end_of(registry, move))[1]


async def test_replicas_that_can_t_be_asked_are_not_the_same_as_none(registry, backend, gateway):
    backend.error = EngineUnavailable("starting")
    await begun(registry)
    await gateway.looks(2)
    assert await named(registry) == 1


async def test_a_move_of_a_base_that_nobody_serves_waits_for_nobody(registry, backend):
    gateway = Gateway(registry, ScriptedBackend(bases=("other",)), taken_within_s=0.1)
    move = await begun(registry)
    await gateway.looks()
    assert await named(registry) == 1
    await asyncio.sleep(0.15)
    await gateway.looks()
    assert await named(registry) == 2
    assert "no gateway that serves `demo`" in (await end_of(registry, move))[1]


# Failing


async def test_a_version_that_can_t_be_loaded_leaves_the_alias_where_it_was_with_the_reason(registry, backend, gateway):
    move = await begun(registry)
    backend.resident = replicas({OLD: row(), NEW: row("failed", "disk", reason="rank_too_large", move_id=move.id)})
    await gateway.looks()
    assert await named(registry) == 1
    assert await end_of(registry, move) == ("promote_failed", "version 2: rank_too_large")


async def test_a_failure_of_an_earlier_try_does_not_end_a_new_one(registry, backend, gateway):
    backend.resident = replicas({OLD: row(), NEW: row("failed", "disk", reason="engine_load_failed", move_id="earlier")})
    move = await begun(registry)
    await gateway.looks()
    assert await end_of(registry, move) is None
    backend.resident = replicas({OLD: row(), NEW: row()})
    await gateway.looks()
    assert await named(registry) == 2


async def test_the_deadline_ends_it_with_how_far_it_came(registry, backend, gateway):
    backend.resident = replicas({OLD: row(), NEW: row()}, {OLD: row(), NEW: row("loading")})
    move = await begun(registry, timeout_s=0.2)
    await gateway.looks()
    await asyncio.sleep(0.25)
    await gateway.looks()
    kind, message = await end_of(registry, move)
    assert (kind, await named(registry)) == ("promote_failed", 1)
    assert "1 of 2 replicas" in message


async def test_the_deadline_holds_also_while_replicas_can_t_be_asked(registry, backend, gateway):
    backend.error = EngineUnavailable("starting")
    move = await begun(registry, timeout_s=0.1)
    await asyncio.sleep(0.15)
    await gateway.looks()
    assert await end_of(registry, move) == ("promote_failed", "version 2: no replica could be asked in time")


# Trouble, and several gateways


async def test_two_gateways_that_look_at_once_move_it_once(registry, backend):
    backend.resident = replicas({OLD: row(), NEW: row()})
    move = await begun(registry)
    await asyncio.gather(*(Gateway(registry, backend).looks() for _ in range(4)))
    head = await registry.head("demo", "parrot")
    assert head.aliases["production"] == 2
    assert [past.move_id for past in head.history].count(move.id) == 1


async def test_others_stand_back_for_the_one_that_took_it_and_take_over_when_it_died(registry, backend, gateway):
    backend.resident = replicas({OLD: row()})
    await begun(registry)
    await gateway.looks()
    other = Gateway(registry, backend, stand_back_s=0.1)
    backend.resident = replicas({OLD: row(), NEW: row()})
    await other.looks()
    assert await named(registry) == 1
    await asyncio.sleep(0.15)
    await other.looks()
    assert await named(registry) == 2


async def test_store_trouble_in_the_middle_ends_it_later(registry, backend, gateway, monkeypatch):
    backend.resident = replicas({OLD: row(), NEW: row()})
    move = await begun(registry)
    finish = registry.finish_move

    async def down(*_: Any, **__: Any) -> None:
        raise StoreUnreachable("the store does not answer")

    monkeypatch.setattr(registry, "finish_move", down)
    await gateway.looks(2)
    assert await end_of(registry, move) is None
    monkeypatch.setattr(registry, "finish_move", finish)
    await gateway.looks()
    assert await named(registry) == 2


async def test_a_bug_does_not_end_the_promoter(registry, backend, gateway, monkeypatch, caplog):
    backend.resident = replicas({OLD: row(), NEW: {}})
    await begun(registry)
    await gateway.view.refresh()
    running = asyncio.create_task(gateway.promoter.run())
    try:
        await asyncio.sleep(0.1)
        assert "a look at pending moves failed" in caplog.text
        backend.resident = replicas({OLD: row(), NEW: row()})
        gateway.promoter.wake()
        await until(lambda: gateway.view.entry("demo", "parrot").aliases["production"] == 2)
    finally:
        running.cancel()


async def test_a_move_that_somebody_else_ended_meanwhile_is_left_alone(registry, backend, gateway):
    backend.resident = replicas({OLD: row(), NEW: row()})
    move = await begun(registry)
    await gateway.view.refresh()
    await registry.fail_move("demo", "parrot", "production", move.id, "stopped")
    await gateway.promoter.look()
    assert await named(registry) == 1
    assert gateway.view.entry("demo", "parrot").pending == {}


# Over HTTP


async def post(http, verb: str, status: int, **body: Any) -> dict[str, Any]:
    answer = await http.post(f"/registry/v1/{verb}", json={"base": "demo", "name": "parrot"} | body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_a_promotion_answers_when_the_version_is_warm(http, backend):
    backend.resident = replicas({OLD: row()})
    asked = asyncio.create_task(post(http, "promote", 200, version=2))
    await asyncio.sleep(0.3)
    assert not asked.done()
    shown = (await http.get("/registry/v1/adapter?base=demo&name=parrot")).json()
    assert (shown["aliases"]["production"], shown["pending"]["production"]["version"]) == (1, 2)
    backend.resident = replicas({OLD: row(), NEW: row()})
    body = await asyncio.wait_for(asked, 5)
    assert (body["aliases"], body["pending"], body["seen"]) == ({"production": 2}, {}, True)


async def test_a_caller_that_does_not_wait_is_told_what_is_pending(http, backend):
    backend.resident = replicas({OLD: row()})
    body = await post(http, "promote", 202, version=2, wait=False, min_ready=1, timeout_s=60)
    assert body["aliases"] == {"production": 1}
    assert body["pending"]["production"] | {"id": "", "at": "", "deadline": ""} == {
        "id": "",
        "version": 2,
        "min_ready": 1,
        "deadline": "",
        "at": "",
        "who": None,
        "message": None,
        "taken": False,
    }


async def test_now_moves_it_cold_and_ends_what_was_pending(http, backend):
    backend.resident = replicas({OLD: row()})
    await post(http, "promote", 202, version=2, wait=False)
    body = await post(http, "promote", 200, version=2, now=True)
    assert (body["aliases"], body["pending"]) == ({"production": 2}, {})


async def test_a_promotion_that_failed_is_a_conflict_that_says_why_and_where_the_alias_is(http, backend):
    backend.resident = replicas({OLD: row()})
    error = (await post(http, "promote", 409, version=2, timeout_s=0.2))["error"]
    assert (error["code"], error["reason"], error["value"]) == ("version_conflict", "promote_failed", 2)
    assert "`production` of `parrot` stays at version 1" in error["message"]


async def test_a_promotion_that_another_one_overtakes_is_a_conflict(http, registry, backend):
    await registry.publish("demo", "parrot", prepared(b"three"))
    backend.resident = replicas({OLD: row()})
    first = asyncio.create_task(post(http, "promote", 409, version=2))
    await asyncio.sleep(0.3)
    second = await post(http, "promote", 200, version=3, now=True)
    assert second["aliases"] == {"production": 3}
    assert (await asyncio.wait_for(first, 5))["error"]["reason"] == "promote_failed"


async def test_where_the_alias_names_it_already_nothing_is_written(http):
    before = (await http.get("/registry/v1/adapter?base=demo&name=parrot")).json()["revision"]
    assert (await post(http, "promote", 200, version=1))["revision"] == before


@pytest.mark.parametrize("wrong", [{"min_ready": 0}, {"timeout_s": 0}, {"timeout_s": 1e9}, {"now": "yes"}, {"min_ready": True}])
async def test_limits_of_a_promotion_that_make_no_sense_are_refused(http, wrong):
    assert (await post(http, "promote", 400, version=2, **wrong))["error"]["param"] == next(iter(wrong))
