"""A gateway keeps the index in repair without being asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from adapters.errors import StoreUnreachable
from adapters.registry import Registry, layout
from adapters.registry.keeper import keep_index
from adapters.settings import StoreSettings
from adapters.store import open_store
from tests.fake_store import FakeStore
from tests.prepared import prepared


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(500):
        if await condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never became true")


async def test_a_version_whose_publisher_died_before_the_index_is_shown() -> None:
    store = FakeStore()
    registry = Registry(store)
    await registry.publish("demo", "a", prepared("a-1"))
    store.fail(StoreUnreachable("gone"), method="replace", key_part="index/", times=1000)
    with pytest.raises(StoreUnreachable):
        await registry.publish("demo", "a", prepared("a-2"))
    store.heal()
    keeping = asyncio.create_task(keep_index(registry, interval_s=0.01))

    async def shown() -> bool:
        return 2 in (await registry.index.entry("demo", "a")).versions

    await until(shown)
    keeping.cancel()


async def test_it_survives_a_store_that_fails() -> None:
    store = FakeStore()
    registry = Registry(store)
    await registry.publish("demo", "a", prepared("a-1"))
    await store.delete(layout.shard_key(layout.shard_of("demo", "a")))
    store.fail(StoreUnreachable("gone"), times=3)
    keeping = asyncio.create_task(keep_index(registry, interval_s=0.01))

    async def back() -> bool:
        return layout.shard_key(layout.shard_of("demo", "a")) in store.objects

    await until(back)
    keeping.cancel()


async def test_a_real_store_is_swept_from_its_thread(s3_settings: StoreSettings) -> None:
    registry = Registry(open_store(s3_settings))
    await registry.publish("demo", "a", prepared("a-1"))
    await registry.store.delete(layout.shard_key(layout.shard_of("demo", "a")))
    keeping = asyncio.create_task(keep_index(registry, interval_s=0.01))

    async def back() -> bool:
        return await registry.index.entry("demo", "a") is not None

    await until(back)
    keeping.cancel()
