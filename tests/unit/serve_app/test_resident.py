"""A replica's adapters follow the registry: against the real registry, cache and slots, with a scripted engine and store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from adapters import metrics
from adapters.cache import AdapterCache
from adapters.errors import AdapterCorrupt, AdapterIncompatible, AdapterLoading, LoraMuxError, StoreUnreachable
from adapters.names import AdapterRef, parse_model_name
from adapters.registry import Registry
from adapters.registry.view import RegistryView
from adapters.settings import CacheSettings
from adapters.types import By, Directive, ResolvedAdapter
from serve_app.residency import resident as room
from serve_app.residency.resident import Resident, ResidentOptions
from serve_app.slots.engine_slots import EngineSlots
from tests.fake_store import FakeStore
from tests.prepared import prepared
from tests.recorded_meter import RecordedMeter
from tests.scripted_engine import ScriptedEngine

POLL_S = 0.01
BY = By("tests")
PINNED = {"base:n0@1", "base:n1@1"}


class Node:
    """A store with a registry, and a disk that outlives its replicas."""

    def __init__(self, folder: Path, store: FakeStore | None = None) -> None:
        self.folder = folder
        self.store = store or FakeStore()
        self.registry = Registry(self.store)
        self.meter = RecordedMeter()
        self.engine = ScriptedEngine(4)
        self.cache = self._cache()
        self.resident: Resident

    def _cache(self) -> AdapterCache:
        return AdapterCache(self.store, CacheSettings(dir=self.folder / "cache", budget_bytes=1_000_000))

    async def publish(self, name: str, versions: int = 1, promote: int | None = 1) -> None:
        for number in range(1, versions + 1):
            await self.registry.publish("base", name, prepared(f"{name} {number}"))
        if promote:
            await self.registry.promote("base", name, "production", promote)

    async def adapter(self, text: str) -> ResolvedAdapter:
        view = RegistryView(self.registry, 1)
        await view.refresh()
        return view.resolve(parse_model_name(text))

    def replica(self, slots: int = 4, *, publish: bool = False, rank: int = 0, world_size: int = 1) -> Resident:
        """A fresh one, as after a restart: a new engine, an old disk."""
        self.engine = ScriptedEngine(slots)
        self.cache = self._cache()
        options = ResidentOptions("base", self.folder / "cache", POLL_S, prewarm_on_publish=publish)
        places = EngineSlots(self.engine, self.cache, slots, wait_s=1)
        self.resident = Resident(options, self.registry, self.cache, places, rank=rank, world_size=world_size, meter=self.meter)
        return self.resident

    async def request(self, text: str) -> str:
        use = await self.resident.use(await self.adapter(text))
        use.release()
        return use.tier

    def row(self, ref: str) -> dict:
        return self.resident.report()["adapters"].get(ref, {})

    def state(self, ref: str) -> tuple[str, str | None]:
        row = self.row(ref)
        return row.get("state", "unknown"), row.get("reason")

    def files(self, adapter: ResolvedAdapter) -> Path:
        return self.folder / "cache" / adapter.digest


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    node.replica()
    yield node
    await node.resident.close()


async def until(holds: Callable[[], object], what: str = "") -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


def pin(target: str = "production", tier: str = "engine", **fields) -> Directive:
    return Directive(target=target, tier=tier, pin=True, **fields)


def prewarm(target: str = "production", tier: str = "engine", **fields) -> Directive:
    return Directive(target=target, tier=tier, pin=False, **fields)


class TestPins:
    async def test_a_pinned_adapter_is_in_the_engine_before_anybody_asks(self, node: Node) -> None:
        await node.publish("maze")
        await node.resident.start(0)
        await node.registry.direct("base", "maze", pin(), BY)
        await until(lambda: node.state("base:maze@1") == ("ready", None))
        assert node.row("base:maze@1")["tier"] == "engine"
        assert node.row("base:maze@1")["pinned"]
        assert await node.request("base:maze") == "engine"

    async def test_others_come_and_go_but_a_pinned_one_stays(self, node: Node) -> None:
        for name in "abcdef":
            await node.publish(name)
        await node.registry.direct("base", "a", pin(), BY)
        await node.resident.start(5)
        for _ in range(2):
            for name in "bcdef":
                await node.request(f"base:{name}")
        assert AdapterRef("base", "a", 1) not in node.engine.removals
        assert len(node.engine.removals) > 0

    async def test_an_unpinned_one_may_go_again(self, node: Node) -> None:
        for name in "abcde":
            await node.publish(name)
        await node.registry.direct("base", "a", pin(), BY)
        await node.resident.start(5)
        await node.registry.undirect("base", "a", "production", BY)
        await until(lambda: not node.row("base:a@1")["pinned"])
        for _ in range(3):
            for name in "bcde":
                await node.request(f"base:{name}")
        assert "base:a@1" not in node.engine.refs()

    async def test_a_pin_follows_its_alias(self, node: Node) -> None:
        await node.publish("maze", versions=2)
        await node.registry.direct("base", "maze", pin(), BY)
        await node.resident.start(5)
        await node.registry.promote("base", "maze", "production", 2)
        await until(lambda: node.row("base:maze@2").get("pinned") and node.state("base:maze@2") == ("ready", None))
        await until(lambda: not node.row("base:maze@1")["pinned"])

    async def test_a_pin_too_many_waits_on_the_disk_and_says_so(self, node: Node) -> None:
        for name in "abcd":
            await node.publish(name)
            await node.registry.direct("base", name, pin(), BY)
        await node.resident.start(5)
        assert node.engine.refs() == {"base:a@1", "base:b@1", "base:c@1"}
        assert node.state("base:d@1") == ("failed", "too_many_pins")
        assert node.row("base:d@1")["tier"] == "disk"

    async def test_a_pin_on_the_disk_survives_a_full_cache(self, node: Node) -> None:
        await node.publish("kept")
        await node.registry.direct("base", "kept", pin(tier="disk"), BY)
        await node.resident.start(5)
        await node.cache.remove((await node.adapter("base:kept")).digest)
        assert node.state("base:kept@1") == ("ready", None)
        assert node.row("base:kept@1") | {"size_bytes": 0} == {
            "tier": "disk",
            "users": 0,
            "pinned": True,
            "state": "ready",
            "reason": None,
            "move_id": None,
            "size_bytes": 0,
        }
        assert node.engine.loads == []

    async def test_one_whose_files_are_taken_away_comes_back_to_the_disk(self, node: Node) -> None:
        await node.publish("kept")
        await node.registry.direct("base", "kept", pin(tier="disk"), BY)
        await node.resident.start(5)
        files = node.files(await node.adapter("base:kept"))
        for file in files.iterdir():
            file.unlink()
        files.rmdir()
        await until(files.exists)


class TestPrewarms:
    async def test_it_is_brought_once_and_competes_like_any_other_then(self, node: Node) -> None:
        for name in "abcde":
            await node.publish(name)
        await node.registry.direct("base", "a", prewarm(), BY)
        await node.resident.start(5)
        assert node.engine.refs() == {"base:a@1"}
        for _ in range(3):
            for name in "bcde":
                await node.request(f"base:{name}")
        await asyncio.sleep(5 * POLL_S)
        assert node.engine.loads.count(AdapterRef("base", "a", 1)) == 1
        assert node.state("base:a@1") == ("ready", None)

    async def test_one_to_the_disk_loads_nothing(self, node: Node) -> None:
        await node.publish("maze")
        await node.registry.direct("base", "maze", prewarm(tier="disk"), BY)
        await node.resident.start(5)
        assert node.row("base:maze@1")["tier"] == "disk"
        assert node.engine.loads == []

    async def test_what_the_router_sees_waiting_is_brought(self, node: Node) -> None:
        await node.publish("maze")
        await node.resident.start(0)
        await node.resident.prewarm(await node.adapter("base:maze"), "disk")
        assert node.row("base:maze@1")["tier"] == "disk"
        await node.resident.prewarm(await node.adapter("base:maze"), "engine")
        assert node.engine.refs() == {"base:maze@1"}

    async def test_a_version_that_is_published_comes_to_the_disk(self, node: Node) -> None:
        await node.resident.close()
        await node.replica(publish=True).start(5)
        await node.publish("new")
        new = await node.adapter("base:new")
        await until(node.files(new).exists)
        await until(node.resident._follower.is_idle)
        assert node.engine.loads == []

    async def test_what_was_brought_to_the_disk_and_never_used_is_in_the_report(self, node: Node) -> None:
        await node.resident.close()
        await node.replica(publish=True).start(5)
        await node.publish("new")
        await until(lambda: node.row("base:new@1").get("tier") == "disk")
        await until(lambda: not node.resident._follower.accounts())
        assert node.row("base:new@1")["tier"] == "disk"

    async def test_what_was_published_long_ago_stays_where_it_is(self, node: Node) -> None:
        await node.resident.close()
        await node.publish("old")
        resident = node.replica(publish=True)
        resident._now_s = lambda: time.time() + 3600
        await resident.start(5)
        await asyncio.sleep(5 * POLL_S)
        assert not node.files(await node.adapter("base:old")).exists()


class TestPromotions:
    async def begin(self, node: Node, version: int = 2) -> str:
        head = await node.registry.begin_move("base", "maze", "production", version, BY, min_ready=None, timeout_s=30)
        return head.pending["production"].id

    async def test_the_new_version_is_warm_and_held_before_the_alias_moves(self, node: Node) -> None:
        await node.publish("maze", versions=2)
        await node.resident.start(5)
        await node.request("base:maze")
        move_id = await self.begin(node)
        await until(lambda: node.state("base:maze@2") == ("ready", None))
        row = node.row("base:maze@2")
        assert (row["tier"], row["pinned"], row["move_id"]) == ("engine", True, move_id)

    async def test_its_slot_is_held_a_while_after_the_move(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        await node.publish("maze", versions=2)
        await node.resident.start(5)
        move_id = await self.begin(node)
        await until(lambda: node.state("base:maze@2") == ("ready", None))
        await node.registry.finish_move("base", "maze", "production", move_id)
        await until(lambda: node.row("base:maze@2")["move_id"] is None)
        assert node.row("base:maze@2")["pinned"]
        await until(lambda: not node.row("base:maze@2")["pinned"])

    async def test_a_version_that_cannot_be_loaded_is_told_with_the_reason(self, node: Node) -> None:
        await node.publish("maze", versions=2)
        node.engine.failing = {AdapterRef("base", "maze", 2)}
        await node.resident.start(5)
        move_id = await self.begin(node)
        await until(lambda: node.state("base:maze@2") == ("failed", "engine_refused"))
        assert node.row("base:maze@2")["move_id"] == move_id
        assert await node.request("base:maze") in ("remote", "disk")

    async def test_another_try_forgets_the_failure_of_the_last_one(self, node: Node) -> None:
        await node.publish("maze", versions=2)
        node.engine.failing = {AdapterRef("base", "maze", 2)}
        await node.resident.start(5)
        move_id = await self.begin(node)
        await until(lambda: node.state("base:maze@2")[0] == "failed")
        await node.registry.fail_move("base", "maze", "production", move_id, "engine_refused")
        node.engine.failing = set()
        await self.begin(node)
        await until(lambda: node.state("base:maze@2") == ("ready", None))

    async def test_store_trouble_is_told_as_loading_and_tried_again(self, node: Node) -> None:
        await node.publish("maze", versions=2)
        await node.resident.start(5)
        node.store.fail(StoreUnreachable("down"), method="get_range", times=2)
        await self.begin(node)
        await until(lambda: node.state("base:maze@2") == ("loading", "unreachable"))
        await until(lambda: node.state("base:maze@2") == ("ready", None))


class TestSeveralReplicas:
    """Three nodes with a replica each, over one registry."""

    @pytest.fixture
    async def nodes(self, tmp_path: Path) -> AsyncIterator[list[Node]]:
        store = FakeStore()
        nodes = [Node(tmp_path / str(rank), store) for rank in range(3)]
        for rank, node in enumerate(nodes):
            await node.replica(publish=True, rank=rank, world_size=3).start(0)
        yield nodes
        for node in nodes:
            await node.resident.close()

    def holders(self, nodes: list[Node], ref: str, tier: str = "engine") -> int:
        return [(node.row(ref).get("tier"), node.row(ref).get("state")) for node in nodes].count((tier, "ready"))

    async def test_a_publication_is_fetched_by_one_of_them(self, nodes: list[Node]) -> None:
        await nodes[0].publish("maze")
        files = (await nodes[0].adapter("base:maze")).digest
        await until(lambda: any((node.folder / "cache" / files).exists() for node in nodes))
        await asyncio.sleep(10 * POLL_S)
        assert [(node.folder / "cache" / files).exists() for node in nodes].count(True) == 1

    async def test_a_pin_for_two_is_held_by_two(self, nodes: list[Node]) -> None:
        await nodes[0].publish("maze")
        await nodes[0].registry.direct("base", "maze", pin(replicas=2), BY)
        await until(lambda: self.holders(nodes, "base:maze@1") == 2)
        await asyncio.sleep(10 * POLL_S)
        assert self.holders(nodes, "base:maze@1") == 2

    async def test_a_promotion_warms_where_the_old_version_is(self, nodes: list[Node]) -> None:
        await nodes[0].publish("maze", versions=2)
        for node in nodes:
            await node.request("base:maze@1")
        await nodes[0].registry.begin_move("base", "maze", "production", 2, BY, min_ready=None, timeout_s=30)
        await until(lambda: self.holders(nodes, "base:maze@2") == 3)

    async def test_a_replica_that_takes_the_place_of_another_takes_its_pins(self, nodes: list[Node]) -> None:
        await nodes[0].publish("maze")
        await nodes[0].registry.direct("base", "maze", pin(replicas=1), BY)
        await until(lambda: self.holders(nodes, "base:maze@1") == 1)
        rank = next(rank for rank, node in enumerate(nodes) if node.row("base:maze@1").get("pinned"))
        await nodes[rank].resident.close()
        await nodes[rank].replica(rank=rank, world_size=3).start(5)
        assert nodes[rank].row("base:maze@1")["pinned"]


def rot(path: Path, content: bytes) -> None:
    """Damage as a failing disk does it: nobody wrote to the file."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class TestFailures:
    async def test_a_wish_that_fails_disturbs_no_other(self, node: Node) -> None:
        for name in ("bad", "good"):
            await node.publish(name)
            await node.registry.direct("base", name, pin(), BY)
        node.engine.failing = {AdapterRef("base", "bad", 1)}
        await node.resident.start(5)
        assert node.state("base:bad@1") == ("failed", "engine_refused")
        assert node.state("base:good@1") == ("ready", None)
        await asyncio.sleep(10 * POLL_S)
        assert node.engine.loads.count(AdapterRef("base", "bad", 1)) == 1, "it is not tried again at once"

    async def test_a_rank_over_the_engines_limit_is_refused_without_a_fetch(self, node: Node) -> None:
        await node.publish("maze")
        node.resident._options = replace(node.resident._options, max_rank=4)
        with pytest.raises(AdapterIncompatible) as caught:
            await node.request("base:maze")
        assert (caught.value.reason, caught.value.limit, caught.value.value) == ("rank_too_large", 4, 8)
        assert not node.files(await node.adapter("base:maze")).exists()

    async def test_a_wish_is_tried_again_when_its_trouble_may_be_over(self, node: Node) -> None:
        await node.publish("maze")
        node.store.fail(StoreUnreachable("down"), method="get_range", times=2)
        await node.resident.start(0)
        await node.registry.direct("base", "maze", pin(tier="disk"), BY)
        await until(lambda: node.state("base:maze@1") == ("loading", "unreachable"))
        await until(lambda: node.state("base:maze@1") == ("ready", None))

    async def test_a_slow_store_keeps_nothing_on_the_disk_from_the_engine(self, node: Node) -> None:
        for name in ("here", *(f"far{number}" for number in range(8))):
            await node.publish(name)
        await node.resident.start(0)
        await node.request("base:here")
        await node.resident.evict(AdapterRef("base", "here", 1), "disk")
        fetch, node.cache._fetch = node.cache._fetch, lambda *_: asyncio.sleep(60)
        for number in range(8):
            await node.registry.direct("base", f"far{number}", prewarm(), BY)
        await until(lambda: node.state("base:far0@1") == ("loading", None))
        await node.registry.direct("base", "here", pin(), BY)
        await until(lambda: node.state("base:here@1") == ("ready", None))
        node.cache._fetch = fetch

    async def test_a_promotion_waits_behind_no_other_wish(self, node: Node) -> None:
        for name in "abc":
            await node.publish(name)
        await node.publish("maze", versions=2)
        await node.resident.start(0)
        await node.request("base:maze@2")
        await node.resident.evict(AdapterRef("base", "maze", 2), "disk")
        node.engine.gate = asyncio.Event()  # a load that never ends
        await node.registry.direct("base", "a", prewarm(), BY)
        await until(lambda: node.resident.stats()["loading"] == ["base:a@1"])
        await node.registry.begin_move("base", "maze", "production", 2, BY, min_ready=None, timeout_s=30)
        await until(lambda: "base:maze@2" in node.resident.stats()["loading"])
        node.engine.gate.set()

    async def test_a_promotion_gets_its_slot_under_thrash(self, node: Node) -> None:
        for name in "abcdefgh":
            await node.publish(name)
        await node.publish("maze", versions=2)
        await node.resident.start(0)
        stop = asyncio.Event()

        async def steady(name: str) -> None:
            while not stop.is_set():
                use = await node.resident.use(await node.adapter(f"base:{name}"))
                await asyncio.sleep(0.002)
                use.release()

        busy = [asyncio.create_task(steady(name)) for name in "abcdefgh"]
        await node.registry.begin_move("base", "maze", "production", 2, BY, min_ready=None, timeout_s=30)
        await until(lambda: node.state("base:maze@2") == ("ready", None))
        await asyncio.sleep(0.1)
        assert node.row("base:maze@2")["tier"] == "engine"
        stop.set()
        await asyncio.gather(*busy)

    async def test_files_that_were_damaged_on_the_disk_are_fetched_again_once(self, node: Node) -> None:
        await node.publish("maze")
        await node.resident.start(0)
        adapter = await node.adapter("base:maze")
        await node.request("base:maze")
        await node.resident.evict(adapter.ref, "disk")
        damaged = b"x" * adapter.files[-1].size_bytes
        rot(node.files(adapter) / "adapter_model.safetensors", damaged)
        node.engine.broken = {damaged}
        tiers = await asyncio.gather(*(node.request("base:maze") for _ in range(8)))
        assert set(tiers) <= {"disk", "engine"}
        assert len(node.engine.loads) == 3, "the first load, the refused one, the one that was mended"

    async def test_files_that_are_damaged_again_are_fetched_again(self, node: Node) -> None:
        await node.publish("maze")
        await node.resident.start(0)
        adapter = await node.adapter("base:maze")
        damaged = b"x" * adapter.files[-1].size_bytes
        node.engine.broken = {damaged}
        for _ in range(3):
            await node.request("base:maze")
            await node.resident.evict(adapter.ref, "disk")
            rot(node.files(adapter) / "adapter_model.safetensors", damaged)
        await node.request("base:maze")

    async def test_damaged_files_are_fetched_again_also_where_nobody_waits(self, node: Node) -> None:
        await node.publish("maze")
        await node.resident.start(0)
        adapter = await node.adapter("base:maze")
        await node.request("base:maze")
        await node.resident.evict(adapter.ref, "disk")
        damaged = b"x" * adapter.files[-1].size_bytes
        rot(node.files(adapter) / "adapter_model.safetensors", damaged)
        node.engine.broken = {damaged}
        for _ in range(2):  # the load of the first is refused, that of the second finds whole files
            with pytest.raises(AdapterLoading):
                await node.resident.use(adapter, wait=False)
            await until(lambda: not node.resident.stats()["loading"])
        (await node.resident.use(adapter, wait=False)).release()

    async def test_files_that_are_damaged_in_the_store_as_well_are_told_as_corrupt(self, node: Node) -> None:
        await node.publish("maze")
        await node.resident.start(0)
        adapter = await node.adapter("base:maze")
        await node.request("base:maze")
        await node.resident.evict(adapter.ref, "disk")
        damaged = b"x" * adapter.files[-1].size_bytes
        rot(node.files(adapter) / "adapter_model.safetensors", damaged)
        await node.store.delete(f"blobs/{adapter.digest}/adapter_model.safetensors")
        node.engine.broken = {damaged}
        with pytest.raises(AdapterCorrupt):
            await node.request("base:maze")

    async def test_an_adapter_that_is_refused_with_sound_files_is_not_read_again_each_time(self, node: Node) -> None:
        await node.publish("maze")
        node.engine.failing = {AdapterRef("base", "maze", 1)}
        await node.resident.start(0)
        looks = 0
        verify = node.cache.verify

        async def counted(adapter: ResolvedAdapter) -> bool:
            nonlocal looks
            looks += 1
            return await verify(adapter)

        node.cache.verify = counted
        for _ in range(5):
            with pytest.raises(AdapterIncompatible):
                await node.request("base:maze")
        assert looks == 1


class TestRestarts:
    async def test_the_busiest_adapters_of_the_last_run_come_back_from_the_disk(self, node: Node) -> None:
        for name in "abcdef":
            await node.publish(name)
        await node.resident.start(0)
        for name, uses in zip("abcdef", (9, 1, 8, 1, 7, 6), strict=True):
            for _ in range(uses):
                await node.request(f"base:{name}")
        await node.resident.close()
        reads = sum(count for (method, _), count in node.store.calls.items() if method == "get_range")
        await node.replica().start(5)
        assert node.engine.refs() == {"base:a@1", "base:c@1", "base:e@1", "base:f@1"}
        assert sum(count for (method, _), count in node.store.calls.items() if method == "get_range") == reads

    async def test_one_that_was_retired_meanwhile_does_not_come_back(self, node: Node) -> None:
        await node.publish("maze", versions=2, promote=2)
        await node.resident.start(0)
        await node.request("base:maze@1")
        await node.request("base:maze@2")
        await node.registry.retire(AdapterRef("base", "maze", 1), BY)
        await node.resident.close()
        await node.replica().start(5)
        await until(lambda: node.row("base:maze@2").get("tier") == "engine")
        await asyncio.sleep(5 * POLL_S)
        assert node.row("base:maze@1")["tier"] == "disk"

    async def test_they_come_back_also_while_the_store_is_gone(self, node: Node) -> None:
        await node.publish("maze")
        await node.resident.start(0)
        await node.request("base:maze")
        await node.resident.close()
        node.store.fail(StoreUnreachable("down"), times=float("inf"))
        await node.replica().start(5)
        assert node.engine.refs() == {"base:maze@1"}

    async def test_what_is_pinned_goes_before_what_was_busy(self, node: Node) -> None:
        for name in "abc":
            await node.publish(name)
        await node.resident.start(0)
        await node.request("base:b")
        await node.request("base:c")
        await node.registry.direct("base", "a", pin(), BY)
        await node.resident.close()
        await node.replica(slots=2).start(5)
        assert "base:a@1" in node.engine.refs()
        assert node.row("base:a@1")["pinned"]

    async def test_a_start_waits_no_longer_than_its_budget(self, node: Node) -> None:
        await node.publish("maze")
        await node.registry.direct("base", "maze", pin(), BY)
        node.engine.gate = asyncio.Event()
        await asyncio.wait_for(node.resident.start(0.05), 2)
        assert node.state("base:maze@1") == ("loading", None)
        node.engine.gate.set()
        await until(lambda: node.state("base:maze@1") == ("ready", None))

    async def test_a_damaged_usage_file_is_as_none(self, node: Node) -> None:
        folder = node.folder / "cache" / ".usage"
        folder.mkdir(parents=True)
        (folder / "base.0.json").write_text('{"schema_version": 1, "adapters": [{"ref": 3}]}')
        await node.resident.start(5)
        assert node.engine.loads == []


class TestEviction:
    @pytest.fixture(autouse=True)
    async def loaded(self, node: Node) -> None:
        await node.publish("maze")
        await node.resident.start(0)
        await node.request("base:maze")

    async def test_to_the_disk(self, node: Node) -> None:
        assert await node.resident.evict(AdapterRef("base", "maze", 1), "disk") == {"tier": "disk", "reason": None}
        assert node.engine.refs() == set()
        assert await node.request("base:maze") == "disk"

    async def test_to_the_store(self, node: Node) -> None:
        assert await node.resident.evict(AdapterRef("base", "maze", 1), "remote") == {"tier": "remote", "reason": None}
        assert await node.request("base:maze") == "remote"

    async def test_one_in_use_stays_and_is_told(self, node: Node) -> None:
        use = await node.resident.use(await node.adapter("base:maze"))
        assert await node.resident.evict(AdapterRef("base", "maze", 1), "remote") == {"tier": "engine", "reason": "in_use"}
        use.release()

    async def test_a_pinned_one_stays_and_is_told(self, node: Node) -> None:
        await node.registry.direct("base", "maze", pin(), BY)
        await until(lambda: node.row("base:maze@1")["pinned"])
        assert await node.resident.evict(AdapterRef("base", "maze", 1), "disk") == {"tier": "engine", "reason": "pinned"}

    async def test_one_that_is_nowhere_is_no_trouble(self, node: Node) -> None:
        assert await node.resident.evict(AdapterRef("base", "ghost", 1), "remote") == {"tier": "remote", "reason": None}


class TestTelling:
    async def test_the_router_hears_what_is_in_the_engine_and_what_is_on_its_way(self, node: Node) -> None:
        for name in "ba":
            await node.publish(name)
        await node.resident.start(0)
        await node.request("base:b")
        node.engine.gate = asyncio.Event()
        waiting = asyncio.create_task(node.request("base:a"))
        await until(lambda: node.resident.stats()["loading"])
        assert node.resident.stats() == {"rank": 0, "slots": 4, "engine": ["base:b@1"], "loading": ["base:a@1"]}
        node.engine.gate.set()
        await waiting
        assert node.resident.stats()["engine"] == ["base:a@1", "base:b@1"]

    async def test_another_rank_follows_other_directives(self, node: Node) -> None:
        await node.publish("maze")
        await node.registry.direct("base", "maze", pin(replicas=1), BY)
        await node.resident.start(5)
        held = []
        for rank in range(3):
            node.resident.set_rank(rank, 3)
            await asyncio.sleep(5 * POLL_S)
            held.append(node.row("base:maze@1")["pinned"])
        assert held.count(True) == 1

    async def test_how_much_is_where_is_measured(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(room, "GAUGES_EVERY_S", POLL_S)
        await node.publish("maze")
        await node.registry.direct("base", "maze", pin(), BY)
        await node.resident.start(5)
        await until(lambda: node.meter.gauge(metrics.RESIDENT, tier="disk") == 1)
        assert node.meter.gauge(metrics.RESIDENT, tier="engine") == 1
        assert (node.meter.gauge(metrics.SLOTS), node.meter.gauge(metrics.SLOTS_HELD)) == (4, 1)
        assert node.meter.gauge(metrics.CACHE_BYTES) == (await node.adapter("base:maze")).size_bytes


async def some_change(node: Node, rng: random.Random, name: str, ref: AdapterRef) -> None:
    match rng.randrange(5):
        case 0:
            await node.registry.direct("base", name, pin(tier=rng.choice(["engine", "disk"])), BY)
        case 1:
            await node.registry.direct("base", name, prewarm(rng.choice("12")), BY)
        case 2:
            await node.registry.undirect("base", name, "production", BY)
        case 3:
            await node.registry.promote("base", name, "production", rng.choice([1, 2]))
        case 4:
            await node.resident.evict(ref, rng.choice(["disk", "remote"]))


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_is_asked_and_whatever_fails_what_is_held_is_what_is_wished_for(node: Node, seed: int) -> None:
    rng = random.Random(seed)
    names = [f"n{number}" for number in range(7)]
    for name in names:
        await node.publish(name, versions=2)
    adapters = [await node.adapter(f"base:{name}@{version}") for name in names for version in (1, 2)]
    node.engine.failing = {AdapterRef("base", "n3", 2)}
    await node.resident.start(0)

    async def ask(adapter: ResolvedAdapter) -> None:
        with contextlib.suppress(LoraMuxError):
            use = await node.resident.use(adapter, wait=rng.random() < 0.8)
            await asyncio.sleep(rng.random() * 0.005)
            use.release()

    requests = []
    for _ in range(80):
        name = rng.choice(names)
        requests += [asyncio.create_task(ask(rng.choice(adapters))) for _ in range(3)]
        if rng.random() < 0.3:
            node.store.fail(StoreUnreachable("down"), method="get_range", times=2)
        await some_change(node, rng, name, rng.choice(adapters).ref)
    await asyncio.gather(*requests)
    node.store.heal()
    for name in names:
        await node.registry.undirect("base", name, "production", BY)
    for name in names[:2]:
        await node.registry.promote("base", name, "production", 1)
        await node.registry.direct("base", name, pin(), BY)
    await until(lambda: [node.state(f"base:{name}@1") for name in names[:2]] == [("ready", None)] * 2)
    await until(lambda: {ref for ref, row in node.resident.report()["adapters"].items() if row["pinned"]} == PINNED)
    await until(lambda: node.resident.stats()["loading"] == [])
    assert set(node.resident.report()["int_ids"]) == set(node.engine.loaded)
    assert node.engine.refs() >= PINNED


async def test_a_replica_that_ends_in_the_middle_of_a_load_leaves_nothing_leased(node: Node) -> None:
    await node.publish("maze")
    await node.registry.direct("base", "maze", pin(tier="disk"), BY)
    node.store.gate = asyncio.Event()
    starting = asyncio.create_task(node.resident.start(5))
    await asyncio.sleep(5 * POLL_S)
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    await node.resident.close()
    node.store.gate.set()
    await node.replica().start(5)
    assert node.state("base:maze@1") == ("ready", None)
