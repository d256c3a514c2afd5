"""The node cache within one process."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import math
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from adapters.cache import AdapterCache, sealing
from adapters.cache import cache as cache_module
from adapters.cache import folder as cache_folder
from adapters.cache.fetch import FileSink, plan_ranges
from adapters.cache.folder import CacheFolder
from adapters.cache.locks import FileLock
from adapters.cache.policy import CacheEntry, choose_victims
from adapters.errors import AdapterCorrupt, DiskFull, InternalError, StoreThrottled, StoreUnreachable
from adapters.names import AdapterRef
from adapters.settings import CacheSettings
from adapters.store import Store
from adapters.tree_digest import TREE_PART_BYTES, TreeDigest
from adapters.types import CONFIG_FILE, WEIGHTS_FILE, FileDigest, ResolvedAdapter, content_digest
from tests.fake_store import FakeStore

RANGE = 2**16
CONFIG = b'{"peft_type": "LORA", "r": 8}'
SIZE = 4 * RANGE + 100
LARGE = 2 * TREE_PART_BYTES + 1000
DOWN = StoreUnreachable("the store does not answer")

MakeCache = Callable[..., AdapterCache]


def adapter_of(seed: int, size: int = SIZE, *, by_parts: bool = False) -> tuple[ResolvedAdapter, bytes]:
    """An adapter of exactly `size` bytes, and its weights, whose digest is also given `by_parts` if they have several."""
    weights = (hashlib.sha256(str(seed).encode()).digest() * (size // 32 + 1))[: size - len(CONFIG)]
    contents = {CONFIG_FILE: CONFIG, WEIGHTS_FILE: weights}
    files = tuple(
        FileDigest(name, len(data), hashlib.sha256(data).hexdigest(), tree(data) if by_parts else None)
        for name, data in contents.items()
    )
    return ResolvedAdapter(AdapterRef("base", f"adapter-{seed}", 1), content_digest(files), files, 8), weights


def tree(data: bytes) -> str | None:
    digest = TreeDigest()
    digest.update(data)
    return digest.hexdigest()


async def published(store: FakeStore, seed: int, size: int = SIZE, *, by_parts: bool = False) -> ResolvedAdapter:
    adapter, weights = adapter_of(seed, size, by_parts=by_parts)
    await store.put(f"blobs/{adapter.digest}/{CONFIG_FILE}", CONFIG)
    await store.put(f"blobs/{adapter.digest}/{WEIGHTS_FILE}", weights)
    return adapter


class BackwardStore(FakeStore):
    """Answers the range that was asked for last first, once all have been asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.answered: list[int] = []

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        if key.endswith(CONFIG_FILE):
            return await super().get_range(key, start, length)
        number = start // RANGE
        await until(lambda: len(self.answered) == 9 - number)
        self.answered.append(number)
        return await super().get_range(key, start, length)


def weights_key(adapter: ResolvedAdapter) -> str:
    return f"blobs/{adapter.digest}/{WEIGHTS_FILE}"


def half_written(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / ".tmp").iterdir())


async def use(cache: AdapterCache, adapter: ResolvedAdapter) -> bool:
    """One short lease; whether it led a fetch."""
    async with await cache.lease(adapter) as lease:
        return lease.fetched


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
async def make_cache(store: FakeStore, tmp_path: Path) -> AsyncIterator[MakeCache]:
    """Builds caches on one folder; several of them are as several processes of a node, each with locks of its own."""
    caches: list[AdapterCache] = []

    def make(budget: int = 100 * SIZE, concurrency: int = 4, store: Store = store, at_once: int = 4) -> AdapterCache:
        settings = CacheSettings(
            dir=tmp_path, budget_bytes=budget, fetch_concurrency=concurrency, range_bytes=RANGE, fetches_at_once=at_once
        )
        caches.append(AdapterCache(store, settings))
        return caches[-1]

    yield make
    for cache in caches:
        await cache.close()


# Fetching once


async def test_a_lease_gives_a_folder_with_exactly_the_two_files(store: FakeStore, make_cache: MakeCache) -> None:
    adapter = await published(store, 1)
    async with await make_cache().lease(adapter) as lease:
        assert lease.fetched
        assert lease.fetch_s > 0
        assert lease.local.digest == adapter.digest
        assert lease.local.size_bytes == adapter.size_bytes
        assert sorted(os.listdir(lease.local.path)) == [CONFIG_FILE, WEIGHTS_FILE]
        assert (lease.local.path / WEIGHTS_FILE).read_bytes() == store.objects[weights_key(adapter)].data
        assert (lease.local.path / CONFIG_FILE).read_bytes() == CONFIG


async def test_64_leases_of_one_cold_digest_make_one_fetch(store: FakeStore, make_cache: MakeCache) -> None:
    adapter, cache = await published(store, 1), make_cache()
    leases = await asyncio.gather(*(cache.lease(adapter) for _ in range(64)))
    assert [lease.fetched for lease in leases].count(True) == 1
    assert store.count("get_range", CONFIG_FILE) == 1
    assert store.count("get_range", WEIGHTS_FILE) == math.ceil((SIZE - len(CONFIG)) / RANGE)


async def test_a_warm_lease_asks_the_store_nothing(store: FakeStore, make_cache: MakeCache) -> None:
    adapter, cache = await published(store, 1), make_cache()
    assert await use(cache, adapter)
    store.calls.clear()
    async with await cache.lease(adapter) as lease:
        assert (lease.fetched, lease.fetch_s) == (False, 0.0)
    assert store.count() == 0


async def test_a_finished_folder_is_used_after_a_restart_without_any_store_call(store: FakeStore, make_cache: MakeCache) -> None:
    adapter = await published(store, 1)
    await use(make_cache(), adapter)
    store.calls.clear()
    restarted = make_cache()
    assert await restarted.sweep() == 0
    assert restarted.has(adapter.digest)
    assert not await use(restarted, adapter)
    assert store.count() == 0


async def test_a_cancelled_waiter_does_not_stop_the_fetch(store: FakeStore, make_cache: MakeCache) -> None:
    adapter, cache = await published(store, 1), make_cache()
    store.gate = asyncio.Event()
    leader, follower = (asyncio.create_task(cache.lease(adapter)) for _ in range(2))
    await until(lambda: store.running > 0)
    leader.cancel()
    await asyncio.wait([leader])
    store.gate.set()
    (await follower).release()
    assert leader.cancelled()
    assert store.count("get_range", CONFIG_FILE) == 1


async def test_the_fetch_goes_on_when_all_waiters_are_cancelled_and_leaves_no_lease(
    store: FakeStore, make_cache: MakeCache
) -> None:
    adapter, cache = await published(store, 1), make_cache()
    store.gate = asyncio.Event()
    waiters = [asyncio.create_task(cache.lease(adapter)) for _ in range(3)]
    await until(lambda: store.running > 0)
    for waiter in waiters:
        waiter.cancel()
    await asyncio.wait(waiters)
    store.gate.set()
    await until(lambda: cache.has(adapter.digest))
    assert await cache.remove(adapter.digest)


async def test_a_failed_fetch_fails_its_waiters_and_the_next_call_succeeds(
    store: FakeStore, make_cache: MakeCache, tmp_path: Path
) -> None:
    adapter, cache = await published(store, 1), make_cache()
    store.fail(DOWN, method="get_range", key_part=WEIGHTS_FILE, at=3)
    results = await asyncio.gather(*(cache.lease(adapter) for _ in range(5)), return_exceptions=True)
    assert [type(result) for result in results] == [StoreUnreachable] * 5
    assert half_written(tmp_path) == []
    assert cache.used_bytes() == 0
    assert not cache.has(adapter.digest)
    assert await use(cache, adapter)


async def test_other_store_errors_pass_as_they_are(store: FakeStore, make_cache: MakeCache) -> None:
    adapter = await published(store, 1)
    store.fail(StoreThrottled("slow down", retry_after_s=2.0), method="get_range")
    with pytest.raises(StoreThrottled) as caught:
        await make_cache().lease(adapter)
    assert caught.value.retry_after_s == 2.0


async def test_a_fetch_that_is_closed_leaves_nothing_half_written(
    store: FakeStore, make_cache: MakeCache, tmp_path: Path
) -> None:
    adapter, cache = await published(store, 1), make_cache()
    store.gate = asyncio.Event()
    waiter = asyncio.create_task(cache.lease(adapter))
    await until(lambda: store.running > 0)
    await cache.close()
    await asyncio.wait([waiter])
    assert half_written(tmp_path) == []
    assert store.running == 0


async def test_ranges_are_read_in_parallel_and_no_more_of_them_than_allowed(store: FakeStore, make_cache: MakeCache) -> None:
    adapter = await published(store, 1, 20 * RANGE)
    await use(make_cache(concurrency=6), adapter)
    assert store.most_running == 6


async def test_different_digests_fetch_in_parallel(store: FakeStore, make_cache: MakeCache) -> None:
    adapters, cache = [await published(store, seed) for seed in range(3)], make_cache(concurrency=2)
    store.gate = asyncio.Event()
    waiters = [asyncio.create_task(cache.lease(adapter)) for adapter in adapters]
    await until(lambda: store.running == 6)
    store.gate.set()
    await asyncio.gather(*waiters)


async def test_fetches_beyond_the_limit_wait_their_turn_and_one_that_fails_gives_its_turn_on(
    store: FakeStore, make_cache: MakeCache
) -> None:
    adapters, cache = [await published(store, seed) for seed in range(4)], make_cache(at_once=2)
    store.gate = asyncio.Event()
    store.fail(DOWN, method="get_range", key_part=adapters[0].digest)
    waiters = [asyncio.create_task(cache.fetch(adapter)) for adapter in adapters]

    def reading() -> int:
        return sum(store.count("get_range", adapter.digest) > 0 for adapter in adapters[1:])

    await until(lambda: waiters[0].done() and reading() >= 2)
    assert reading() == 2, "which of them comes last is not said"
    store.gate.set()
    results = await asyncio.gather(*waiters, return_exceptions=True)
    assert [type(result) for result in results] == [StoreUnreachable, bool, bool, bool]


async def test_ranges_that_come_in_the_wrong_order_make_the_right_file(make_cache: MakeCache) -> None:
    adapter = await published(store := BackwardStore(), 1, 10 * RANGE)
    cache = make_cache(store=store, concurrency=20)
    async with await cache.lease(adapter) as lease:
        assert (lease.local.path / WEIGHTS_FILE).read_bytes() == adapter_of(1, 10 * RANGE)[1]
    assert store.answered == sorted(store.answered, reverse=True)


async def test_reading_begins_while_room_is_being_made_but_does_not_run_ahead_of_it(
    store: FakeStore, make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, cache = await published(store, 1, 20 * RANGE), make_cache(concurrency=3)
    room, reserve = threading.Event(), CacheFolder.reserve
    monkeypatch.setattr(CacheFolder, "reserve", lambda *args: room.wait(5) and reserve(*args))
    fetching = asyncio.create_task(cache.fetch(adapter))
    await until(lambda: store.count("get_range") == 3)
    await asyncio.sleep(0.02)
    assert store.count("get_range") == 3
    room.set()
    assert await fetching


async def test_no_room_ends_a_fetch_whose_reads_hang(store: FakeStore, make_cache: MakeCache) -> None:
    adapter, cache = await published(store, 1), make_cache(budget=SIZE - 1)
    store.gate = asyncio.Event()
    with pytest.raises(DiskFull):
        await cache.fetch(adapter)
    assert store.running == 0


async def test_fetch_brings_an_adapter_to_the_disk_and_keeps_no_lease(store: FakeStore, make_cache: MakeCache) -> None:
    adapter, cache = await published(store, 1), make_cache()
    assert await cache.fetch(adapter)
    assert not await cache.fetch(adapter)
    assert cache.has(adapter.digest)
    assert await cache.remove(adapter.digest)


def test_files_checked_by_parts_are_cut_into_whole_parts() -> None:
    file = FileDigest("a", 5 * TREE_PART_BYTES + 7, "", tree="")
    for range_bytes, longest in ((RANGE, 1), (TREE_PART_BYTES, 1), (3 * TREE_PART_BYTES - 1, 2), (9 * TREE_PART_BYTES, 6)):
        parts = list(plan_ranges((file,), range_bytes))
        assert {part.start % TREE_PART_BYTES for part in parts} == {0}
        assert max(part.length for part in parts) == min(longest * TREE_PART_BYTES, file.size_bytes)
        assert sum(part.length for part in parts) == file.size_bytes


async def test_a_large_file_is_checked_by_parts_and_its_whole_digest_before_it_is_sealed(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = await published(store := FakeStore(), 1, LARGE, by_parts=True)
    cache = make_cache(store=store, budget=10 * LARGE)
    disk = SlowDisk(monkeypatch)
    async with await cache.lease(adapter) as lease:
        assert (lease.local.path / WEIGHTS_FILE).read_bytes() == adapter_of(1, LARGE)[1]
    disk.go_on()
    await cache.close()
    assert not writable(cache, adapter)


@pytest.mark.parametrize("position", [0, TREE_PART_BYTES, LARGE - len(CONFIG) - 1])
async def test_a_corrupt_byte_in_any_part_never_becomes_visible(make_cache: MakeCache, position: int) -> None:
    adapter = await published(store := FakeStore(), 1, LARGE, by_parts=True)
    broken = bytearray(store.objects[weights_key(adapter)].data)
    broken[position] ^= 1
    await store.put(weights_key(adapter), bytes(broken))
    cache = make_cache(store=store, budget=10 * LARGE)
    with pytest.raises(AdapterCorrupt) as caught:
        await cache.lease(adapter)
    assert caught.value.reason == "digest_mismatch"
    assert not cache.has(adapter.digest)


async def test_parts_that_are_right_in_a_file_that_is_not_leave_the_disk_when_no_lease_forbids_it(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest whose two digests of one file disagree."""
    monkeypatch.setattr(cache_module, "DROP_AGAIN_S", 0.01)
    good, (other, weights) = await published(store := FakeStore(), 1, LARGE, by_parts=True), adapter_of(2, LARGE, by_parts=True)
    await store.put(weights_key(good), weights)
    files = tuple(replace(file, tree=wrong.tree) for file, wrong in zip(good.files, other.files, strict=True))
    cache = make_cache(store=store, budget=10 * LARGE)
    async with await cache.lease(replace(good, files=files)):
        await until(lambda: bool(cache._dropping))
        assert cache.has(good.digest)
    await until(lambda: not cache.has(good.digest))


def test_ranges_cover_each_file_once_and_in_order() -> None:
    files = (FileDigest("a", 5, ""), FileDigest("empty", 0, ""), FileDigest("b", 4, ""))
    parts = [(part.file.name, part.start, part.length) for part in plan_ranges(files, 2)]
    assert parts == [("a", 0, 2), ("a", 2, 2), ("a", 4, 1), ("b", 0, 2), ("b", 2, 2)]


# What is visible is verified


async def test_a_corrupt_byte_never_becomes_visible(store: FakeStore, make_cache: MakeCache, tmp_path: Path) -> None:
    adapter, cache = await published(store, 1), make_cache()
    whole = store.objects[weights_key(adapter)].data
    for position in (0, SIZE // 2, len(whole) - 1):
        broken = bytearray(whole)
        broken[position] ^= 1
        await store.put(weights_key(adapter), bytes(broken))
        with pytest.raises(AdapterCorrupt) as caught:
            await cache.lease(adapter)
        assert caught.value.reason == "digest_mismatch"
        assert not cache.has(adapter.digest)
        assert half_written(tmp_path) == []
    await store.put(weights_key(adapter), whole)
    assert await use(cache, adapter)


@pytest.mark.parametrize("missing_bytes", [1, RANGE, SIZE])
async def test_a_truncated_blob_is_refused(store: FakeStore, make_cache: MakeCache, missing_bytes: int) -> None:
    adapter, cache = await published(store, 1), make_cache()
    whole = store.objects[weights_key(adapter)].data
    await store.put(weights_key(adapter), whole[: max(0, len(whole) - missing_bytes)])
    with pytest.raises(AdapterCorrupt) as caught:
        await cache.lease(adapter)
    assert caught.value.reason == "short_file"
    assert caught.value.limit == len(whole)
    assert caught.value.value < len(whole)
    assert not cache.has(adapter.digest)


async def test_a_blob_that_a_manifest_names_and_the_store_lacks_is_corruption_not_absence(
    store: FakeStore, make_cache: MakeCache
) -> None:
    adapter = await published(store, 1)
    await store.delete(weights_key(adapter))
    with pytest.raises(AdapterCorrupt) as caught:
        await make_cache().lease(adapter)
    assert caught.value.reason == "blob_missing"


async def test_a_manifest_whose_digests_disagree_is_refused_before_any_store_call(
    store: FakeStore, make_cache: MakeCache
) -> None:
    one, two = adapter_of(1)[0], adapter_of(2)[0]
    escaping = (FileDigest("../evil", 1, "0" * 64), FileDigest(WEIGHTS_FILE, 1, "0" * 64))
    for files, digest in ((one.files, two.digest), (one.files[:1], one.digest), (escaping, content_digest(escaping))):
        with pytest.raises(AdapterCorrupt) as caught:
            await make_cache().lease(ResolvedAdapter(one.ref, digest, files, 8))
        assert caught.value.reason == "bad_manifest"
    assert store.count() == 0


async def test_a_finished_folder_that_was_damaged_later_is_fetched_again(store: FakeStore, make_cache: MakeCache) -> None:
    adapter, cache = await published(store, 1), make_cache()
    await use(cache, adapter)
    (cache._folder.path(adapter.digest) / CONFIG_FILE).unlink()
    assert await use(cache, adapter)
    assert sorted(os.listdir(cache._folder.path(adapter.digest))) == [CONFIG_FILE, WEIGHTS_FILE]


async def test_a_file_that_somebody_wrote_to_is_fetched_again_though_its_size_is_right(
    store: FakeStore, make_cache: MakeCache
) -> None:
    adapter, cache = await published(store, 1), make_cache()
    await use(cache, adapter)
    await cache.close()
    weights = cache._folder.path(adapter.digest) / WEIGHTS_FILE
    good = weights.read_bytes()
    weights.chmod(0o644)
    with weights.open("r+b") as file:
        file.seek(len(good) // 2)
        file.write(bytes([good[len(good) // 2] ^ 1]))
    cache = make_cache()
    assert await use(cache, adapter)
    assert weights.read_bytes() == good


async def test_files_that_were_written_to_and_are_right_are_hashed_once_and_not_fetched(
    store: FakeStore, make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, cache = await published(store, 1), make_cache()
    await use(cache, adapter)
    os.utime(cache._folder.path(adapter.digest) / WEIGHTS_FILE)  # as a copy of the cache, or one of an earlier version
    hashed: list[ResolvedAdapter] = []
    holds = cache._folder.holds
    monkeypatch.setattr(cache._folder, "holds", lambda adapter: hashed.append(adapter) or holds(adapter))
    assert [await use(cache, adapter) for _ in range(3)] == [False] * 3
    assert hashed == [adapter]


# Found damaged at load


async def test_verify_finds_nothing_wrong_with_whole_files_and_asks_the_store_nothing(
    store: FakeStore, make_cache: MakeCache
) -> None:
    adapter, cache = await published(store, 1), make_cache()
    async with await cache.lease(adapter):
        store.calls.clear()
        assert not await cache.verify(adapter)
    assert store.count() == 0


async def test_verify_replaces_damaged_files_with_one_fetch_however_many_ask(store: FakeStore, make_cache: MakeCache) -> None:
    adapter, cache = await published(store, 1), make_cache()
    lease = await cache.lease(adapter)
    damage(lease.local.path)
    store.calls.clear()
    assert await asyncio.gather(*(cache.verify(adapter) for _ in range(16))) == [True] * 16
    assert store.count("get_range", CONFIG_FILE) == 1
    assert (lease.local.path / WEIGHTS_FILE).read_bytes() == adapter_of(1)[1]
    assert not await make_cache().remove(adapter.digest)
    lease.release()
    assert await cache.remove(adapter.digest)


async def test_files_damaged_here_and_in_the_store_are_corrupt_and_leave_the_disk(
    store: FakeStore, make_cache: MakeCache
) -> None:
    adapter, cache = await published(store, 1), make_cache()
    async with await cache.lease(adapter) as lease:
        damage(lease.local.path)
        await store.put(weights_key(adapter), b"x" * (SIZE - len(CONFIG)))
        with pytest.raises(AdapterCorrupt) as caught:
            await cache.verify(adapter)
    assert caught.value.reason == "digest_mismatch"
    assert not cache.has(adapter.digest)
    await published(store, 1)
    assert await use(cache, adapter)


def damage(folder: Path) -> None:
    """One bit, the size stays."""
    path = folder / WEIGHTS_FILE
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(RANGE)
        byte = file.read(1)[0]
        file.seek(RANGE)
        file.write(bytes([byte ^ 1]))


# Syncing, and power that fails


async def test_a_lease_does_not_wait_for_the_disk_but_close_does(
    store: FakeStore, make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, cache = await published(store, 1), make_cache()
    disk = SlowDisk(monkeypatch)
    assert await use(cache, adapter)
    assert writable(cache, adapter)
    closing = asyncio.create_task(cache.close())
    await until(lambda: disk.asked)
    assert not closing.done()
    disk.go_on()
    await closing
    assert not writable(cache, adapter)


async def test_what_was_synced_is_used_after_a_power_loss_and_not_read_again(
    store: FakeStore, make_cache: MakeCache, boots: Boots, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, cache = await published(store, 1), make_cache()
    await use(cache, adapter)
    await cache.close()
    boots.next()
    store.calls.clear()
    monkeypatch.setattr(hashlib, "file_digest", None)
    cache = make_cache()
    assert await cache.sweep() == 0
    assert not await use(cache, adapter)
    assert store.count() == 0


async def test_what_was_not_synced_before_a_power_loss_is_hashed_before_it_is_used(
    store: FakeStore, make_cache: MakeCache, boots: Boots, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = await published(store, 1), await published(store, 2)
    with monkeypatch.context() as patched:
        patched.setattr(CacheFolder, "seal", lambda *_, **__: None)
        before = make_cache()
        await use(before, whole)
        await use(before, broken)
        await before.close()
    damage(before._folder.path(broken.digest))
    boots.next()
    cache = make_cache()
    assert not cache.has(whole.digest) and not cache.has(broken.digest), "neither is trusted unseen"
    assert cache.used_bytes() == 2 * SIZE
    store.calls.clear()
    assert await cache.sweep() == 1
    assert not await use(cache, whole)
    assert store.count() == 0
    assert not writable(cache, whole)
    assert not cache.has(broken.digest)
    assert cache.used_bytes() == SIZE


async def test_looking_at_a_cache_after_a_power_loss_shows_all_of_it_and_changes_nothing(
    store: FakeStore, make_cache: MakeCache, boots: Boots, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    adapter, cache = await published(store, 1), make_cache()
    with monkeypatch.context() as patched:
        patched.setattr(CacheFolder, "seal", lambda *_, **__: None)
        await use(cache, adapter)
        await cache.close()
    boots.next()
    looking = CacheFolder(tmp_path, SIZE)
    assert [entry.digest for entry in looking.entries()] == [adapter.digest]
    assert looking.remove(adapter.digest)
    assert bytes_on_disk(tmp_path) == 0


async def test_without_a_sweep_what_was_not_synced_before_a_power_loss_is_fetched_again(
    store: FakeStore, make_cache: MakeCache, boots: Boots, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, cache = await published(store, 1), make_cache()
    with monkeypatch.context() as patched:
        patched.setattr(CacheFolder, "seal", lambda *_, **__: None)
        await use(cache, adapter)
        await cache.close()
    boots.next()
    assert await use(make_cache(), adapter)


async def test_a_process_that_died_before_it_synced_leaves_files_that_are_good_until_the_next_boot(
    store: FakeStore, make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, cache = await published(store, 1), make_cache()
    with monkeypatch.context() as patched:
        patched.setattr(CacheFolder, "seal", lambda *_, **__: None)
        await use(cache, adapter)
        await cache.close()
    restarted = make_cache()
    assert not await use(restarted, adapter)
    assert writable(restarted, adapter)
    await restarted.sweep()
    assert not writable(restarted, adapter)


async def test_a_disk_that_fails_to_sync_keeps_nothing_that_it_may_have_lost(
    store: FakeStore, make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, cache = await published(store, 1), make_cache()
    with monkeypatch.context() as patched:
        patched.setattr(cache_module, "DROP_AGAIN_S", 0.01)
        disk = SlowDisk(patched, OSError(errno.EIO, "bad disk"))
        async with await cache.lease(adapter):
            disk.go_on()
            await until(lambda: bool(cache._dropping))
            await asyncio.sleep(0.03)
            assert cache.has(adapter.digest), "who uses it keeps it"
        await until(lambda: not cache.has(adapter.digest))
    assert await use(cache, adapter)


async def test_files_that_may_not_be_marked_as_synced_stay_in_use(
    store: FakeStore, make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, cache = await published(store, 1), make_cache()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "not yours")

    monkeypatch.setattr(os, "chmod", refuse)
    await use(cache, adapter)
    await cache.sweep()
    assert not await use(cache, adapter)


async def test_what_is_being_synced_is_deleted_only_after_that(
    store: FakeStore, make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old, new = await published(store, 1), await published(store, 2)
    cache = make_cache(budget=SIZE)
    disk = SlowDisk(monkeypatch)
    await use(cache, old)
    await until(lambda: disk.asked)
    waiter = asyncio.create_task(use(cache, new))
    await until(lambda: not cache.has(old.digest))
    await asyncio.sleep(0.02)
    assert half_written(tmp_path) == [f"{old.digest}.evicted"], "its bytes are still on the disk, so no others are"
    disk.go_on()
    assert await waiter


class SlowDisk:
    """`fsync` waits until `go_on`, and then may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: OSError | None = None) -> None:
        self.asked = False
        self._error = error
        self._gate = threading.Event()
        monkeypatch.setattr(os, "fsync", self._fsync)

    def go_on(self) -> None:
        self._gate.set()

    def _fsync(self, fd: int) -> None:
        self.asked = True
        assert self._gate.wait(5)
        if self._error:
            raise self._error


def writable(cache: AdapterCache, adapter: ResolvedAdapter) -> bool:
    return any((cache._folder.path(adapter.digest) / name).stat().st_mode & 0o222 for name in (CONFIG_FILE, WEIGHTS_FILE))


class Boots:
    """What the machine says of its boot; `next` is a power loss."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path = path
        self._number = 0
        monkeypatch.setattr(sealing, "_BOOT_ID", path)
        self.next()

    def next(self) -> None:
        self._number += 1
        self._path.write_text(f"boot-{self._number}\n")


@pytest.fixture
def boots(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Boots:
    return Boots(tmp_path_factory.mktemp("proc") / "boot_id", monkeypatch)


# The folder removed under the feet


def pull_away(folder: Path) -> None:
    """Removes the folder, also while somebody writes into it."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


async def test_a_removed_cache_is_made_anew_by_the_next_lease(store: FakeStore, make_cache: MakeCache, tmp_path: Path) -> None:
    adapter, other, cache = await published(store, 1), await published(store, 2), make_cache()
    lease = await cache.lease(adapter)
    await use(cache, other)
    await cache.close()
    pull_away(tmp_path)
    assert (cache.has(adapter.digest), cache.entries(), cache.used_bytes()) == (False, [], 0)
    cache = make_cache()
    assert await use(cache, other)
    pull_away(tmp_path)
    assert await cache.remove(adapter.digest)
    assert await cache.sweep() == 0
    lease.release()


async def test_a_lease_from_before_the_removal_protects_what_was_fetched_after_it(
    store: FakeStore, make_cache: MakeCache, tmp_path: Path
) -> None:
    adapter, cache = await published(store, 1), make_cache()
    first = await cache.lease(adapter)
    pull_away(tmp_path)
    second = await cache.lease(adapter)
    assert second.fetched
    neighbour = make_cache()
    assert not await neighbour.remove(adapter.digest)
    second.release()
    assert not await neighbour.remove(adapter.digest)
    first.release()
    assert await neighbour.remove(adapter.digest)


async def test_a_fetch_survives_the_removal_of_the_folder_that_it_writes_to(
    store: FakeStore, make_cache: MakeCache, tmp_path: Path
) -> None:
    adapter, cache = await published(store, 1), make_cache()
    store.gate = asyncio.Event()
    waiter = asyncio.create_task(cache.lease(adapter))
    await until(lambda: store.running > 0)
    pull_away(tmp_path)
    store.gate.set()
    async with await waiter as lease:
        assert (lease.local.path / WEIGHTS_FILE).read_bytes() == adapter_of(1)[1]


# Leases and the budget


async def test_leased_is_never_evicted_not_even_by_another_process(store: FakeStore, make_cache: MakeCache) -> None:
    leased, idle, new = [await published(store, seed) for seed in range(3)]
    cache, neighbour = make_cache(budget=2 * SIZE), make_cache(budget=2 * SIZE)
    lease = await cache.lease(leased)
    await use(cache, idle)
    await use(neighbour, new)
    assert cache.has(leased.digest)
    assert not cache.has(idle.digest)
    assert neighbour.evictions == 1
    lease.release()


async def test_remove_is_refused_while_any_lease_stands(store: FakeStore, make_cache: MakeCache) -> None:
    adapter, cache, neighbour = await published(store, 1), make_cache(), make_cache()
    leases = [await cache.lease(adapter) for _ in range(2)]
    for lease in leases:
        assert not await neighbour.remove(adapter.digest)
        lease.release()
        lease.release()
    assert await neighbour.remove(adapter.digest)
    assert not cache.has(adapter.digest)
    assert await neighbour.remove(adapter.digest)
    assert cache.used_bytes() == 0


async def test_the_least_recently_used_goes_first(store: FakeStore, make_cache: MakeCache) -> None:
    adapters, cache = [await published(store, seed) for seed in range(4)], make_cache(budget=3 * SIZE)
    for seed in (0, 1, 2, 0):
        await use(cache, adapters[seed])
        await asyncio.sleep(0.01)  # file times tick with the kernel's clock
    await use(cache, adapters[3])
    assert [cache.has(adapter.digest) for adapter in adapters] == [True, False, True, True]


async def test_one_look_at_rare_adapters_does_not_push_out_what_is_used_again_and_again_by_any_process(
    store: FakeStore, make_cache: MakeCache
) -> None:
    busy, *rare = [await published(store, seed) for seed in range(6)]
    cache, neighbour = make_cache(budget=3 * SIZE), make_cache(budget=3 * SIZE)
    for _ in range(3):
        await use(cache, busy)
        await use(neighbour, busy)
    for adapter in rare:
        await use(cache, adapter)
    assert cache.has(busy.digest)
    uses = {entry.digest: round(entry.uses, 2) for entry in neighbour.entries()}
    assert uses == {busy.digest: 6.0, rare[-1].digest: 1.0, rare[-2].digest: 1.0}


async def test_entries_and_used_bytes_tell_what_is_there(store: FakeStore, make_cache: MakeCache) -> None:
    adapters, cache = [await published(store, seed, SIZE + seed) for seed in range(2)], make_cache()
    for adapter in adapters:
        await use(cache, adapter)
    assert {entry.digest: entry.size_bytes for entry in cache.entries()} == {a.digest: a.size_bytes for a in adapters}
    assert all(entry.last_used > 0 for entry in cache.entries())
    assert cache.used_bytes() == 2 * SIZE + 1


async def test_the_budget_holds_to_the_byte_under_20_concurrent_fetches(
    store: FakeStore, make_cache: MakeCache, tmp_path: Path
) -> None:
    adapters, budget = [await published(store, seed) for seed in range(20)], 5 * SIZE
    caches = [make_cache(budget), make_cache(budget)]
    seen: list[int] = []

    async def fetch(number: int, adapter: ResolvedAdapter) -> None:
        while True:
            try:
                await use(caches[number % 2], adapter)
                seen.append(bytes_on_disk(tmp_path))
                return
            except DiskFull:
                seen.append(bytes_on_disk(tmp_path))
                await asyncio.sleep(0.005)

    async with asyncio.timeout(8):
        await asyncio.gather(*(fetch(number, adapter) for number, adapter in enumerate(adapters)))
    assert max(seen) == budget  # also reached, so that the last byte is really for use
    assert caches[0].used_bytes() == bytes_on_disk(tmp_path) <= budget
    assert caches[0].evictions + caches[1].evictions >= 15


def bytes_on_disk(folder: Path) -> int:
    """As an operator would count: all files, wherever they lie.

    Under the budget lock, so that nobody makes room and takes it while we walk; a file that is renamed counts once.
    """
    sizes: dict[int, int] = {}
    lock = FileLock.take_blocking(folder / ".locks" / "budget")
    try:
        for walked, _, names in os.walk(folder):  # unlike rglob it takes it calmly when a folder goes away meanwhile
            for name in names:
                with suppress(FileNotFoundError):
                    found = os.stat(os.path.join(walked, name))
                    sizes[found.st_ino] = found.st_size
    finally:
        lock.release()
    return sum(sizes.values())


async def test_no_room_is_a_clear_error_that_evicts_nothing_and_serving_goes_on(store: FakeStore, make_cache: MakeCache) -> None:
    leased, idle, big = await published(store, 1), await published(store, 2), await published(store, 3, 2 * SIZE)
    cache = make_cache(budget=2 * SIZE)
    lease = await cache.lease(leased)
    await use(cache, idle)
    with pytest.raises(DiskFull) as caught:
        await cache.lease(big)
    assert (caught.value.limit, caught.value.value) == (2 * SIZE, 2 * SIZE)
    assert caught.value.retry_after_s
    assert not await use(cache, idle)
    lease.release()
    assert await use(cache, big)


async def test_an_adapter_larger_than_the_whole_budget_is_refused_without_a_retry(
    store: FakeStore, make_cache: MakeCache
) -> None:
    adapter = await published(store, 1)
    with pytest.raises(DiskFull, match="larger than the whole cache") as caught:
        await make_cache(budget=SIZE - 1).lease(adapter)
    assert (caught.value.limit, caught.value.value, caught.value.retry_after_s) == (SIZE - 1, SIZE, None)
    assert await use(make_cache(budget=SIZE), adapter)


async def test_a_full_disk_below_the_budget_evicts_before_it_refuses(
    store: FakeStore, make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = await published(store, 1), await published(store, 2)
    cache = make_cache()
    await use(cache, old)
    monkeypatch.setattr(cache_folder, "_free_bytes", lambda folder: 10)
    await use(cache, new)
    assert not cache.has(old.digest)
    async with await cache.lease(new):
        with pytest.raises(DiskFull, match="disk under the node cache is full") as caught:
            await cache.lease(old)
    assert (caught.value.limit, caught.value.value) == (100 * SIZE, SIZE)


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, InternalError)])
async def test_what_the_disk_refuses_is_a_clear_error_without_a_path(
    store: FakeStore, make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, error: type[Exception]
) -> None:
    warm, cold = await published(store, 1), await published(store, 2)
    cache = make_cache()
    await use(cache, warm)

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path))

    with monkeypatch.context() as patched, pytest.raises(error) as caught:
        patched.setattr(os, "posix_fallocate", refuse)
        await cache.lease(cold)
    assert str(tmp_path) not in str(caught.value)
    assert half_written(tmp_path) == []
    assert not await use(cache, warm)
    assert await use(cache, cold)


async def test_sweep_evicts_down_to_a_budget_that_shrank(store: FakeStore, make_cache: MakeCache) -> None:
    adapters, cache = [await published(store, seed) for seed in range(3)], make_cache()
    for adapter in adapters:
        await use(cache, adapter)
    smaller = make_cache(budget=2 * SIZE)
    await smaller.sweep()
    assert smaller.used_bytes() == 2 * SIZE


async def test_sweep_spares_a_running_fetch_and_clears_idle_lock_files(
    store: FakeStore, make_cache: MakeCache, tmp_path: Path
) -> None:
    kept, gone, running = [await published(store, seed) for seed in range(3)]
    cache, neighbour = make_cache(), make_cache()
    await use(cache, kept)
    await store.delete(weights_key(gone))
    with pytest.raises(AdapterCorrupt):
        await cache.lease(gone)
    store.gate = asyncio.Event()
    waiter = asyncio.create_task(cache.lease(running))
    await until(lambda: store.running > 0 and half_written(tmp_path) == [running.digest])
    assert await neighbour.sweep() == 0
    assert half_written(tmp_path) == [running.digest]
    store.gate.set()
    (await waiter).release()
    await cache.close()
    locks = {path.name for path in (tmp_path / ".locks").iterdir()}
    assert locks == {"budget", kept.digest, running.digest}


async def test_nothing_holds_up_the_event_loop_during_a_fetch(
    store: FakeStore, make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, cache = await published(store, 1), make_cache()
    seen: set[tuple[str, bool]] = set()
    blocking = [(os, "fsync"), (os, "posix_fallocate"), (os, "rename"), (FileSink, "write")]
    for owner, name in blocking:
        monkeypatch.setattr(owner, name, _watched(getattr(owner, name), name, seen))
    await use(cache, adapter)
    await until(lambda: any(name == "fsync" for name, _ in seen))
    assert await cache.remove(adapter.digest)
    assert seen == {(name, False) for _, name in blocking}


def _watched(call: Callable[..., object], name: str, seen: set[tuple[str, bool]]) -> Callable[..., object]:
    """`call`, noting whether it ran on an event loop's thread."""

    def watched(*args: object) -> object:
        seen.add((name, asyncio._get_running_loop() is not None))
        return call(*args)

    return watched


# The pure choice


def entry(name: str, size: int, last_used: float) -> CacheEntry:
    return CacheEntry(name, size, last_used)


@pytest.mark.parametrize(
    ("need", "expected"),
    [(-1, []), (0, []), (1, ["old"]), (10, ["old"]), (11, ["old", "mid"]), (30, ["old", "mid", "new"]), (31, [])],
)
def test_victims_are_the_oldest_and_no_more_than_it_takes(need: int, expected: list[str]) -> None:
    assert choose_victims([entry("new", 10, 3), entry("old", 10, 1), entry("mid", 10, 2)], need) == expected


# The locks


def test_a_lock_file_deleted_by_its_holder_is_never_held_twice(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = FileLock.take_blocking(path)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(FileLock.take_blocking, path) for _ in range(2)]
        first.release_and_delete()
        done, undone = wait(waiting, timeout=5, return_when=FIRST_COMPLETED)
        assert (len(done), len(undone)) == (1, 1)
        assert FileLock.try_take(path) is None
        done.pop().result().release_and_delete()
        undone.pop().result(timeout=5).release()


def test_a_holder_whose_lock_file_was_removed_leaves_its_successor_alone(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "lock"
    first = FileLock.take_blocking(path)
    shutil.rmtree(path.parent)
    assert not first.is_current()
    second = FileLock.try_take(path)
    assert second is not None
    first.release_and_delete()
    assert second.is_current()
    assert FileLock.try_take(path) is None
    second.release()


def test_a_forked_copy_of_the_descriptor_does_not_prolong_a_lease(tmp_path: Path) -> None:
    lock = FileLock.take_blocking(tmp_path / "lock")
    copy = os.dup(lock._fd)
    assert FileLock.try_take(tmp_path / "lock", shared=True) is None
    lock.release()
    taken = FileLock.try_take(tmp_path / "lock")
    assert taken is not None
    taken.release()
    os.close(copy)
