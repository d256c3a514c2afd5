"""Backup and restore: between stores of every kind, interrupted at every step, while the source is written."""

from __future__ import annotations

import asyncio
import itertools
import math
import uuid
from dataclasses import replace
from pathlib import Path

import boto3
import pytest

from adapters import errors
from adapters.names import AdapterRef
from adapters.registry import Registry, layout
from adapters.registry.collection import plan_for, run
from adapters.registry.copying import copy
from adapters.registry.retention import RetentionPolicy
from adapters.settings import StoreSettings
from adapters.store import Store, open_store
from adapters.types import WEIGHTS_FILE, BaseContract, By, Directive, ModuleShape
from tests.fake_store import FakeStore
from tests.prepared import prepared
from tests.seaweed import Seaweed
from tests.turns import Turns, TurnStore
from tests.unit.adapters.test_registry_crash import Crash, DyingStore, check_visible_is_whole

BASE, NAMES = "Qwen/Qwen3-0.6B", ("maze", "team/maze")
CONTRACT = BaseContract(BASE, "f", {"model.q": ModuleShape(4, 4)}, 16)
LARGE = b"0123456789abcdef" * 200_000  # several chunks


async def filled(store: Store) -> Registry:
    """Two adapters with three versions, one of them large, moves, tags, directives, a move that waits, and a base."""
    registry = Registry(store)
    await registry.put_base(CONTRACT)
    for name in NAMES:
        for content in ("a", f"{name}-b", LARGE):
            await registry.publish(BASE, name, prepared(content), By("ann"))
        await registry.promote(BASE, name, "production", 1, By("ann"))
        await registry.set_weights(BASE, name, "canary", {2: 1, 3: 2})
        await registry.tag(AdapterRef(BASE, name, 2), {"run": "r1"})
        await registry.direct(BASE, name, Directive("canary", "engine", True, replicas=2), By("ann"))
        await registry.begin_move(BASE, name, "production", 2, By("ann"), min_ready=1, timeout_s=3600)
    return registry


async def truth(store: Store) -> dict[str, bytes]:
    """Everything that counts: all but the index."""
    keys = [row.key async for row in store.list("") if not row.key.startswith(layout.INDEX) and row.key != layout.MARKER]
    return {key: (await store.get(key)).data for key in keys}


async def check_is_copy(source: Store, target: Store) -> None:
    assert await truth(target) == await truth(source)
    await check_visible_is_whole(target)
    assert (await Registry(target).sweep(full=True)).repaired == ()
    for name in NAMES:
        row = await Registry(target).index.entry(BASE, name)
        assert row == replace(await Registry(source).entry(BASE, name), head_etag=row.head_etag if row else None)


@pytest.fixture
def source() -> FakeStore:
    return FakeStore()


class TestEveryStore:
    async def test_a_copy_is_the_same_registry_and_can_be_written(self, source: FakeStore, store: Store) -> None:
        await filled(source)
        report = await copy(source, store)
        await check_is_copy(source, store)
        assert (report.adapters, report.versions, report.versions_copied, report.heads_copied) == (2, 6, 6, 2)
        assert (report.files_copied, report.bases_copied, report.damaged) == (8, 1, ())  # two contents are shared
        done = await Registry(store).publish(BASE, NAMES[0], prepared("new"))
        assert done.ref.version == 4

    async def test_and_back(self, source: FakeStore, store: Store) -> None:
        await filled(source)
        await copy(source, store)
        restored = FakeStore()
        await copy(store, restored)
        await check_is_copy(source, restored)

    async def test_the_second_time_nothing_is_sent(self, source: FakeStore, store: Store) -> None:
        await filled(source)
        await copy(source, store)
        report = await copy(source, store, verify=True)
        assert (report.versions_copied, report.files_copied, report.heads_copied, report.bases_copied) == (0, 0, 0, 0)


async def test_from_bucket_to_bucket(seaweed: Seaweed) -> None:
    here = seaweed.direct(f"t-{uuid.uuid4().hex[:12]}")
    bucket = f"backup-{uuid.uuid4().hex[:8]}"
    secret = here.secret_access_key.get_secret_value() if here.secret_access_key else None
    keys = {"aws_access_key_id": here.access_key_id, "aws_secret_access_key": secret, "region_name": here.region}
    await asyncio.to_thread(boto3.client("s3", endpoint_url=here.endpoint, **keys).create_bucket, Bucket=bucket)
    source, target = open_store(here), open_store(here.model_copy(update={"url": f"s3://{bucket}/registry"}))
    await filled(source)
    await copy(source, target)
    await check_is_copy(source, target)


class TestInterrupted:
    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    async def test_at_any_write_the_target_is_whole_and_the_next_copy_completes(self, after: bool, source: FakeStore) -> None:
        await filled(source)
        for at in itertools.count(1):
            target = FakeStore()
            dying = DyingStore(target, at, after=after, error=Crash())
            try:
                await copy(source, dying)
            except Crash:
                await check_visible_is_whole(target)
                await copy(source, target)
            await check_is_copy(source, target)
            if not dying.struck:
                assert at > 15
                return

    async def test_files_that_lie_there_unnamed_for_long_are_sent_again(self, source: FakeStore) -> None:
        await filled(source)
        target = FakeStore()
        await copy(source, target)
        for key in [key for key in target.objects if not key.startswith("blobs/")]:
            del target.objects[key]
        for key in target.modified_s:
            target.modified_s[key] -= 20 * 3600
        assert (await copy(source, target)).files_copied == 8


class TestProgressOfTheSource:
    async def test_what_happened_since_comes_with_the_next_copy(self, source: FakeStore) -> None:
        registry, target = await filled(source), FakeStore()
        await copy(source, target)
        await registry.publish(BASE, NAMES[0], prepared("new"))
        await registry.promote(BASE, NAMES[0], "production", 4)
        await registry.put_base(replace(CONTRACT, max_rank=32))
        report = await copy(source, target)
        assert (report.versions_copied, report.heads_copied, report.bases_copied) == (1, 1, 1)
        await check_is_copy(source, target)

    async def test_collected_versions_come_without_files(self, source: FakeStore) -> None:
        registry, target = await filled(source), FakeStore()
        await registry.publish(BASE, NAMES[0], prepared("new"))
        await registry.collect(AdapterRef(BASE, NAMES[0], 4))
        await registry.publish(BASE, NAMES[0], prepared("newer"))
        await run(registry, await plan_for(registry, RetentionPolicy(grace_s=0)))
        report = await copy(source, target)
        assert report.damaged == () and (await Registry(target).versions(BASE, NAMES[0])) == [1, 2, 3, 4, 5]
        assert await truth(target) == await truth(source)

    @pytest.mark.parametrize("seed", range(25))
    async def test_while_an_author_works_each_adapter_is_of_one_moment(self, seed: int) -> None:
        source, target, turns = FakeStore(), FakeStore(), Turns(seed)
        await filled(source)

        async def author() -> None:
            registry = Registry(TurnStore(source, turns, "author"))
            for number in range(3):
                done = await registry.publish(BASE, NAMES[0], prepared(f"live-{number}"))
                await registry.promote(BASE, NAMES[0], "production", done.ref.version)
            await registry.collect(AdapterRef(BASE, NAMES[0], 4))
            await run(registry, await plan_for(registry, RetentionPolicy(grace_s=0)))

        results = await turns.play({"author": author(), "copy": copy(TurnStore(source, turns, "copy"), target)})
        assert not [result for result in results.values() if isinstance(result, Exception)]
        head = await Registry(target).head(BASE, NAMES[0])
        versions = await Registry(target).versions(BASE, NAMES[0])
        assert set(head.aliases.values()) <= set(versions)
        for manifest in await Registry(target).truth.manifests(BASE, NAMES[0], versions):
            key = layout.blob_key(manifest.digest, WEIGHTS_FILE)
            assert key in target.objects or manifest.ref.version in head.collected
        await copy(source, target)
        assert (await truth(source)).items() <= (await truth(target)).items()


class TestDifferences:
    async def test_a_newer_head_in_the_target_stays(self, source: FakeStore) -> None:
        await filled(source)
        target = FakeStore()
        await copy(source, target)
        await Registry(target).promote(BASE, NAMES[0], "production", 3)
        report = await copy(source, target)
        assert report.heads_newer == (f"{BASE}:{NAMES[0]}",)
        assert (await Registry(target).head(BASE, NAMES[0])).aliases["production"] == 3

    async def test_another_content_under_the_same_number_is_refused_before_a_write(self, source: FakeStore) -> None:
        await filled(source)
        target = FakeStore()
        await Registry(target).publish(BASE, NAMES[1], prepared("something else"))
        before = dict(target.objects)
        with pytest.raises(errors.VersionConflict, match=r"team/maze@1` is something else") as caught:
            await copy(source, target)
        assert caught.value.reason == "different_history"
        assert target.objects == before

    async def test_moves_that_went_another_way_are_refused(self, source: FakeStore) -> None:
        registry, target = await filled(source), FakeStore()
        await copy(source, target)
        await Registry(target).promote(BASE, NAMES[0], "production", 3)
        await registry.promote(BASE, NAMES[0], "production", 2)
        await registry.promote(BASE, NAMES[0], "production", 1)
        with pytest.raises(errors.VersionConflict):
            await copy(source, target)
        assert (await Registry(target).head(BASE, NAMES[0])).aliases["production"] == 3

    async def test_directives_that_went_another_way_are_refused_though_nothing_moved(self, source: FakeStore) -> None:
        target = FakeStore()
        for store, tier in ((source, "engine"), (target, "disk")):
            await Registry(store).publish(BASE, NAMES[0], prepared("a"))
            await Registry(store).direct(BASE, NAMES[0], Directive("1", tier, True))
        await Registry(source).direct(BASE, NAMES[0], Directive("1", "disk", False))
        with pytest.raises(errors.VersionConflict):
            await copy(source, target)
        assert [known.tier for known in (await Registry(target).head(BASE, NAMES[0])).directives] == ["disk"]

    async def test_a_backup_that_is_far_behind_is_brought_up(self, source: FakeStore) -> None:
        registry, target = await filled(source), FakeStore()
        await copy(source, target)
        for number in range(80):
            await registry.tag(AdapterRef(BASE, NAMES[0], 1), {"n": str(number)})
        assert (await copy(source, target)).heads_copied == 1
        await check_is_copy(source, target)

    async def test_a_damaged_version_is_told_and_not_made_visible(self, source: FakeStore) -> None:
        await filled(source)
        target = FakeStore()
        await source.put(layout.blob_key(prepared("team/maze-b").digest, WEIGHTS_FILE), b"team/maze-x")
        report = await copy(source, target)
        assert report.damaged == (AdapterRef(BASE, "team/maze", 2),)
        await check_visible_is_whole(target)
        assert (await Registry(target).head(BASE, "maze")).aliases["production"] == 1

    async def test_verify_finds_a_wrong_file_in_the_target(self, source: FakeStore) -> None:
        await filled(source)
        target = FakeStore()
        await copy(source, target)
        await target.put(layout.blob_key(prepared("maze-b").digest, WEIGHTS_FILE), b"maze-x")
        assert (await copy(source, target)).files_copied == 0
        assert (await copy(source, target, verify=True)).files_copied == 1
        await check_is_copy(source, target)

    async def test_trouble_of_a_store_passes_through(self, source: FakeStore) -> None:
        await filled(source)
        target = FakeStore()
        target.fail(errors.StoreThrottled("slow down"), method="put", times=math.inf)
        with pytest.raises(errors.StoreThrottled):
            await copy(source, target)

    async def test_progress_counts_adapters(self, source: FakeStore, tmp_path: Path) -> None:
        await filled(source)
        told: list[tuple[int, int]] = []
        folder = open_store(StoreSettings(url=f"file://{tmp_path}/backup"))
        await copy(source, folder, lambda done, total: told.append((done, total)))
        assert told == [(1, 2), (2, 2)]
