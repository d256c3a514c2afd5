"""The picture in memory: right, only forward, cheap, and honest about trouble."""

from __future__ import annotations

import asyncio
import math
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest

from adapters import errors
from adapters.names import AdapterRef, parse_model_name
from adapters.registry import Registry, layout
from adapters.registry.index import merge
from adapters.registry.view import RegistryView
from adapters.types import AdapterEntry, FileDigest, VersionEntry
from tests.fake_store import FakeStore
from tests.prepared import prepared

BASE, NAME = "Qwen/Qwen3-0.6B", "maze"


@pytest.fixture
def fake() -> FakeStore:
    return FakeStore()


@pytest.fixture
async def registry(fake: FakeStore) -> Registry:
    """One adapter with versions 1 and 2; `production` names 1."""
    registry = Registry(fake)
    await registry.publish(BASE, NAME, prepared("one"))
    await registry.publish(BASE, NAME, prepared("two"))
    await registry.promote(BASE, NAME, "production", 1)
    return registry


@pytest.fixture
async def view(registry: Registry) -> RegistryView:
    view = RegistryView(registry, poll_interval_s=0.01)
    await view.refresh()
    return view


def entry(
    name: str = NAME, revision: int = 1, versions: tuple[int, ...] = (1,), digest: str = "d", **aliases: int
) -> AdapterEntry:
    files = (FileDigest("f", 1, "0"),)
    rows = {number: VersionEntry(number, f"{digest}{number}", files, 8, "2026") for number in versions}
    return AdapterEntry(BASE, name, revision, dict(aliases), rows)


def resolved(view: RegistryView, text: str) -> str:
    return str(view.resolve(parse_model_name(text)).ref)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110 - the view has no event to wait for
            await asyncio.sleep(0.005)


class TestResolve:
    async def test_aliases_and_versions(self, view: RegistryView) -> None:
        assert resolved(view, f"{BASE}:{NAME}") == f"{BASE}:{NAME}@1"
        assert resolved(view, f"{BASE}:{NAME}@2") == f"{BASE}:{NAME}@2"
        assert resolved(view, f"{BASE}:{NAME}@latest") == f"{BASE}:{NAME}@2"
        answer = view.resolve(parse_model_name(f"{BASE}:{NAME}"), "key")
        assert (answer.digest, answer.rank, len(answer.files)) == (prepared("one").digest, 8, 2)

    async def test_unknown_names_hint_at_near_ones(self, view: RegistryView) -> None:
        with pytest.raises(errors.ModelNotFound, match=rf"did you mean `{BASE}:maze`"):
            resolved(view, f"{BASE}:maize")
        with pytest.raises(errors.ModelNotFound) as caught:
            resolved(view, f"{BASE}:zzzzzzz")
        assert caught.value.hint is None
        with pytest.raises(errors.ModelNotFound, match="the newest is 2"):
            resolved(view, f"{BASE}:{NAME}@3")
        with pytest.raises(errors.ModelNotFound, match="it has `@production`"):
            resolved(view, f"{BASE}:{NAME}@canary")
        with pytest.raises(errors.InvalidModelName):
            view.resolve(parse_model_name(BASE))

    async def test_hidden_adapters_are_as_unknown_as_invented_ones(self, view: RegistryView) -> None:
        def see(name: str) -> str:
            with pytest.raises(errors.ModelNotFound) as caught:
                view.resolve(parse_model_name(f"{BASE}:{name}"), may_see=lambda entry: False)
            return str(caught.value).replace(name, "?")

        assert see(NAME) == see("maza")

    async def test_retired(self, view: RegistryView, registry: Registry) -> None:
        await registry.retire(AdapterRef(BASE, NAME, 2))
        await view.refresh()
        with pytest.raises(errors.VersionRetired):
            resolved(view, f"{BASE}:{NAME}@2")
        assert resolved(view, f"{BASE}:{NAME}@latest") == f"{BASE}:{NAME}@1"
        await registry.restore(AdapterRef(BASE, NAME, 2))
        await view.refresh()
        assert resolved(view, f"{BASE}:{NAME}@2") == f"{BASE}:{NAME}@2"

    async def test_before_the_first_look_nothing_is_not_found(self, registry: Registry) -> None:
        view = RegistryView(registry, 1.0)
        with pytest.raises(errors.StoreUnreachable):
            resolved(view, f"{BASE}:{NAME}")
        assert (view.loaded, view.age_s, view.generation) == (False, None, 0)

    async def test_an_empty_registry_is_loaded(self) -> None:
        view = RegistryView(Registry(FakeStore()), 1.0)
        await view.refresh()
        assert view.loaded and view.generation == 1
        with pytest.raises(errors.ModelNotFound):
            resolved(view, f"{BASE}:{NAME}")


class TestCost:
    async def test_one_listing_and_the_changed_shards(self, view: RegistryView, registry: Registry, fake: FakeStore) -> None:
        fake.calls.clear()
        await view.refresh()
        assert dict(fake.calls) == {("list", "index/"): 1}
        await registry.promote(BASE, NAME, "production", 2)
        fake.calls.clear()
        await view.refresh()
        assert dict(fake.calls) == {("list", "index/"): 1, ("get", layout.shard_key(layout.shard_of(BASE, NAME))): 1}

    async def test_invented_names_cost_no_call_and_no_memory(self, view: RegistryView, fake: FakeStore) -> None:
        fake.calls.clear()
        names = [parse_model_name(f"{BASE}:invented-{number}") for number in range(2000)]

        def ask() -> None:
            for name in names:
                with pytest.raises(errors.ModelNotFound):
                    view.resolve(name)

        ask()
        tracemalloc.start()
        ask()
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert grown < 100_000
        assert not fake.calls

    async def test_a_large_registry_answers_fast(self, view: RegistryView) -> None:
        view._apply(entry(f"team{number % 50}/adapter-{number:05d}", production=1) for number in range(10_000))
        known = parse_model_name(f"{BASE}:team7/adapter-00007")
        started = time.perf_counter()
        for _ in range(1000):
            view.resolve(known)
        assert (time.perf_counter() - started) / 1000 < 0.0001
        started = time.perf_counter()
        for number in range(20):
            with pytest.raises(errors.ModelNotFound, match="did you mean"):
                resolved(view, f"{BASE}:team7/adapter-0{number}x07")
        assert (time.perf_counter() - started) / 20 < 0.05


class TestOnlyForward:
    async def test_an_older_row_changes_nothing(self, view: RegistryView) -> None:
        before, generation = view.entry(BASE, NAME), view.generation
        assert before is not None
        view._apply([replace(before, revision=1, aliases={"production": 2})])
        assert (view.entry(BASE, NAME), view.generation) == (before, generation)

    def test_merge(self) -> None:
        old, new = entry(revision=2, versions=(1, 2), production=2), entry(revision=3, versions=(2, 3), production=3)
        assert merge(None, old) == old
        for merged in (merge(old, new), merge(new, old)):
            assert (merged.revision, merged.aliases, list(merged.versions)) == (3, {"production": 3}, [1, 2, 3])

    def test_a_version_never_changes_its_digest(self) -> None:
        merged = merge(entry(digest="a"), entry(revision=9, digest="b"))
        assert (merged.revision, merged.versions[1].digest) == (9, "a1")

    def test_retirement_follows_the_newer_revision(self) -> None:
        live = entry(revision=4)
        retired = replace(entry(revision=3), versions={1: replace(entry().versions[1], retired=True)})
        assert not merge(retired, live).versions[1].retired
        assert not merge(live, retired).versions[1].retired

    async def test_a_lost_shard_takes_nothing_away(self, view: RegistryView, fake: FakeStore) -> None:
        await fake.delete(layout.shard_key(layout.shard_of(BASE, NAME)))
        await view.refresh()
        assert resolved(view, f"{BASE}:{NAME}") == f"{BASE}:{NAME}@1"

    async def test_the_generation_counts_changes(self, view: RegistryView, registry: Registry) -> None:
        before = view.generation
        await view.refresh()
        assert view.generation == before
        await registry.promote(BASE, NAME, "production", 2)
        await view.refresh()
        assert view.generation == before + 1


class TestTrouble:
    async def test_the_last_good_picture_serves_on(self, view: RegistryView, registry: Registry, fake: FakeStore) -> None:
        polling = asyncio.create_task(view.run())
        fake.fail(errors.StoreUnreachable("down"), times=math.inf)
        await until(lambda: isinstance(view.last_error, errors.StoreUnreachable))
        age = view.age_s
        assert age is not None and (view.age_s or 0) > age  # it grows
        assert resolved(view, f"{BASE}:{NAME}") == f"{BASE}:{NAME}@1"
        with pytest.raises(errors.StoreUnreachable):
            await view.refresh()
        fake.heal()
        await registry.promote(BASE, NAME, "production", 2)
        await until(lambda: resolved(view, f"{BASE}:{NAME}") == f"{BASE}:{NAME}@2")
        await until(lambda: view.last_error is None)
        polling.cancel()

    async def test_an_unreadable_shard_is_trouble_not_absence(self, registry: Registry, fake: FakeStore) -> None:
        shard = layout.shard_of(BASE, NAME)
        await fake.put(layout.shard_key(shard), b"garbage")
        view = RegistryView(registry, 1.0)
        with pytest.raises(errors.StoreError, match="can't be read"):
            await view.refresh()
        with pytest.raises(errors.StoreUnreachable):
            resolved(view, f"{BASE}:{NAME}")
        await registry.sweep()
        await view.refresh()
        assert resolved(view, f"{BASE}:{NAME}") == f"{BASE}:{NAME}@1"

    async def test_a_new_unreadable_shard_is_trouble_for_its_names_only(self, view: RegistryView, fake: FakeStore) -> None:
        shard = layout.shard_of(BASE, "new")
        await fake.put(layout.shard_key(shard), b"garbage")
        with pytest.raises(errors.StoreError):
            await view.refresh()
        with pytest.raises(errors.StoreUnreachable):
            resolved(view, f"{BASE}:new")
        other = next(f"n{i}" for i in range(100) if layout.shard_of(BASE, f"n{i}") != shard)
        with pytest.raises(errors.ModelNotFound):
            resolved(view, f"{BASE}:{other}")

    async def test_one_bad_shard_does_not_stop_the_others(self, view: RegistryView, registry: Registry, fake: FakeStore) -> None:
        other = next(f"n{i}" for i in range(100) if layout.shard_of(BASE, f"n{i}") != layout.shard_of(BASE, NAME))
        await registry.publish(BASE, other, prepared("three"))
        await fake.put(layout.shard_key(layout.shard_of(BASE, NAME)), b"garbage")
        with pytest.raises(errors.StoreError):
            await view.refresh()
        assert resolved(view, f"{BASE}:{other}@1") == f"{BASE}:{other}@1"
        assert resolved(view, f"{BASE}:{NAME}") == f"{BASE}:{NAME}@1"


class TestWaiting:
    async def test_until_it_is_seen(self, view: RegistryView, registry: Registry) -> None:
        head = await registry.promote(BASE, NAME, "production", 2)
        assert await view.wait_seen(BASE, NAME, head.revision)
        await registry.publish(BASE, NAME, prepared("three"))
        assert await view.wait_seen(BASE, NAME, version=3)
        assert not await view.wait_seen(BASE, NAME, head.revision + 1, timeout_s=0.05)


async def test_each_row_that_changed_is_told_once_and_others_are_not(registry: Registry) -> None:
    told: list[tuple[str, int]] = []
    view = RegistryView(registry, 1, on_change=lambda row: told.append((row.name, row.revision)))
    await view.refresh()
    assert [name for name, _ in told] == [NAME]
    await view.refresh()
    await registry.publish(BASE, "other", prepared("three"))
    await view.refresh()
    assert [name for name, _ in told] == [NAME, "other"]
