"""Moves that wait, in every order of several gateways' calls, and with deaths at any write."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from adapters import errors
from adapters.names import AdapterRef
from adapters.registry import Registry, codec
from adapters.registry.promotion import outcome
from adapters.registry.view import RegistryView
from adapters.types import By, Directive, Head
from tests.fake_store import FakeStore
from tests.prepared import prepared
from tests.turns import Turns, TurnStore
from tests.unit.adapters.test_registry_crash import LosingStore, Work, check_index_is_true, crash_at_each_write, two_versions

BASE, NAME = "Qwen/Qwen3-0.6B", "maze"
DIRECTED = Path(__file__).parents[2] / "data" / "registry-v1-directives"


async def waiting(registry: Registry) -> None:
    """Two versions; `production` names the first and is to move to the second."""
    await two_versions(registry)
    await begin(registry)


async def begin(registry: Registry, version: int = 2) -> Head:
    return await registry.begin_move(BASE, NAME, "production", version, By("ann"), min_ready=None, timeout_s=60)


async def move_id(registry: Registry) -> str:
    return (await registry.head(BASE, NAME)).pending["production"].id


def kinds(head: Head, move: str) -> list[str]:
    return [row.kind for row in head.history if row.move_id == move]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
class TestDeath:
    """Whoever looks next repairs what a process left that died at any of its writes."""

    async def check(self, after: bool, prepare: Work, work: Work) -> None:
        async for store in crash_at_each_write(prepare, work, after):
            registry = Registry(store)
            await registry.sweep()
            await check_index_is_true(store)
            await work(registry)
            await check_index_is_true(store)

    async def test_of_one_who_pins(self, after: bool) -> None:
        await self.check(after, two_versions, lambda r: r.direct(BASE, NAME, Directive("2", "engine", True)))

    async def test_of_one_who_unpins(self, after: bool) -> None:
        async def pinned(registry: Registry) -> None:
            await two_versions(registry)
            await registry.direct(BASE, NAME, Directive("2", "engine", True))

        await self.check(after, pinned, lambda r: r.undirect(BASE, NAME, "2"))

    async def test_of_one_who_begins(self, after: bool) -> None:
        await self.check(after, two_versions, begin)

    async def test_of_the_gateway_that_finishes_and_another_completes(self, after: bool) -> None:
        moves: list[str] = []

        async def work(registry: Registry) -> None:
            head = await registry.head(BASE, NAME)
            if "production" in head.pending:
                moves.append(head.pending["production"].id)
            head = await registry.finish_move(BASE, NAME, "production", moves[-1])
            assert (head.aliases, kinds(head, moves[-1])) == ({"production": 2}, ["promote"])

        await self.check(after, waiting, work)


Step = Callable[[Registry, str], Awaitable[Head]]


async def played(seed: int, **steps: Step) -> tuple[Head, dict[str, object]]:
    """The head after `steps` about the pending move, each of a process of its own, took turns in an order drawn from `seed`."""
    store, turns = FakeStore(), Turns(seed)
    await waiting(Registry(store))
    await Registry(store).publish(BASE, NAME, prepared("three"))
    move = await move_id(Registry(store))
    results = await turns.play({name: step(Registry(TurnStore(store, turns, name)), move) for name, step in steps.items()})
    await check_index_is_true(store)
    return await Registry(store).head(BASE, NAME), results


async def finish(registry: Registry, move: str) -> Head:
    return await registry.finish_move(BASE, NAME, "production", move)


async def fail(registry: Registry, move: str) -> Head:
    return await registry.fail_move(BASE, NAME, "production", move, "no room")


async def take(registry: Registry, move: str) -> Head:
    return await registry.take_move(BASE, NAME, "production", move, "gateway-1")


async def promote(registry: Registry, move: str) -> Head:
    return await registry.promote(BASE, NAME, "production", 3)


async def begin_other(registry: Registry, move: str) -> Head:
    return await begin(registry, 3)


async def retire(registry: Registry, move: str) -> Head:
    return await registry.retire(AdapterRef(BASE, NAME, 2))


def check_told(results: dict[str, object], end: str) -> None:
    """Who ended the move as it ended was told of success, the other of a conflict."""
    for name, wanted in (("finish", "promote"), ("fail", "promote_failed")):
        assert isinstance(results[name], Head if end == wanted else errors.VersionConflict), (name, results[name])


class TestEveryOrder:
    @pytest.mark.parametrize("seed", range(30))
    async def test_gateways_that_take_and_finish_move_it_once(self, seed: int) -> None:
        head, _ = await played(seed, one=finish, two=finish, three=take)
        assert (head.aliases, head.pending) == ({"production": 2}, {})
        assert [row.kind for row in head.history] == ["promote", "promote"]

    async def test_finish_against_fail_has_one_end(self) -> None:
        ends = set()
        for seed in range(60):
            head, results = await played(seed, finish=finish, fail=fail, take=take)
            [end] = [row.kind for row in head.history if row.move_id]
            assert (head.aliases["production"], head.pending) == (2 if end == "promote" else 1, {})
            check_told(results, end)
            ends.add(end)
        assert ends == {"promote", "promote_failed"}, "the orders tried are all alike"

    async def test_finish_against_an_immediate_promotion_leaves_the_alias_there(self) -> None:
        ends = set()
        for seed in range(60):
            head, results = await played(seed, finish=finish, fail=fail, promote=promote)
            [end] = [row.kind for row in head.history if row.move_id]
            assert (head.aliases, head.pending) == ({"production": 3}, {})
            check_told(results, end)
            ends.add(end)
        assert ends == {"promote", "promote_failed"}, "the orders tried are all alike"

    @pytest.mark.parametrize("seed", range(30))
    async def test_a_version_is_never_retired_under_a_move(self, seed: int) -> None:
        head, results = await played(seed, finish=finish, retire=retire)
        assert (head.aliases, head.retired) == ({"production": 2}, frozenset())
        assert isinstance(results["retire"], errors.InvalidRequest)

    @pytest.mark.parametrize("seed", range(30))
    async def test_whoever_begins_another_move_joins_or_replaces(self, seed: int) -> None:
        head, results = await played(seed, begin=begin_other, again=begin_other, finish=finish)
        assert head.pending["production"].version == 3
        assert len([row for row in head.history if row.move_id]) == 1
        assert isinstance(results["begin"], Head) and isinstance(results["again"], Head)


class TestStoreInTrouble:
    async def test_a_head_that_can_not_be_written_leaves_the_move_pending(self) -> None:
        store = FakeStore()
        await waiting(Registry(store))
        move = await move_id(Registry(store))
        store.fail(errors.StoreThrottled("slow down"), method="replace", key_part="head.json")
        with pytest.raises(errors.StoreThrottled):
            await Registry(store).finish_move(BASE, NAME, "production", move)
        assert (await Registry(store).head(BASE, NAME)).aliases == {"production": 1}
        assert (await Registry(store).finish_move(BASE, NAME, "production", move)).aliases == {"production": 2}

    async def test_an_index_that_can_not_be_written_is_repaired_by_the_next_who_finds_it_done(self) -> None:
        store = FakeStore()
        await waiting(Registry(store))
        move = await move_id(Registry(store))
        store.fail(errors.StoreThrottled("slow down"), method="replace", key_part="index/")
        with pytest.raises(errors.StoreThrottled):
            await Registry(store).finish_move(BASE, NAME, "production", move)
        await Registry(store).finish_move(BASE, NAME, "production", move)
        await check_index_is_true(store)

    async def test_who_lost_the_answer_of_a_begin_learns_that_the_move_failed_meanwhile(self) -> None:
        store = FakeStore()
        await two_versions(Registry(store))
        losing = LosingStore(store, "head.json")

        async def gateway() -> None:
            await fail(Registry(store), await move_id(Registry(store)))

        losing.then = gateway
        with pytest.raises(errors.VersionConflict, match="no room") as caught:
            await begin(Registry(losing))
        assert caught.value.reason == "promote_failed"


class TestTime:
    async def test_expired_directives_vanish_with_the_next_write(self, monkeypatch: pytest.MonkeyPatch) -> None:
        registry = Registry(FakeStore())
        await two_versions(registry)
        await registry.direct(BASE, NAME, Directive("1", "disk", False))
        await registry.direct(BASE, NAME, Directive("2", "disk", True))
        monkeypatch.setattr("adapters.registry.moments.now", lambda: "2126-01-01T00:00:00.000000Z")
        assert len((await registry.head(BASE, NAME)).directives) == 2
        head = await registry.tag(AdapterRef(BASE, NAME, 1), {"a": "b"})
        assert [directive.target for directive in head.directives] == ["2"]

    async def test_a_view_that_is_behind_shows_no_older_pins(self) -> None:
        registry = Registry(FakeStore())
        await two_versions(registry)
        view = RegistryView(registry, 1.0)
        await registry.direct(BASE, NAME, Directive("2", "disk", True))
        await view.refresh()
        row = view.entry(BASE, NAME)
        await registry.undirect(BASE, NAME, "2")
        await view.refresh()
        view._apply([row])
        assert view.entry(BASE, NAME).directives == ()


class TestRecorded:
    """Documents of the release that wrote directives and moves first; they are read for ever."""

    def test_head(self) -> None:
        head = codec.decode_head((DIRECTED / "head.json").read_bytes())
        pin, schedule = head.directives
        assert (pin.target, pin.tier, pin.pin, pin.replicas, pin.who) == ("production", "engine", True, 2, "ann")
        assert (schedule.target, schedule.pin, schedule.every_s) == ("2", False, 86400)
        assert (head.pending["canary"].version, head.pending["canary"].taken_by) == (3, "gateway-1")
        assert outcome(head, "b" * 32).kind == "promote_failed"

    def test_index_shard(self) -> None:
        head = codec.decode_head((DIRECTED / "head.json").read_bytes())
        [row] = codec.decode_entries((DIRECTED / "shard.json").read_bytes())
        assert (row.directives, row.pending) == (head.directives, head.pending)

    @pytest.mark.parametrize("name", ["head", "shard"])
    def test_they_are_as_this_release_writes_them(self, name: str) -> None:
        decode, encode = {
            "head": (codec.decode_head, codec.encode_head),
            "shard": (codec.decode_entries, codec.encode_entries),
        }[name]
        data = (DIRECTED / f"{name}.json").read_bytes()
        assert json.loads(encode(decode(data))) == json.loads(data)

    def test_an_older_release_hands_them_on(self) -> None:
        """What it does not know, it keeps as it is: here the fields are hidden from this one."""
        document = json.loads((DIRECTED / "head.json").read_bytes())
        hidden = {f"{key}_": value for key, value in document.items() if key in ("directives", "pending")}
        old = {key: value for key, value in document.items() if key not in ("directives", "pending")}
        again = json.loads(codec.encode_head(codec.decode_head(json.dumps(old | hidden).encode())))
        assert {key: again[key] for key in hidden} == hidden
