"""A writer that dies, or loses an answer, at any write: nothing half visible, and the next try completes."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from adapters import errors
from adapters.names import AdapterRef
from adapters.registry import Registry, layout
from adapters.settings import StoreSettings
from adapters.store import Listed, Object, Store, open_store
from adapters.types import By
from tests.fake_store import FakeStore
from tests.prepared import prepared

BASE, NAME = "Qwen/Qwen3-0.6B", "maze"

Work = Callable[[Registry], Awaitable[object]]


class Crash(Exception):
    """The process died."""


class DyingStore:
    """Passes all on until write number `at`, which fails before or after its effect. A death ends all later calls, too; a lost
    answer (`StoreUnreachable`) is the end of that one call."""

    def __init__(self, store: Store, at: int, *, after: bool, error: Exception) -> None:
        self.store, self.at, self.after, self.error = store, at, after, error
        self.writes = 0
        self.dead = False

    @property
    def struck(self) -> bool:
        return self.writes >= self.at

    async def get(self, key: str) -> Object:
        self._check()
        return await self.store.get(key)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        self._check()
        return await self.store.get_range(key, start, length)

    async def list(self, prefix: str) -> AsyncIterator[Listed]:
        self._check()
        async for row in self.store.list(prefix):
            yield row

    async def create(self, key: str, data: bytes) -> str:
        return await self._write(lambda: self.store.create(key, data))

    async def replace(self, key: str, data: bytes, etag: str) -> str:
        return await self._write(lambda: self.store.replace(key, data, etag))

    async def put(self, key: str, data: bytes) -> str:
        return await self._write(lambda: self.store.put(key, data))

    async def delete(self, key: str) -> None:
        await self._write(lambda: self.store.delete(key))

    def _check(self) -> None:
        if self.dead:
            raise Crash

    async def _write(self, write: Callable[[], Awaitable]) -> str:
        self._check()
        self.writes += 1
        strikes = self.writes == self.at
        if strikes and not self.after:
            self.dead = isinstance(self.error, Crash)
            raise self.error
        if not strikes:
            return await write()
        with contextlib.suppress(errors.StoreConflict):  # the answer is lost, whatever it was
            await write()
        self.dead = isinstance(self.error, Crash)
        raise self.error


async def check_visible_is_whole(store: Store) -> None:
    """Whatever a reader can see is complete: manifests have their blobs, index rows their manifests and no newer revision."""
    registry = Registry(store)
    for adapter, listed in (await registry.truth.adapters()).items():
        for manifest in await registry.truth.manifests(*adapter, listed.versions):
            for file in manifest.files:
                assert len((await store.get(layout.blob_key(manifest.digest, file.name))).data) == file.size_bytes
    for shard in await registry.index.etags():
        for entry in (await registry.index.fetch(shard))[0]:
            assert set(entry.versions) <= set(await registry.versions(entry.base, entry.name))
            assert entry.revision <= (await registry.head(entry.base, entry.name)).revision
            assert set(entry.aliases.values()) <= set(entry.versions)


async def check_index_is_true(store: Store) -> None:
    registry = Registry(store)
    assert await registry.index.entry(BASE, NAME) == await registry.entry(BASE, NAME)
    assert (await registry.sweep()).repaired == ()


async def crash_at_each_write(prepare: Work, work: Work, after: bool) -> AsyncIterator[Store]:
    """Stores in which `work` died at write 1, 2, 3, ..., until one run needs no more writes."""
    for at in itertools.count(1):
        store = open_store(StoreSettings(url="memory://"))
        await prepare(Registry(store))
        dying = DyingStore(store, at, after=after, error=Crash())
        try:
            await work(Registry(dying))
        except Crash:
            yield store
            continue
        assert not dying.struck and at > 2
        return


async def two_versions(registry: Registry) -> None:
    await registry.publish(BASE, NAME, prepared("one"))
    await registry.publish(BASE, NAME, prepared("two"))
    await registry.promote(BASE, NAME, "production", 1)


async def nothing(registry: Registry) -> None:
    pass


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
class TestDeath:
    @pytest.mark.parametrize(("prepare", "expected"), [(nothing, 1), (two_versions, 3)])
    async def test_of_a_publisher(self, after: bool, prepare: Work, expected: int) -> None:
        async for store in crash_at_each_write(prepare, lambda r: r.publish(BASE, NAME, prepared("new")), after):
            await check_visible_is_whole(store)
            done = await Registry(store).publish(BASE, NAME, prepared("new"))
            assert done.ref.version == expected
            assert await Registry(store).versions(BASE, NAME) == list(range(1, expected + 1))
            await check_index_is_true(store)

    async def test_of_a_publisher_and_another_comes(self, after: bool) -> None:
        async for store in crash_at_each_write(nothing, lambda r: r.publish(BASE, NAME, prepared("new")), after):
            done = await Registry(store).publish(BASE, NAME, prepared("other"))
            assert done.created
            assert await Registry(store).versions(BASE, NAME) == list(range(1, done.ref.version + 1))
            await check_visible_is_whole(store)
            await check_index_is_true(store)

    async def test_of_a_promoter(self, after: bool) -> None:
        async for store in crash_at_each_write(two_versions, lambda r: r.promote(BASE, NAME, "production", 2), after):
            await check_visible_is_whole(store)
            head = await Registry(store).promote(BASE, NAME, "production", 2)
            assert head.aliases == {"production": 2} and len(head.history) == 2
            await check_index_is_true(store)

    async def test_of_one_who_retires(self, after: bool) -> None:
        async for store in crash_at_each_write(two_versions, lambda r: r.retire(AdapterRef(BASE, NAME, 2)), after):
            await check_visible_is_whole(store)
            await Registry(store).retire(AdapterRef(BASE, NAME, 2))
            await check_index_is_true(store)


class TestLostAnswers:
    """The write took place, its answer did not come: head and manifest writers know their own work."""

    @pytest.mark.parametrize("key_part", ["manifest.json", "head.json"])
    async def test_of_truth_succeed(self, key_part: str) -> None:
        store = open_store(StoreSettings(url="memory://"))
        registry = Registry(LosingStore(store, key_part))
        done = await registry.publish(BASE, NAME, prepared())
        assert done.created and done.ref.version == 1
        registry.store.lose = True  # type: ignore[attr-defined]
        head = await registry.promote(BASE, NAME, "production", 1, By(expected_revision=1))
        assert (head.revision, len(head.history)) == (2, 1)
        await check_index_is_true(store)

    async def test_own_work_is_known_after_others_went_on(self) -> None:
        store = open_store(StoreSettings(url="memory://"))
        await two_versions(Registry(store))
        losing = LosingStore(store, "head.json")

        async def somebody_else() -> None:
            await Registry(store).promote(BASE, NAME, "canary", 1)
            await Registry(store).promote(BASE, NAME, "production", 1)

        losing.then = somebody_else
        head = await Registry(losing).promote(BASE, NAME, "production", 2)
        assert head.aliases == {"production": 1, "canary": 1}  # ours was done and then overtaken; it is not done again
        await check_index_is_true(store)

    async def test_a_write_that_did_not_happen_is_done_again(self) -> None:
        store = open_store(StoreSettings(url="memory://"))
        await two_versions(Registry(store))
        dying = DyingStore(store, 1, after=False, error=errors.StoreUnreachable("no answer"))
        await Registry(dying).promote(BASE, NAME, "production", 2)
        head = await Registry(store).head(BASE, NAME)
        assert (head.aliases, len(head.history)) == ({"production": 2}, 2)

    @pytest.mark.parametrize("key_part", ["head.json", "manifest.json"])
    async def test_a_store_that_takes_no_write_is_an_error_soon(self, key_part: str) -> None:
        store = FakeStore()
        await two_versions(Registry(store))
        before = dict(store.objects)
        store.fail(errors.StoreUnreachable("no answer"), method="replace", key_part=key_part, times=math.inf)
        store.fail(errors.StoreUnreachable("no answer"), method="create", key_part=key_part, times=math.inf)
        tried = store.count(key_part=key_part)
        work = {
            "head.json": lambda: Registry(store).promote(BASE, NAME, "production", 2),
            "manifest.json": lambda: Registry(store).publish(BASE, NAME, prepared("three")),
        }
        with pytest.raises(errors.StoreUnreachable):
            await work[key_part]()
        assert store.count(key_part=key_part) - tried < 20
        assert {key: value for key, value in store.objects.items() if "blobs/" not in key} == {
            key: value for key, value in before.items() if "blobs/" not in key
        }

    async def test_a_tenth_of_all_calls_may_fail(self) -> None:
        store = FlakyStore(open_store(StoreSettings(url="memory://")), random.Random(5))
        for content in "abcdefgh":
            await until_it_works(lambda content=content: Registry(store).publish(BASE, NAME, prepared(content)))
        for version in (3, 1, 8):
            await until_it_works(lambda version=version: Registry(store).promote(BASE, NAME, "production", version))
        registry = Registry(store.store)
        assert await registry.versions(BASE, NAME) == list(range(1, 9))
        assert [row.to_version for row in (await registry.head(BASE, NAME)).history] == [3, 1, 8]
        await check_visible_is_whole(store.store)
        assert store.failures > 20


class FlakyStore(DyingStore):
    """Each write fails without an answer one time in ten, half of those after it took place; reads fail as well."""

    def __init__(self, store: Store, chance: random.Random) -> None:
        super().__init__(store, 0, after=False, error=errors.StoreUnreachable("no answer"))
        self.chance = chance
        self.failures = 0

    def _check(self) -> None:
        if self.chance.random() < 0.1:
            self.failures += 1
            raise self.error

    async def _write(self, write: Callable[[], Awaitable]) -> str:
        if self.chance.random() < 0.1:
            self.failures += 1
            if self.chance.random() < 0.5:
                with contextlib.suppress(errors.StoreConflict):
                    await write()
            raise self.error
        return await write()


async def until_it_works(work: Callable[[], Awaitable[object]]) -> None:
    """What a person does: the same command again."""
    for _ in range(20):
        with contextlib.suppress(errors.StoreUnreachable):
            await work()
            return
    raise AssertionError("it never worked")


class LosingStore(DyingStore):
    """Loses the answer of the next write to a key."""

    def __init__(self, store: Store, key_part: str) -> None:
        super().__init__(store, 0, after=True, error=errors.StoreUnreachable("no answer"))
        self.key_part = key_part
        self.lose = True
        self.then: Work | Callable[[], Awaitable[None]] | None = None

    async def create(self, key: str, data: bytes) -> str:
        return await self._lost(key, await self.store.create(key, data))

    async def replace(self, key: str, data: bytes, etag: str) -> str:
        return await self._lost(key, await self.store.replace(key, data, etag))

    async def _lost(self, key: str, etag: str) -> str:
        if not (self.lose and self.key_part in key):
            return etag
        self.lose = False
        if self.then is not None:
            await self.then()  # type: ignore[call-arg]
        raise self.error
