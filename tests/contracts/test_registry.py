"""What the registry promises, over memory, a local folder and a real S3 server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from adapters import errors
from adapters.names import AdapterRef, parse_model_name
from adapters.registry import Registry, aliases, layout
from adapters.registry.view import RegistryView
from adapters.settings import StoreSettings
from adapters.store import Store, open_store
from adapters.types import CONFIG_FILE, WEIGHTS_FILE, BaseContract, By, ModuleShape
from tests.fake_store import FakeStore
from tests.prepared import prepared
from tests.seaweed import Seaweed

BASE, NAME = "Qwen/Qwen3-0.6B", "team/maze"


@pytest.fixture
def registry(store: Store) -> Registry:
    return Registry(store)


async def with_versions(registry: Registry, number: int, name: str = NAME) -> None:
    for version in range(1, number + 1):
        await registry.publish(BASE, name, prepared(f"{name}-{version}"))


def several(store_settings: StoreSettings, number: int) -> list[Registry]:
    """Registries of several processes over the same store."""
    return [Registry(open_store(store_settings)) for _ in range(number)]


class TestPublish:
    async def test_the_first_version(self, registry: Registry) -> None:
        done = await registry.publish(
            BASE, NAME, prepared("a"), By("ann", "first"), source={"run": "r1", "step": 3}, metrics={"solved": 1}
        )
        assert (done.ref, done.created, done.retired) == (AdapterRef(BASE, NAME, 1), True, False)
        manifest = await registry.manifest(done.ref)
        assert manifest == done.manifest
        assert (manifest.who, manifest.message, manifest.metrics) == ("ann", "first", {"solved": 1.0})
        assert manifest.size_bytes == len(b"a") + len(b'{"r": 8}')
        head = await registry.head(BASE, NAME)
        assert (head.revision, head.aliases) == (1, {})
        entry = await registry.index.entry(BASE, NAME)
        assert entry is not None and entry.latest == 1 and entry.production is None
        assert entry == await registry.entry(BASE, NAME)

    async def test_the_layout(self, registry: Registry) -> None:
        item = prepared("a")
        await registry.publish(BASE, NAME, item)
        keys = {row.key async for row in registry.store.list("")}
        assert keys == {
            layout.MARKER,
            f"blobs/{item.digest}/{CONFIG_FILE}",
            f"blobs/{item.digest}/{WEIGHTS_FILE}",
            "adapters/Qwen%2FQwen3-0.6B/team/maze/versions/1/manifest.json",
            "adapters/Qwen%2FQwen3-0.6B/team/maze/head.json",
            layout.shard_key(layout.shard_of(BASE, NAME)),
        }
        assert (await registry.store.get(f"blobs/{item.digest}/{WEIGHTS_FILE}")).data == b"a"

    async def test_the_same_content_is_the_same_version(self, registry: Registry) -> None:
        await with_versions(registry, 2)
        again = await registry.publish(BASE, NAME, prepared(f"{NAME}-1"))
        assert (again.ref.version, again.created) == (1, False)
        assert await registry.versions(BASE, NAME) == [1, 2]

    async def test_a_retired_version_says_so(self, registry: Registry) -> None:
        await with_versions(registry, 1)
        await registry.retire(AdapterRef(BASE, NAME, 1))
        again = await registry.publish(BASE, NAME, prepared(f"{NAME}-1"))
        assert (again.created, again.retired) == (False, True)

    async def test_a_large_file_with_progress(self, registry: Registry, tmp_path: Path) -> None:
        item = prepared(b"0123456789abcdef" * 600_000, tmp_path / "weights")
        seen: list[tuple[int, int]] = []
        await registry.publish(BASE, NAME, item, progress=lambda done, total: seen.append((done, total)))
        total = 9_600_000 + 8
        assert seen == sorted(seen) and seen[-1] == (total, total)
        [row] = [row async for row in registry.store.list(layout.blob_key(item.digest, WEIGHTS_FILE))]
        assert row.size_bytes == 9_600_000
        assert await registry.store.get_range(row.key, 9_599_984, 16) == b"0123456789abcdef"

    async def test_a_file_that_changed_is_refused(self, registry: Registry, tmp_path: Path) -> None:
        for size in (100, 3_000_000):
            item = prepared(b"a" * size, tmp_path / "weights")
            (tmp_path / "weights").write_bytes(b"b" * size)
            with pytest.raises(errors.AdapterCorrupt):
                await registry.publish(BASE, NAME, item)
            assert [row.key async for row in registry.store.list(layout.blob_key(item.digest, WEIGHTS_FILE))] == []
        assert await registry.versions(BASE, NAME) == []

    async def test_a_blob_of_the_wrong_size_is_uploaded_again(self, registry: Registry) -> None:
        item = prepared("content")
        await registry.store.put(layout.blob_key(item.digest, WEIGHTS_FILE), b"half")
        await registry.publish(BASE, NAME, item)
        assert (await registry.store.get(layout.blob_key(item.digest, WEIGHTS_FILE))).data == b"content"

    @pytest.mark.parametrize("name", ["versions", "Up", "a/b/c", "team/head.json", "../x", ""])
    async def test_bad_names(self, name: str) -> None:
        with pytest.raises(errors.InvalidRequest):
            await Registry(open_store(StoreSettings(url="memory://"))).publish(BASE, name, prepared())

    async def test_a_metric_must_be_a_number(self) -> None:
        with pytest.raises(errors.InvalidRequest, match="loss"):
            registry = Registry(open_store(StoreSettings(url="memory://")))
            await registry.publish(BASE, NAME, prepared(), metrics={"loss": float("nan")})

    async def test_names_that_look_like_the_layout_do_not_mix(self, registry: Registry) -> None:
        for name in ("team", "team/versions", "versions/7"):
            await registry.publish(BASE, name, prepared("same"))
        assert [await registry.versions(BASE, name) for name in ("team", "team/versions", "versions/7")] == [[1]] * 3
        assert {adapter.name for adapter in await registry.truth.adapters()} == {"team", "team/versions", "versions/7"}


class TestConcurrentPublishers:
    async def test_different_content(self, store_settings: StoreSettings, store_kind: str) -> None:
        number = 3 if store_kind == "s3" else 32
        registries = several(store_settings, number)
        done = await asyncio.gather(*(one.publish(BASE, NAME, prepared(str(i))) for i, one in enumerate(registries)))
        assert sorted(published.ref.version for published in done) == list(range(1, number + 1))
        assert all(published.created for published in done)
        entry = await registries[0].index.entry(BASE, NAME)
        assert entry == await registries[0].entry(BASE, NAME)

    async def test_the_same_content(self, store_settings: StoreSettings, store_kind: str) -> None:
        registries = several(store_settings, 3 if store_kind == "s3" else 32)
        done = await asyncio.gather(*(one.publish(BASE, NAME, prepared("same")) for one in registries))
        assert {published.ref.version for published in done} == {1}
        assert sum(published.created for published in done) == 1
        assert await registries[0].versions(BASE, NAME) == [1]


class TestPromote:
    async def test_an_alias_moves_and_remembers(self, registry: Registry) -> None:
        await with_versions(registry, 2)
        await registry.promote(BASE, NAME, "production", 1, By("ann", "go"))
        head = await registry.promote(BASE, NAME, "production", 2)
        assert head.aliases == {"production": 2} and head.revision == 3
        history = [(move.from_version, move.to_version, move.who, move.message) for move in head.history]
        assert history == [(None, 1, "ann", "go"), (1, 2, None, None)]
        assert head == await registry.head(BASE, NAME)
        entry = await registry.index.entry(BASE, NAME)
        assert entry is not None and (entry.production, entry.revision) == (2, 3)

    async def test_to_where_it_is_writes_nothing(self, registry: Registry) -> None:
        await with_versions(registry, 1)
        first = await registry.promote(BASE, NAME, "production", 1)
        assert await registry.promote(BASE, NAME, "production", 1) == first

    async def test_against_a_revision(self, registry: Registry) -> None:
        await with_versions(registry, 2)
        await registry.promote(BASE, NAME, "production", 1, By(expected_revision=1))
        with pytest.raises(errors.VersionConflict) as caught:
            await registry.promote(BASE, NAME, "production", 2, By(expected_revision=1))
        assert (caught.value.limit, caught.value.value) == (1, 2)
        assert "revision 2, not 1" in str(caught.value)
        assert (await registry.head(BASE, NAME)).aliases == {"production": 1}

    async def test_what_can_not_be_promoted(self, registry: Registry) -> None:
        await with_versions(registry, 2)
        await registry.retire(AdapterRef(BASE, NAME, 2))
        with pytest.raises(errors.VersionRetired):
            await registry.promote(BASE, NAME, "production", 2)
        with pytest.raises(errors.ModelNotFound):
            await registry.promote(BASE, NAME, "production", 3)
        with pytest.raises(errors.ModelNotFound):
            await registry.promote(BASE, "other", "production", 1)
        for alias in ("latest", "v2", "Up"):
            with pytest.raises(errors.InvalidRequest):
                await registry.promote(BASE, NAME, alias, 1)

    async def test_racing_without_a_revision_all_succeed(self, store_settings: StoreSettings, store_kind: str) -> None:
        registries = several(store_settings, 3 if store_kind == "s3" else 12)
        await with_versions(registries[0], 1)
        moves = (one.promote(BASE, NAME, f"alias-{i}", 1) for i, one in enumerate(registries))
        heads = await asyncio.gather(*moves)
        head = await registries[0].head(BASE, NAME)
        assert len(head.aliases) == len(heads) and head.revision == 1 + len(heads)
        assert (await registries[0].index.entry(BASE, NAME)) == await registries[0].entry(BASE, NAME)

    async def test_racing_against_a_revision_one_wins(self, store_settings: StoreSettings, store_kind: str) -> None:
        registries = several(store_settings, 3 if store_kind == "s3" else 12)
        await with_versions(registries[0], 1)
        moves = (one.promote(BASE, NAME, f"alias-{i}", 1, By(expected_revision=1)) for i, one in enumerate(registries))
        results = await asyncio.gather(*moves, return_exceptions=True)
        losers = [result for result in results if isinstance(result, BaseException)]
        assert len(losers) == len(registries) - 1
        assert {type(loser) for loser in losers} == {errors.VersionConflict}


class TestRollback:
    async def test_it_goes_further_back_each_time(self, registry: Registry) -> None:
        await with_versions(registry, 3)
        for version in (1, 2, 3):
            await registry.promote(BASE, NAME, "production", version)
        heads = [await registry.rollback(BASE, NAME, "production", by=By("bob")) for _ in range(2)]
        assert [head.aliases["production"] for head in heads] == [2, 1]
        assert (heads[-1].history[-1].kind, heads[-1].history[-1].who) == ("rollback", "bob")
        with pytest.raises(errors.InvalidRequest, match="no earlier version"):
            await registry.rollback(BASE, NAME, "production")

    async def test_after_a_new_promotion(self, registry: Registry) -> None:
        await with_versions(registry, 4)
        for version in (1, 2, 3):
            await registry.promote(BASE, NAME, "production", version)
        await registry.rollback(BASE, NAME, "production")
        await registry.promote(BASE, NAME, "production", 4)
        assert (await registry.rollback(BASE, NAME, "production")).aliases["production"] == 2
        assert (await registry.rollback(BASE, NAME, "production")).aliases["production"] == 1

    async def test_past_retired_versions(self, registry: Registry) -> None:
        await with_versions(registry, 3)
        for version in (1, 2, 3):
            await registry.promote(BASE, NAME, "production", version)
        await registry.retire(AdapterRef(BASE, NAME, 2))
        assert (await registry.rollback(BASE, NAME, "production")).aliases["production"] == 1

    async def test_to_a_version(self, registry: Registry) -> None:
        await with_versions(registry, 4)
        for version in (1, 2, 3):
            await registry.promote(BASE, NAME, "production", version)
        with pytest.raises(errors.InvalidRequest, match="never live"):
            await registry.rollback(BASE, NAME, "production", to=4)
        assert (await registry.rollback(BASE, NAME, "production", to=1)).aliases["production"] == 1
        assert (await registry.rollback(BASE, NAME, "production", to=3)).aliases["production"] == 3
        await registry.retire(AdapterRef(BASE, NAME, 2))
        with pytest.raises(errors.VersionRetired):
            await registry.rollback(BASE, NAME, "production", to=2)

    async def test_each_alias_has_its_own_past(self, registry: Registry) -> None:
        await with_versions(registry, 2)
        await registry.promote(BASE, NAME, "canary", 1)
        await registry.promote(BASE, NAME, "production", 2)
        with pytest.raises(errors.InvalidRequest):
            await registry.rollback(BASE, NAME, "production")
        with pytest.raises(errors.VersionConflict):
            await registry.rollback(BASE, NAME, "canary", by=By(expected_revision=1))
        with pytest.raises(errors.ModelNotFound):
            await registry.rollback(BASE, "unknown", "production")

    async def test_two_at_once_go_back_once(self) -> None:
        registry = Registry(FakeStore(latency_s=0.005))
        await with_versions(registry, 3)
        for version in (1, 2, 3):
            await registry.promote(BASE, NAME, "production", version)
        both = (registry.rollback(BASE, NAME, "production") for _ in range(2))
        results = await asyncio.gather(*both, return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["Head", "VersionConflict"]
        assert (await registry.head(BASE, NAME)).aliases == {"production": 2}


class TestRetire:
    async def test_away_and_back(self, registry: Registry) -> None:
        await with_versions(registry, 2)
        await registry.retire(AdapterRef(BASE, NAME, 2))
        entry = await registry.index.entry(BASE, NAME)
        assert entry is not None and entry.latest == 1 and entry.versions[2].retired
        head = await registry.restore(AdapterRef(BASE, NAME, 2))
        assert head.retired == frozenset()
        assert await registry.restore(AdapterRef(BASE, NAME, 2)) == head

    async def test_not_while_an_alias_names_it(self, registry: Registry) -> None:
        await with_versions(registry, 1)
        await registry.promote(BASE, NAME, "canary", 1)
        with pytest.raises(errors.InvalidRequest, match="canary"):
            await registry.retire(AdapterRef(BASE, NAME, 1))
        with pytest.raises(errors.ModelNotFound):
            await registry.retire(AdapterRef(BASE, NAME, 9))


class TestWeights:
    async def test_traffic_is_shared_until_one_is_promoted(self, registry: Registry) -> None:
        await with_versions(registry, 3)
        await registry.promote(BASE, NAME, "production", 1)
        head = await registry.set_weights(BASE, NAME, "production", {1: 90, 3: 10}, By("ann", "try it"))
        assert (head.aliases, head.weights) == ({"production": 1}, {"production": {1: 90, 3: 10}})
        row = head.history[-1]
        assert (row.kind, row.from_version, row.to_version, row.weights) == ("weights", 1, 1, {1: 90, 3: 10})
        assert (await registry.index.entry(BASE, NAME)).weights == head.weights
        head = await registry.promote(BASE, NAME, "production", 3)
        assert (head.aliases, head.weights) == ({"production": 3}, {})

    async def test_going_back_ends_the_sharing_first(self, registry: Registry) -> None:
        await with_versions(registry, 3)
        for version in (1, 2):
            await registry.promote(BASE, NAME, "production", version)
        await registry.set_weights(BASE, NAME, "production", {2: 50, 3: 50})
        went = [await registry.rollback(BASE, NAME, "production") for _ in range(2)]
        assert [(head.aliases["production"], head.weights) for head in went] == [(2, {}), (1, {})]

    async def test_the_largest_share_is_named_when_the_old_version_has_none(self, registry: Registry) -> None:
        await with_versions(registry, 3)
        await registry.promote(BASE, NAME, "production", 1)
        head = await registry.set_weights(BASE, NAME, "production", {2: 30, 3: 70})
        assert head.aliases["production"] == 3

    async def test_one_share_is_a_promotion(self, registry: Registry) -> None:
        await with_versions(registry, 2)
        head = await registry.set_weights(BASE, NAME, "canary", {2: 5, 1: 0})
        assert (head.aliases, head.weights, head.history[-1].kind) == ({"canary": 2}, {}, "promote")

    async def test_a_version_with_a_share_can_not_be_retired(self, registry: Registry) -> None:
        await with_versions(registry, 2)
        await registry.set_weights(BASE, NAME, "production", {1: 99, 2: 1})
        with pytest.raises(errors.InvalidRequest, match="production"):
            await registry.retire(AdapterRef(BASE, NAME, 2))

    async def test_unknown_and_retired_versions_get_no_share(self, registry: Registry) -> None:
        await with_versions(registry, 2)
        await registry.retire(AdapterRef(BASE, NAME, 1))
        with pytest.raises(errors.VersionRetired):
            await registry.set_weights(BASE, NAME, "production", {1: 1, 2: 1})
        with pytest.raises(errors.ModelNotFound):
            await registry.set_weights(BASE, NAME, "production", {2: 1, 9: 1})

    async def test_a_view_shares_by_key(self, registry: Registry) -> None:
        await with_versions(registry, 2)
        await registry.set_weights(BASE, NAME, "production", {1: 50, 2: 50})
        view = RegistryView(registry, poll_interval_s=1)
        await view.refresh()
        model = parse_model_name(f"{BASE}:{NAME}")
        by_key = {key: {view.resolve(model, key).ref.version for _ in range(5)} for key in "abcdefgh"}
        assert all(len(versions) == 1 for versions in by_key.values())
        assert {version for versions in by_key.values() for version in versions} == {1, 2}
        assert {view.resolve(model).chosen_by, view.resolve(model, "a").chosen_by} == {"chance", "key"}
        assert view.resolve(parse_model_name(f"{BASE}:{NAME}@2"), "a").chosen_by == "name"


class TestProtectedAliases:
    async def test_they_move_only_for_who_says_so(self, registry: Registry) -> None:
        await with_versions(registry, 2)
        await registry.promote(BASE, NAME, "production", 1)
        await registry.protect(BASE, NAME, "production", by=By("ann"))
        for attempt in (
            registry.promote(BASE, NAME, "production", 2),
            registry.set_weights(BASE, NAME, "production", {1: 1, 2: 1}),
            registry.unset(BASE, NAME, "production"),
        ):
            with pytest.raises(errors.Forbidden):
                await attempt
        await registry.promote(BASE, NAME, "canary", 2)
        head = await registry.promote(BASE, NAME, "production", 2, By(unlock=True))
        assert head.aliases == {"production": 2, "canary": 2}
        head = await registry.protect(BASE, NAME, "production", on=False)
        assert [row.kind for row in head.history] == ["promote", "protect", "promote", "promote", "unprotect"]

    async def test_protection_is_no_move_to_go_back_to(self, registry: Registry) -> None:
        await with_versions(registry, 2)
        for version in (1, 2):
            await registry.promote(BASE, NAME, "production", version)
        await registry.protect(BASE, NAME, "production")
        head = await registry.rollback(BASE, NAME, "production", by=By(unlock=True))
        assert head.aliases["production"] == 1


class TestUnset:
    async def test_an_alias_goes_away(self, registry: Registry) -> None:
        await with_versions(registry, 1)
        await registry.promote(BASE, NAME, "canary", 1)
        head = await registry.unset(BASE, NAME, "canary", By("ann", "done"))
        assert (head.aliases, head.history[-1].kind, head.history[-1].from_version) == ({}, "unset", 1)


class TestCollect:
    async def test_a_collected_version_comes_back_only_by_its_content(self, registry: Registry) -> None:
        await with_versions(registry, 2)
        ref = AdapterRef(BASE, NAME, 1)
        head = await registry.collect(ref, By("gc"))
        assert (head.retired, set(head.collected)) == ({1}, {1})
        assert (await registry.index.entry(BASE, NAME)).versions[1].collected
        with pytest.raises(errors.VersionRetired, match="collected"):
            await registry.restore(ref)
        item = prepared(f"{NAME}-1")
        for file in item.files:
            await registry.store.delete(layout.blob_key(item.digest, file.name))
        back = await registry.publish(BASE, NAME, item)
        assert (back.ref, back.created, back.retired) == (ref, False, False)
        for file in item.files:
            assert len((await registry.store.get(layout.blob_key(item.digest, file.name))).data) == file.size_bytes

    async def test_not_while_an_alias_names_it(self, registry: Registry) -> None:
        await with_versions(registry, 1)
        await registry.promote(BASE, NAME, "production", 1)
        with pytest.raises(errors.InvalidRequest, match="production"):
            await registry.collect(AdapterRef(BASE, NAME, 1))


class TestTags:
    async def test_words_on_a_version(self, registry: Registry) -> None:
        await with_versions(registry, 1)
        ref = AdapterRef(BASE, NAME, 1)
        await registry.tag(ref, {"run": "r1", "state": "good"})
        head = await registry.tag(ref, {"state": None, "step": "30"})
        assert head.tags == {1: {"run": "r1", "step": "30"}}
        assert (await registry.index.entry(BASE, NAME)).versions[1].tags == {"run": "r1", "step": "30"}

    @pytest.mark.parametrize("tags", [{"": "x"}, {"a b": "x"}, {"a": "x" * 257}, {f"k{i}": "x" for i in range(33)}], ids=repr)
    async def test_bad_ones(self, tags: dict[str, str]) -> None:
        registry = Registry(FakeStore())
        await with_versions(registry, 1)
        with pytest.raises(errors.InvalidRequest):
            await registry.tag(AdapterRef(BASE, NAME, 1), tags)


class TestHistory:
    async def test_who_when_from_to_and_why(self, registry: Registry) -> None:
        await with_versions(registry, 2)
        await registry.promote(BASE, NAME, "production", 1, By("ann", "first"))
        head = await registry.promote(BASE, NAME, "production", 2, By("bob", "better"))
        first, second = head.history
        assert (second.who, second.message, second.from_version, second.to_version) == ("bob", "better", 1, 2)
        assert aliases.live_at(head, "production", second.at).to_version == 2
        assert aliases.live_at(head, "production", first.at).to_version == 1
        assert aliases.live_at(head, "production", "2000-01-01T00:00:00Z") is None

    async def test_a_long_message_is_refused(self, registry: Registry) -> None:
        await with_versions(registry, 1)
        with pytest.raises(errors.InvalidRequest, match="1000"):
            await registry.promote(BASE, NAME, "production", 1, By("ann", "x" * 1001))


class TestBases:
    async def test_round_trip(self, registry: Registry) -> None:
        modules = {"model.layers.0.q_proj": ModuleShape(64, 128)}
        contract = BaseContract(BASE, "abc", modules, max_rank=32, tower="model.language_model")
        with pytest.raises(errors.ModelNotFound):
            await registry.base(BASE)
        await registry.put_base(contract)
        await registry.put_base(contract)
        assert await registry.base(BASE) == contract
        await asyncio.gather(*(registry.put_base(BaseContract("b", str(i), {}, 8)) for i in range(3)))
        assert await registry.bases() == [BASE, "b"]


class TestSweep:
    async def test_a_lost_index_comes_back(self, registry: Registry) -> None:
        for name in ("a", "b", "c"):
            await with_versions(registry, 2, name)
        assert (await registry.sweep()).repaired == ()
        before = {row.key: (await registry.store.get(row.key)).data async for row in registry.store.list("index/")}
        for key in before:
            await registry.store.delete(key)
        await registry.store.put(layout.shard_key(layout.shard_of(BASE, "a")), b"garbage")
        report = await registry.sweep()
        assert (report.adapters, report.versions) == (3, 6)
        assert report.repaired == tuple(f"{BASE}:{name}" for name in ("a", "b", "c"))
        assert {row.key: (await registry.store.get(row.key)).data async for row in registry.store.list("index/")} == before

    async def test_one_listing_finds_the_rows_that_are_behind(self, registry: Registry) -> None:
        for name in ("a", "b", "c"):
            await with_versions(registry, 1, name)
        shard = layout.shard_of(BASE, "a")
        old = (await registry.store.get(layout.shard_key(shard))).data
        await registry.promote(BASE, "a", "production", 1)
        there = await registry.store.get(layout.shard_key(shard))
        await registry.store.replace(layout.shard_key(shard), old, there.etag)  # as if the writer had died before the index
        assert (await registry.sweep()).repaired == (f"{BASE}:a",)
        assert (await registry.index.entry(BASE, "a")).aliases == {"production": 1}

    async def test_rows_that_lie_are_found_by_a_full_sweep_only(self, registry: Registry) -> None:
        await with_versions(registry, 2, "a")
        key = layout.shard_key(layout.shard_of(BASE, "a"))
        there = await registry.store.get(key)
        lie = there.data.replace(prepared("a-1").digest.encode(), b"0" * 64)
        await registry.store.replace(key, lie, there.etag)
        assert (await registry.sweep()).repaired == ()
        assert (await registry.sweep(full=True)).repaired == (f"{BASE}:a",)
        assert (await registry.store.get(key)).data == there.data

    async def test_a_row_of_nothing_goes(self, registry: Registry) -> None:
        await with_versions(registry, 1, "a")
        await registry.store.delete(layout.manifest_key(AdapterRef(BASE, "a", 1)))
        assert (await registry.sweep()).repaired == (f"{BASE}:a",)
        assert await registry.index.entry(BASE, "a") is None

    async def test_shards_of_an_older_release_are_replaced(self, registry: Registry) -> None:
        await with_versions(registry, 1, "a")
        await registry.store.delete(layout.shard_key(layout.shard_of(BASE, "a")))
        await registry.store.put("index/07.json", b"{}")
        view = RegistryView(registry, 1.0)
        await view.refresh()
        assert view.entry(BASE, "a") is not None
        assert [row.key async for row in registry.store.list("index/")] == [layout.shard_key(layout.shard_of(BASE, "a"))]

    async def test_a_writer_repairs_the_shard_that_it_meets(self) -> None:
        registry = Registry(open_store(StoreSettings(url="memory://")))
        names = [f"n{i}" for i in range(1500)]
        mates = [name for name in names if layout.shard_of(BASE, name) == layout.shard_of(BASE, "n0")]
        assert len(mates) > 1
        for name in mates:
            await with_versions(registry, 1, name)
        await registry.store.delete(layout.shard_key(layout.shard_of(BASE, "n0")))
        await registry.promote(BASE, "n0", "production", 1)
        assert {adapter.name for adapter in (await registry.index.read(layout.shard_of(BASE, "n0"))).rows} == set(mates)


class TestView:
    async def test_one_call_a_poll(self, seaweed: Seaweed, s3_settings: StoreSettings) -> None:
        registry = Registry(open_store(s3_settings))
        for name in ("a", "b", "c"):
            await with_versions(registry, 1, name)
        view = RegistryView(registry, 1.0)
        await view.refresh()
        seaweed.proxy.reset()
        await view.refresh()
        assert [(seen.method, "list-type=2" in seen.path) for seen in seaweed.proxy.seen] == [("GET", True)]
        head = await registry.promote(BASE, "a", "production", 1)
        seaweed.proxy.reset()
        assert await view.wait_seen(BASE, "a", head.revision)
        assert seaweed.proxy.count() == 2


class TestLostAnswers:
    """The proxy lets the server work and hides the answer."""

    async def test_of_a_promotion(self, seaweed: Seaweed, s3_settings: StoreSettings) -> None:
        registry = Registry(open_store(s3_settings))
        await with_versions(registry, 2)
        seaweed.proxy.lose_answer_next(method="PUT", contains="head.json")
        head = await registry.promote(BASE, NAME, "production", 2, By(expected_revision=1))
        assert (head.revision, head.aliases, len(head.history)) == (2, {"production": 2}, 1)

    async def test_of_a_publication(self, seaweed: Seaweed, s3_settings: StoreSettings) -> None:
        registry = Registry(open_store(s3_settings))
        seaweed.proxy.lose_answer_next(method="PUT", contains="manifest.json")
        seaweed.proxy.lose_answer_next(method="PUT", contains="index/")
        done = await registry.publish(BASE, NAME, prepared())
        assert (done.ref.version, done.created) == (1, True)
        assert await registry.versions(BASE, NAME) == [1]
