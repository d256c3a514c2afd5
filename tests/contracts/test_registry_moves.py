"""Directives and moves that wait, over memory, a local folder and a real S3 server: one head, many who write it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from adapters import errors
from adapters.names import AdapterRef
from adapters.registry import Registry, layout
from adapters.registry.promotion import outcome
from adapters.registry.view import RegistryView
from adapters.settings import StoreSettings
from adapters.store import Store, open_store
from adapters.types import By, Directive, Head, PendingMove
from tests.prepared import prepared
from tests.seaweed import Seaweed
from tests.unit.adapters.test_registry_crash import Crash, DyingStore

BASE, NAME = "Qwen/Qwen3-0.6B", "team/maze"


@pytest.fixture
async def registry(store: Store) -> Registry:
    """Three versions; `production` names the first."""
    registry = Registry(store)
    for content in "abc":
        await registry.publish(BASE, NAME, prepared(content))
    await registry.promote(BASE, NAME, "production", 1)
    return registry


def several(store_settings: StoreSettings, store_kind: str) -> list[Registry]:
    """Registries of several processes over the same store."""
    return [Registry(open_store(store_settings)) for _ in range(3 if store_kind == "s3" else 8)]


async def begun(registry: Registry, version: int = 2, *, timeout_s: float = 60, **by: Any) -> PendingMove:
    head = await registry.begin_move(BASE, NAME, "production", version, By(**by), min_ready=None, timeout_s=timeout_s)
    return head.pending["production"]


def ends(head: Head, move: PendingMove) -> list[str]:
    return [row.kind for row in head.history if row.move_id == move.id]


async def check_row(registry: Registry) -> None:
    """The index shows the head's directives and pending moves."""
    head, row = await registry.head(BASE, NAME), await registry.index.entry(BASE, NAME)
    assert row == await registry.entry(BASE, NAME)
    assert (row.directives, row.pending, row.revision) == (head.directives, head.pending, head.revision)


class TestDirectives:
    async def test_a_pin_reaches_the_head_the_index_and_every_view(self, registry: Registry) -> None:
        head = await registry.direct(BASE, NAME, Directive("2", "engine", True, replicas=2), By("ann", "for the demo"))
        [pin] = head.directives
        assert (pin.target, pin.replicas, pin.who, pin.message, head.revision) == ("2", 2, "ann", "for the demo", 3)
        view = RegistryView(registry, 1.0)
        assert await view.wait_seen(BASE, NAME, head.revision)
        assert view.entry(BASE, NAME).directives == (pin,)
        await check_row(registry)

    async def test_the_same_again_writes_nothing_and_another_size_replaces_it(self, registry: Registry) -> None:
        first = await registry.direct(BASE, NAME, Directive("2", "engine", True))
        assert await registry.direct(BASE, NAME, Directive("2", "engine", True), By("bob")) == first
        head = await registry.direct(BASE, NAME, Directive("2", "engine", True, replicas=1))
        assert [directive.replicas for directive in head.directives] == [1]

    async def test_taken_back_they_are_gone_and_a_second_time_nothing_is_written(self, registry: Registry) -> None:
        await registry.direct(BASE, NAME, Directive("2", "engine", True))
        await registry.direct(BASE, NAME, Directive("production", "disk", False))
        head = await registry.undirect(BASE, NAME, "2", By("ann"), pin=True)
        assert [directive.target for directive in head.directives] == ["production"]
        assert await registry.undirect(BASE, NAME, "2") == head
        await check_row(registry)

    async def test_unknown_and_retired_targets_are_refused(self, registry: Registry) -> None:
        await registry.retire(AdapterRef(BASE, NAME, 3))
        for target, error in (("9", errors.ModelNotFound), ("3", errors.VersionRetired), ("canary", errors.InvalidRequest)):
            with pytest.raises(error):
                await registry.direct(BASE, NAME, Directive(target, "engine", True))
        with pytest.raises(errors.ModelNotFound):
            await registry.direct(BASE, "other", Directive("production", "engine", True))
        with pytest.raises(errors.ModelNotFound):
            await registry.undirect(BASE, "other", "production")

    async def test_against_a_revision(self, registry: Registry) -> None:
        with pytest.raises(errors.VersionConflict):
            await registry.direct(BASE, NAME, Directive("2", "engine", True), By(expected_revision=1))
        await registry.direct(BASE, NAME, Directive("2", "engine", True), By(expected_revision=2))

    async def test_a_pinned_version_can_not_be_retired_or_collected_until_it_is_unpinned(self, registry: Registry) -> None:
        await registry.direct(BASE, NAME, Directive("2", "disk", True))
        for attempt in (registry.retire, registry.collect):
            with pytest.raises(errors.InvalidRequest, match="is pinned") as caught:
                await attempt(AdapterRef(BASE, NAME, 2))
            assert caught.value.reason == "pinned"
        await registry.undirect(BASE, NAME, "2")
        assert (await registry.retire(AdapterRef(BASE, NAME, 2))).retired == {2}

    async def test_many_at_once_lose_none(self, registry: Registry, store_settings: StoreSettings, store_kind: str) -> None:
        registries = several(store_settings, store_kind)
        wanted = [Directive("2", "engine", True, replicas=number + 1) for number in range(len(registries))]
        tiers = [Directive(str(1 + number % 3), "disk", number % 2 == 0) for number in range(len(registries))]
        await asyncio.gather(*(one.direct(BASE, NAME, directive) for one, directive in zip(registries, wanted, strict=True)))
        await asyncio.gather(*(one.direct(BASE, NAME, directive) for one, directive in zip(registries, tiers, strict=True)))
        head = await registry.head(BASE, NAME)
        assert len(head.directives) == 1 + len({(one.target, one.pin) for one in tiers})
        await check_row(registry)


class TestMoves:
    async def test_a_move_is_pending_then_taken_then_done(self, registry: Registry) -> None:
        move = await begun(registry, who="ann", message="better")
        assert (await registry.index.entry(BASE, NAME)).pending == {"production": move}
        head = await registry.take_move(BASE, NAME, "production", move.id, "gateway-1")
        assert head.pending["production"].taken_by == "gateway-1"
        assert await registry.take_move(BASE, NAME, "production", move.id, "gateway-2") == head
        head = await registry.finish_move(BASE, NAME, "production", move.id)
        assert (head.aliases, head.pending) == ({"production": 2}, {})
        row = head.history[-1]
        assert (row.kind, row.from_version, row.to_version, row.who, row.message) == ("promote", 1, 2, "ann", "better")
        assert await registry.finish_move(BASE, NAME, "production", move.id) == head
        await check_row(registry)

    async def test_a_move_that_fails_leaves_the_alias_with_the_reason(self, registry: Registry) -> None:
        move = await begun(registry)
        head = await registry.fail_move(BASE, NAME, "production", move.id, "rank 64 is over 32")
        assert (head.aliases, head.pending) == ({"production": 1}, {})
        assert outcome(head, move.id).message == "version 2: rank 64 is over 32"
        assert await registry.fail_move(BASE, NAME, "production", move.id, "something else") == head
        with pytest.raises(errors.VersionConflict, match="rank 64"):
            await registry.finish_move(BASE, NAME, "production", move.id)
        await check_row(registry)

    async def test_a_version_that_waits_can_not_be_retired_until_the_move_ended(self, registry: Registry) -> None:
        move = await begun(registry)
        with pytest.raises(errors.InvalidRequest, match="about to move") as caught:
            await registry.retire(AdapterRef(BASE, NAME, 2))
        assert caught.value.reason == "pending"
        await registry.fail_move(BASE, NAME, "production", move.id, "no")
        await registry.retire(AdapterRef(BASE, NAME, 2))

    async def test_the_first_move_of_an_alias(self, registry: Registry) -> None:
        head = await registry.begin_move(BASE, NAME, "canary", 2, min_ready=1, timeout_s=5)
        assert "canary" not in head.aliases
        head = await registry.finish_move(BASE, NAME, "canary", head.pending["canary"].id, note="no replica was live")
        assert (head.aliases["canary"], head.history[-1].message) == (2, "no replica was live")

    async def test_what_can_not_be_promoted_is_not_begun(self, registry: Registry) -> None:
        await registry.retire(AdapterRef(BASE, NAME, 3))
        await registry.protect(BASE, NAME, "production")
        for version, error in ((9, errors.ModelNotFound), (3, errors.VersionRetired), (2, errors.Forbidden)):
            with pytest.raises(error):
                await begun(registry, version)
        with pytest.raises(errors.InvalidRequest):
            await registry.begin_move(BASE, NAME, "latest", 2, min_ready=None, timeout_s=5)
        assert (await begun(registry, unlock=True)).version == 2

    async def test_gateways_that_finish_at_once_move_it_once(
        self, registry: Registry, store_settings: StoreSettings, store_kind: str
    ) -> None:
        move = await begun(registry)
        registries = several(store_settings, store_kind)
        await asyncio.gather(*(one.take_move(BASE, NAME, "production", move.id, str(i)) for i, one in enumerate(registries)))
        heads = await asyncio.gather(*(one.finish_move(BASE, NAME, "production", move.id) for one in registries))
        assert {head.aliases["production"] for head in heads} == {2}
        assert ends(await registry.head(BASE, NAME), move) == ["promote"]
        await check_row(registry)

    async def test_finish_against_fail_one_of_them_holds(self, registry: Registry, store_settings: StoreSettings) -> None:
        move = await begun(registry)
        finishing, failing = (Registry(open_store(store_settings)) for _ in range(2))
        results = await asyncio.gather(
            finishing.finish_move(BASE, NAME, "production", move.id),
            failing.fail_move(BASE, NAME, "production", move.id, "the time ran out"),
            return_exceptions=True,
        )
        head = await registry.head(BASE, NAME)
        [end] = ends(head, move)
        assert head.aliases["production"] == (2 if end == "promote" else 1)
        assert [type(result).__name__ for result in results] == (
            ["Head", "VersionConflict"] if end == "promote" else ["VersionConflict", "Head"]
        )

    async def test_begin_against_an_immediate_promotion_leaves_what_came_last(
        self, registry: Registry, store_settings: StoreSettings
    ) -> None:
        one, other = (Registry(open_store(store_settings)) for _ in range(2))
        await asyncio.gather(
            one.begin_move(BASE, NAME, "production", 2, min_ready=None, timeout_s=60), other.promote(BASE, NAME, "production", 3)
        )
        head = await registry.head(BASE, NAME)
        assert head.aliases == {"production": 3}
        assert [row.kind for row in head.history[1:]] in (["promote"], ["promote_failed", "promote"])
        assert ("production" in head.pending) == (len(head.history) == 2)
        await check_row(registry)

    async def test_two_who_begin_different_moves_end_with_one_pending(
        self, registry: Registry, store_settings: StoreSettings
    ) -> None:
        one, other = (Registry(open_store(store_settings)) for _ in range(2))
        await asyncio.gather(begun(one, 2), begun(other, 3))
        head = await registry.head(BASE, NAME)
        assert len(head.pending) == 1 and [row.kind for row in head.history] == ["promote", "promote_failed"]
        told = {head.pending["production"].version, int(head.history[-1].message.split(":")[0].removeprefix("version "))}
        assert told == {2, 3}


class TestDeathBetweenHeadAndIndex:
    """The head says it, the index does not yet: a sweep or the same call again brings it to the views."""

    @pytest.mark.parametrize("step", ["pin", "begin", "finish"])
    async def test_a_sweep_tells_the_views(self, registry: Registry, step: str) -> None:
        view = RegistryView(registry, 1.0)
        await self.die(registry, step)
        await view.refresh()
        assert view.entry(BASE, NAME).revision < (await registry.head(BASE, NAME)).revision
        assert (await registry.sweep()).repaired == (f"{BASE}:{NAME}",)
        await view.refresh()
        head, row = await registry.head(BASE, NAME), view.entry(BASE, NAME)
        assert (row.directives, row.pending, row.aliases) == (head.directives, head.pending, head.aliases)

    @pytest.mark.parametrize("step", ["pin", "begin"])
    async def test_the_same_call_again_tells_them_too(self, registry: Registry, step: str) -> None:
        await self.die(registry, step)
        head = await registry.head(BASE, NAME)
        await self.steps(registry)[step]()
        assert await registry.head(BASE, NAME) == head
        await check_row(registry)

    async def die(self, registry: Registry, step: str) -> None:
        if step == "finish":
            await begun(registry)
        dying = Registry(DyingStore(registry.store, 2, after=False, error=Crash()))
        with pytest.raises(Crash):
            await self.steps(dying)[step]()

    def steps(self, registry: Registry) -> dict[str, Callable[[], Awaitable[object]]]:
        async def finish() -> Head:
            move = (await registry.head(BASE, NAME)).pending["production"]
            return await registry.finish_move(BASE, NAME, "production", move.id)

        pin = Directive("2", "engine", True)
        return {"pin": lambda: registry.direct(BASE, NAME, pin), "begin": lambda: begun(registry), "finish": finish}


class TestLostAnswers:
    """The proxy lets the server work and hides the answer."""

    async def test_of_each_step_of_a_move(self, seaweed: Seaweed, s3_settings: StoreSettings) -> None:
        registry = Registry(open_store(s3_settings))
        for content in "ab":
            await registry.publish(BASE, NAME, prepared(content))
        seaweed.proxy.lose_answer_next(method="PUT", contains="head.json")
        move = await begun(registry)
        seaweed.proxy.lose_answer_next(method="PUT", contains="head.json")
        await registry.take_move(BASE, NAME, "production", move.id, "gateway-1")
        seaweed.proxy.lose_answer_next(method="PUT", contains="head.json")
        head = await registry.finish_move(BASE, NAME, "production", move.id)
        assert (head.revision, head.aliases, len(head.history)) == (4, {"production": 2}, 1)

    async def test_of_a_pin(self, seaweed: Seaweed, s3_settings: StoreSettings) -> None:
        registry = Registry(open_store(s3_settings))
        await registry.publish(BASE, NAME, prepared())
        seaweed.proxy.lose_answer_next(method="PUT", contains="head.json")
        seaweed.proxy.lose_answer_next(method="PUT", contains="index/")
        head = await registry.direct(BASE, NAME, Directive("1", "engine", True))
        assert (head.revision, len(head.directives)) == (2, 1)
        await check_row(registry)
        assert [row.key async for row in registry.store.list(layout.INDEX)]
