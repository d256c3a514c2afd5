"""What retention keeps, what goes, and that nobody is harmed: not by a death at any step, not in any order of steps."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from adapters import errors
from adapters.names import AdapterRef
from adapters.registry import Registry, aliases, collection, layout, uploads
from adapters.registry.collection import plan_for, run
from adapters.registry.retention import AdapterState, RetentionPolicy, Survey, plan
from adapters.store import Listed
from adapters.types import CONFIG_FILE, WEIGHTS_FILE, By, Directive, Head, HistoryRow, PendingMove
from tests.fake_store import FakeStore
from tests.prepared import prepared
from tests.turns import Turns, TurnStore
from tests.unit.adapters.test_registry_crash import Crash, DyingStore, check_index_is_true

BASE, NAME = "Qwen/Qwen3-0.6B", "maze"
DAY_S = 24 * 3600.0
LAST = RetentionPolicy(keep_last=1)
NOW = RetentionPolicy(keep_last=1, grace_s=0)


def ref(version: int) -> AdapterRef:
    return AdapterRef(BASE, NAME, version)


def pending(version: int, deadline: str) -> PendingMove:
    return PendingMove("m", "canary", version, None, deadline, "2026-01-01T00:00:00Z")


async def with_versions(registry: Registry, *contents: str) -> None:
    for content in contents:
        await registry.publish(BASE, NAME, prepared(content))


async def state_of(registry: Registry, **changes: object) -> Survey:
    """A survey with the head of the adapter changed."""
    found = await collection.survey(registry)
    [state] = found.adapters
    return replace(found, adapters=(replace(state, head=replace(state.head, **changes)),))


def whole(store: FakeStore, content: str) -> bool:
    digest = prepared(content).digest
    return all(layout.blob_key(digest, name) in store.objects for name in (CONFIG_FILE, WEIGHTS_FILE))


def aged(store: FakeStore, by_s: float = 10 * DAY_S) -> None:
    """Everything in the store was written long ago."""
    for key in store.modified_s:
        store.modified_s[key] -= by_s


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def registry(store: FakeStore) -> Registry:
    return Registry(store)


class TestPlan:
    async def test_without_a_rule_every_version_stays(self, registry: Registry) -> None:
        await with_versions(registry, "a", "b", "c")
        decided = await plan_for(registry)
        assert decided.is_empty and {kept.ref.version for kept in decided.kept} == {1, 2, 3}

    async def test_the_last_ones_stay(self, registry: Registry) -> None:
        await with_versions(registry, "a", "b", "c")
        decided = await plan_for(registry, RetentionPolicy(keep_last=2))
        assert decided.collect == (ref(1),)
        assert [kept.why for kept in decided.kept] == [("keep_last",), ("newest", "keep_last")]

    async def test_the_young_ones_stay(self, registry: Registry) -> None:
        await with_versions(registry, "a", "b")
        policy = RetentionPolicy(keep_younger_s=DAY_S)
        found = await collection.survey(registry)
        assert plan(found, policy, now_s=time.time()).collect == ()
        assert plan(found, policy, now_s=time.time() + 2 * DAY_S).collect == (ref(1),)

    async def test_a_retirement_makes_a_version_young_again(self, registry: Registry) -> None:
        await with_versions(registry, "a", "b")
        row = HistoryRow(None, 1, 1, "2126-01-01T00:00:00Z", kind=aliases.RETIRE)
        found = await state_of(registry, retired=frozenset({1}), history=(row,))
        assert plan(found, RetentionPolicy(keep_younger_s=DAY_S), now_s=time.time() + 2 * DAY_S).collect == ()

    async def test_what_an_alias_its_weights_or_a_rollback_needs_stays(self, registry: Registry) -> None:
        await with_versions(registry, *"abcdef")
        await registry.promote(BASE, NAME, "production", 1)
        await registry.promote(BASE, NAME, "production", 2)
        await registry.promote(BASE, NAME, "production", 3)
        await registry.set_weights(BASE, NAME, "canary", {4: 1, 5: 1})
        decided = await plan_for(registry, LAST)
        why = {kept.ref.version: kept.why for kept in decided.kept}
        assert decided.collect == (ref(1),)
        assert (why[3], why[2], why[5]) == (("alias:production",), ("rollback:production",), ("alias:canary",))

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"directives": (Directive("1", "engine", True),)}, "pinned"),
            ({"directives": (Directive("1", "disk", False, start="2126-01-01T00:00:00Z"),)}, "prewarm"),
            ({"pending": {"canary": pending(1, "2126-01-01T00:00:00Z")}}, "pending:canary"),
            ({"extra": {"spread": [{"ref": f"{BASE}:{NAME}@1", "zones": {"1": 9}}]}}, "newer_release"),
        ],
    )
    async def test_what_the_head_directs_stays(self, registry: Registry, changes: dict, why: str) -> None:
        await with_versions(registry, *"abc")
        decided = plan(await state_of(registry, **changes), LAST, now_s=time.time())
        assert decided.collect == (ref(2),)
        assert decided.kept[0].why == (why,)

    @pytest.mark.parametrize(
        "changes",
        [
            {"directives": (Directive("1", "engine", True, until="2026-01-01T00:00:00Z"),)},
            {"directives": (Directive("canary", "engine", True, replicas=1),)},
            {"pending": {"canary": pending(1, "2026-01-01T00:00:00Z")}},
        ],
        ids=["expired", "an alias that is gone", "overdue"],
    )
    async def test_what_it_directs_no_more_goes(self, registry: Registry, changes: dict) -> None:
        await with_versions(registry, *"abc")
        decided = plan(await state_of(registry, **changes), LAST, now_s=time.time())
        assert decided.collect == (ref(1), ref(2))

    async def test_a_pinned_alias_is_a_reason_for_each_version_that_shares_it(self, registry: Registry) -> None:
        await with_versions(registry, *"abc")
        await registry.set_weights(BASE, NAME, "canary", {1: 1, 2: 1})
        await registry.direct(BASE, NAME, Directive("canary", "disk", True))
        decided = await plan_for(registry, LAST)
        assert {kept.ref.version for kept in decided.kept if "pinned" in kept.why} == {1, 2}

    async def test_what_is_in_use_or_tagged_stays(self, registry: Registry) -> None:
        await with_versions(registry, *"abcd")
        await registry.tag(ref(2), {"keep": "yes"})
        decided = await plan_for(registry, RetentionPolicy(keep_last=1, keep_tagged=("keep",)), in_use={ref(1)})
        assert decided.collect == (ref(3),)
        assert [kept.why for kept in decided.kept][:2] == [("in_use",), ("tagged:keep",)]

    async def test_the_newest_live_one_stays_beside_a_newer_retired_one(self, registry: Registry) -> None:
        await with_versions(registry, *"abc")
        await registry.retire(ref(3))
        assert (await plan_for(registry, LAST)).collect == (ref(1),)

    async def test_files_wait_for_their_grace(self, registry: Registry) -> None:
        await with_versions(registry, "a", "b")
        decided = await plan_for(registry, LAST)
        size = prepared("a").files[0].size_bytes + prepared("a").files[1].size_bytes
        assert (decided.bytes_now, decided.bytes_later) == (0, size)
        assert all(blob.due_s > time.time() + DAY_S - 60 for blob in decided.waiting)

    async def test_content_that_another_version_holds_stays(self, registry: Registry) -> None:
        await with_versions(registry, "a", "b")
        await registry.publish(BASE, "other", prepared("a"))
        decided = await plan_for(registry, NOW)
        assert decided.collect == (ref(1),) and decided.blobs == () and decided.waiting == ()

    async def test_keys_that_are_not_ours_are_told_and_left(self, registry: Registry, store: FakeStore) -> None:
        await with_versions(registry, "a")
        strange = ["blobs/x/half.partial", "blobs/x/y/adapter_model.safetensors", "notes.txt"]
        for key in strange:
            await store.put(key, b"x")
        await store.put("registry.json", b"{}")
        await store.put(layout.adopted_key("f"), b"{}")
        aged(store)
        decided = await plan_for(registry, NOW)
        await run(registry, decided)
        assert sorted(decided.unknown) == sorted(strange)
        assert set(strange) <= store.objects.keys()

    @pytest.mark.parametrize("policy", [{"keep_last": 0}, {"keep_younger_s": -1}, {"grace_s": float("nan")}])
    def test_a_policy_without_sense_is_refused(self, policy: dict) -> None:
        with pytest.raises(errors.InvalidRequest):
            plan(Survey((), ()), RetentionPolicy(**policy), now_s=0)

    def test_a_plan_needs_no_store(self) -> None:
        state = AdapterState(Head(BASE, NAME), ())
        orphan = Listed(layout.blob_key("d", WEIGHTS_FILE), 7, "e", 0.0)
        decided = plan(Survey((state,), (orphan,)), now_s=2 * DAY_S)
        assert (decided.bytes_now, decided.blobs[0].why) == (7, "orphan")


class TestRun:
    async def test_what_was_pinned_or_began_to_move_after_the_plan_is_spared(self, registry: Registry, store: FakeStore) -> None:
        await with_versions(registry, *"abc")
        decided = await plan_for(registry, NOW)
        await registry.direct(BASE, NAME, Directive("1", "disk", True))
        await registry.begin_move(BASE, NAME, "canary", 2, min_ready=None, timeout_s=60)
        report = await run(registry, decided)
        assert {str(ref(1)): "pinned", str(ref(2)): "pending:canary"}.items() <= dict(report.spared).items()
        assert report.collected == report.deleted == ()
        assert all(whole(store, content) for content in "abc")

    async def test_a_collected_version_answers_no_more_and_its_number_stays_used(
        self, registry: Registry, store: FakeStore
    ) -> None:
        await with_versions(registry, "a", "b")
        report = await run(registry, await plan_for(registry, NOW), By("ann", "tidy"))
        assert report.collected == (ref(1),) and report.bytes_freed == prepared("a").files[0].size_bytes + 1
        assert not whole(store, "a") and whole(store, "b")
        head = await registry.head(BASE, NAME)
        assert (head.history[-1].kind, head.history[-1].who) == ("collect", "ann")
        assert (await registry.publish(BASE, NAME, prepared("c"))).ref == ref(3)
        await check_index_is_true(store)

    async def test_the_same_content_brings_it_back(self, registry: Registry, store: FakeStore) -> None:
        await with_versions(registry, "a", "b")
        await run(registry, await plan_for(registry, NOW))
        again = await registry.publish(BASE, NAME, prepared("a"))
        assert (again.ref, again.created, again.retired) == (ref(1), False, False)
        assert whole(store, "a")

    async def test_files_go_when_their_grace_is_over(self, registry: Registry, store: FakeStore) -> None:
        await with_versions(registry, "a", "b")
        await run(registry, await plan_for(registry, LAST))
        assert whole(store, "a")
        aged(store)
        await _mark_long_ago(registry)
        report = await run(registry, await plan_for(registry, LAST))
        assert {blob.why for blob in report.deleted} == {"collected"} and not whole(store, "a")

    async def test_old_orphans_go_and_young_ones_stay(self, registry: Registry, store: FakeStore) -> None:
        for content in ("old", "young"):
            item = prepared(content)
            for file, data in zip(item.files, (item.config, item.weights), strict=True):
                await store.put(layout.blob_key(item.digest, file.name), data)
            if content == "old":
                aged(store)
        report = await run(registry, await plan_for(registry))
        assert {blob.why for blob in report.deleted} == {"orphan"}
        assert not whole(store, "old") and whole(store, "young")

    async def test_a_version_that_was_promoted_since_the_plan_stays(self, registry: Registry, store: FakeStore) -> None:
        await with_versions(registry, "a", "b")
        decided = await plan_for(registry, NOW)
        await registry.promote(BASE, NAME, "production", 1)
        report = await run(registry, decided)
        assert report.collected == () and (str(ref(1)), "alias:production") in report.spared
        assert whole(store, "a")

    async def test_a_version_published_again_since_the_plan_keeps_its_files(self, registry: Registry, store: FakeStore) -> None:
        await with_versions(registry, "a", "b")
        await run(registry, await plan_for(registry, LAST))
        aged(store)
        await _mark_long_ago(registry)
        decided = await plan_for(registry, LAST)
        assert decided.blobs
        await registry.publish(BASE, NAME, prepared("a"))
        assert {why for _, why in (await run(registry, decided)).spared} == {"named"}
        assert whole(store, "a")

    async def test_the_index_is_repaired(self, registry: Registry, store: FakeStore) -> None:
        await with_versions(registry, "a")
        await store.delete(layout.shard_key(layout.shard_of(BASE, NAME)))
        report = await run(registry, await plan_for(registry))
        assert report.index.repaired == (f"{BASE}:{NAME}",)

    async def test_one_that_is_too_slow_for_its_notice_deletes_nothing(
        self, registry: Registry, store: FakeStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await with_versions(registry, "a", "b")
        monkeypatch.setattr(collection, "NOTICE_LIFE_S", 0)
        report = await run(registry, await plan_for(registry, NOW))
        assert report.deleted == () and {why for _, why in report.spared} == {"slow"}
        assert whole(store, "a") and not [key for key in store.objects if uploads.is_notice(key)]

    async def test_after_trouble_the_notice_stays_until_a_later_run(self, registry: Registry, store: FakeStore) -> None:
        await with_versions(registry, "a", "b")
        store.fail(errors.StoreUnreachable("no answer"), method="delete", key_part=CONFIG_FILE)
        with pytest.raises(errors.StoreUnreachable):
            await run(registry, await plan_for(registry, NOW))
        assert [key for key in store.objects if uploads.is_notice(key)], "the deletion may still be on its way"
        aged(store, 2 * 3600)
        report = await run(registry, await plan_for(registry, NOW))
        assert {blob.digest for blob in report.deleted} == {prepared("a").digest}
        assert not [key for key in store.objects if uploads.is_notice(key)]

    async def test_progress_counts_files(self, registry: Registry) -> None:
        await with_versions(registry, "a", "b")
        told: list[tuple[int, int]] = []
        await run(registry, await plan_for(registry, NOW), progress=lambda done, total: told.append((done, total)))
        assert told == [(1, 2), (2, 2)]


class TestDeath:
    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    async def test_at_any_write_and_the_next_run_completes(self, after: bool) -> None:
        for at in itertools.count(1):
            store = FakeStore()
            registry = Registry(store)
            await with_versions(registry, *"abcd")
            item = prepared("orphan")
            await store.put(layout.blob_key(item.digest, WEIGHTS_FILE), item.weights)
            aged(store)
            dying = DyingStore(store, at, after=after, error=Crash())
            try:
                await run(Registry(dying), await plan_for(Registry(dying), NOW))
            except Crash:
                await _check_named_is_whole(store)
                aged(store)
                await run(registry, await plan_for(registry, NOW))
                await run(registry, await plan_for(registry, NOW))
            assert set(await registry.versions(BASE, NAME)) == {1, 2, 3, 4}
            assert {key for key in store.objects if key.startswith("blobs/")} == {
                layout.blob_key(prepared("d").digest, name) for name in (CONFIG_FILE, WEIGHTS_FILE)
            }
            await check_index_is_true(store)
            if not dying.struck:
                assert at > 10
                return

    async def test_of_a_collector_delays_a_publisher_for_the_life_of_its_notice(
        self, registry: Registry, store: FakeStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(uploads, "NOTICE_LOOK_S", 0.01)
        monkeypatch.setattr(uploads, "NOTICE_LIFE_S", 0.1)
        key = uploads.notice_key(prepared("a").digest, "dead")
        await store.put(key, b"{}")
        await registry.publish(BASE, NAME, prepared("a"))
        assert key not in store.objects and whole(store, "a")


async def test_a_publisher_that_slept_over_its_grace_uploads_again(
    registry: Registry, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, slept = registry._find, []

    async def sleepy(*args: str) -> object:
        if not slept:
            slept.append(True)
            aged(store)
            await run(Registry(store), await plan_for(Registry(store)))
            assert not whole(store, "a")
        return await find(*args)

    monkeypatch.setattr(registry, "_find", sleepy)
    await registry.publish(BASE, NAME, prepared("a"))
    assert slept and whole(store, "a")


async def test_content_that_a_version_holds_is_not_sent_again_however_old(registry: Registry, store: FakeStore) -> None:
    await with_versions(registry, "a")
    aged(store)
    before = store.count("put")
    await registry.publish(BASE, NAME, prepared("a"))
    assert store.count("put") == before


SITUATIONS = ("orphan", "collected", "to be collected")


class TestInAnyOrder:
    """A collector and a publisher of the same content, their calls interleaved in many ways: never a version without files."""

    @pytest.fixture(autouse=True)
    def _no_pauses(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(uploads, "NOTICE_LOOK_S", 0)
        monkeypatch.setattr(uploads, "NOTICE_LIFE_S", 3600)
        yield

    @pytest.mark.parametrize("situation", SITUATIONS)
    async def test_both_live(self, situation: str) -> None:
        ends = set()
        for seed in range(120):
            store, turns = await _situation(situation), Turns(seed)
            results = await turns.play({"gc": _collect(store, turns), "publisher": _publish(store, turns)})
            assert not [result for result in results.values() if isinstance(result, Exception)]
            await _check_named_is_whole(store)
            ends.add(bool(results["gc"].deleted))
        if situation != "to be collected":  # whose grace is not over
            assert ends == {True, False}, "the orders tried are all alike"

    @pytest.mark.parametrize("situation", SITUATIONS)
    async def test_the_publisher_dies(self, situation: str) -> None:
        for seed in range(200):
            dies_at, after = random.Random(seed).randint(1, 40), bool(seed % 2)
            store, turns = await _situation(situation), Turns(seed)
            publisher = _publish(store, turns, dies_at=dies_at, after=after)
            await turns.play({"gc": _collect(store, turns), "publisher": publisher})
            await _check_named_is_whole(store)
            assert (await Registry(store).publish(BASE, NAME, prepared("a"))).ref.version in (1, 2, 3)
            await _check_named_is_whole(store)

    @pytest.mark.parametrize("situation", SITUATIONS)
    async def test_two_collectors(self, situation: str) -> None:
        for seed in range(80):
            store, turns = await _situation(situation), Turns(seed)
            publisher = _publish(store, turns, dies_at=random.Random(seed).randint(5, 40), after=bool(seed % 2))
            works = {"gc": _collect(store, turns), "other": _collect(store, turns, name="other"), "publisher": publisher}
            results = await turns.play(works)
            assert not isinstance(results["gc"], Exception) and not isinstance(results["other"], Exception)
            await _check_named_is_whole(store)

    @pytest.mark.parametrize("situation", SITUATIONS)
    async def test_the_collector_dies(self, situation: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(uploads, "NOTICE_LIFE_S", 0.002)
        for seed in range(120):
            store, turns = await _situation(situation), Turns(seed)
            gc = _collect(store, turns, dies_at=random.Random(seed).randint(3, 24), after=bool(seed % 2))
            results = await turns.play({"gc": gc, "publisher": _publish(store, turns)})
            assert not isinstance(results["publisher"], Exception)
            await _check_named_is_whole(store)


async def _situation(name: str) -> FakeStore:
    """A store in which the files of the content "a" are old, and no version holds them or one that is to go."""
    store = FakeStore()
    registry = Registry(store)
    await registry.marker.ensure()
    if name == "orphan":
        item = prepared("a")
        for file, data in zip(item.files, (item.config, item.weights), strict=True):
            await store.put(layout.blob_key(item.digest, file.name), data)
    else:
        await with_versions(registry, "a", "b")
    if name == "collected":
        await registry.collect(ref(1))
        await _mark_long_ago(registry)
    aged(store)
    return store


async def _collect(store: FakeStore, turns: Turns, name: str = "gc", **death: object) -> object:
    registry = Registry(TurnStore(store, turns, name, **death))
    return await run(registry, await plan_for(registry, LAST))


async def _publish(store: FakeStore, turns: Turns, **death: object) -> object:
    return await Registry(TurnStore(store, turns, "publisher", **death)).publish(BASE, NAME, prepared("a"))


async def _check_named_is_whole(store: FakeStore) -> None:
    """Every version that was not collected has its files."""
    registry = Registry(store)
    for adapter, listed in (await registry.truth.adapters()).items():
        head, _ = await registry.truth.head(*adapter)
        for manifest in await registry.truth.manifests(*adapter, listed.versions):
            for file in manifest.files:
                there = store.objects.get(layout.blob_key(manifest.digest, file.name))
                assert manifest.ref.version in head.collected or (there and len(there.data) == file.size_bytes)


async def _mark_long_ago(registry: Registry) -> None:
    """The marks of collected versions are long over their grace."""
    await registry.heads.change(
        BASE, NAME, lambda head: replace(head, collected=dict.fromkeys(head.collected, "2020-01-01T00:00:00Z"))
    )
