"""What every store can do; one suite for memory, a local folder and a real S3 server."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import stat
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import boto3
import pytest

from adapters import errors
from adapters.settings import StoreSettings
from adapters.store import Object, Store, open_store
from adapters.store.folder import LocalStore
from tests.seaweed import Seaweed

WEIRD_KEYS = ["bases/Qwen%2FQwen3.json", "w/a b", "w/%", "w/~", "w/é", "w/a+b", "w/..y", "w/#", "w/a=b&c?d", "w/.dot"]


async def keys(store: Store, prefix: str) -> list[str]:
    return [row.key async for row in store.list(prefix)]


class TestReadingAndWriting:
    async def test_what_was_created_is_read_back(self, store: Store) -> None:
        etag = await store.create("a/b.json", b"{}")
        assert (await store.get("a/b.json")).data == b"{}"
        assert (await store.get("a/b.json")).etag == etag

    async def test_a_missing_key(self, store: Store) -> None:
        with pytest.raises(errors.StoreMissing):
            await store.get("nothing/here")
        with pytest.raises(errors.StoreMissing):
            await store.get_range("nothing/here", 0, 4)
        await store.delete("nothing/here")

    async def test_stat_is_the_row_of_a_listing(self, store: Store) -> None:
        etag = await store.put("p/k", b"123")
        found = await store.stat("p/k")
        [row] = [row async for row in store.list("p/")]
        assert (found.key, found.size_bytes, found.etag) == (row.key, row.size_bytes, row.etag) == ("p/k", 3, etag)
        assert abs(found.modified_s - row.modified_s) <= 1  # some answers hold whole seconds

    async def test_stat_of_what_is_not_an_object(self, store: Store) -> None:
        await store.put("p/k", b"")
        assert (await store.stat("p/k")).size_bytes == 0
        for key in ("p", "p/other", "other"):
            with pytest.raises(errors.StoreMissing):
                await store.stat(key)

    async def test_the_time_of_a_write_is_now_and_moves(self, store: Store) -> None:
        before_s = time.time()
        await store.create("k", b"1")
        first = await store.stat("k")
        assert before_s - 2 <= first.modified_s <= time.time() + 2
        await asyncio.sleep(1.1)  # whole seconds on some stores
        await store.replace("k", b"2", first.etag)
        assert (await store.stat("k")).modified_s > first.modified_s

    async def test_delete(self, store: Store) -> None:
        await store.put("k", b"1")
        await store.delete("k")
        assert await keys(store, "") == []

    async def test_put_overwrites_and_the_etag_moves(self, store: Store) -> None:
        etags = {await store.put("k", f"{number}".encode()) for number in range(8)}
        assert len(etags) == 8
        assert (await store.get("k")).data == b"7"

    async def test_ranges(self, store: Store) -> None:
        await store.put("k", b"0123456789")
        assert await store.get_range("k", 0, 4) == b"0123"
        assert await store.get_range("k", 8, 10) == b"89"
        assert await store.get_range("k", 10, 4) == b""
        assert await store.get_range("k", 3, 0) == b""

    async def test_empty_objects(self, store: Store) -> None:
        await store.create("empty", b"")
        assert (await store.get("empty")).data == b""

    @pytest.mark.parametrize("key", ["../out", "/etc/passwd", "a/../../out", "a//b", "", "a/./b", "nul\x00", "a" * 1000])
    async def test_keys_stay_inside(self, store: Store, key: str) -> None:
        for call in (store.get(key), store.put(key, b""), store.create(key, b""), store.delete(key)):
            with pytest.raises(errors.InvalidRequest):
                await call

    async def test_weird_keys_round_trip(self, store: Store) -> None:
        for key in WEIRD_KEYS:
            await store.create(key, key.encode())
            assert (await store.get(key)).data == key.encode()
        assert await keys(store, "w/") == sorted(key for key in WEIRD_KEYS if key.startswith("w/"))
        assert await keys(store, "bases/") == ["bases/Qwen%2FQwen3.json"]


class TestConditions:
    async def test_create_only_once(self, store: Store) -> None:
        await store.create("k", b"1")
        with pytest.raises(errors.StoreConflict):
            await store.create("k", b"2")
        assert (await store.get("k")).data == b"1"

    async def test_replace_with_the_right_etag_only(self, store: Store) -> None:
        old = await store.create("k", b"1")
        new = await store.replace("k", b"2", old)
        assert new != old
        with pytest.raises(errors.StoreConflict):
            await store.replace("k", b"3", old)
        assert await store.get("k") == Object(b"2", new)

    async def test_replace_of_a_missing_key_is_a_conflict(self, store: Store) -> None:
        etag = await store.create("k", b"1")
        await store.delete("k")
        with pytest.raises(errors.StoreConflict):
            await store.replace("k", b"2", etag)

    async def test_one_concurrent_create_wins(self, store: Store, store_kind: str) -> None:
        # SeaweedFS makes a writer that meets another wait a whole second: one small round there
        rounds, writers = (1, 4) if store_kind == "s3" else (6, 24)
        for turn in range(rounds):
            works = (store.create(f"c/{turn}", f"{number}".encode()) for number in range(writers))
            results = await asyncio.gather(*works, return_exceptions=True)
            winners = [number for number, result in enumerate(results) if isinstance(result, str)]
            losers = {type(result) for result in results if not isinstance(result, str)}
            assert losers == {errors.StoreConflict}
            assert [(await store.get(f"c/{turn}")).data] == [f"{number}".encode() for number in winners]

    async def test_compare_and_swap_counts_every_increment(self, store: Store, store_kind: str) -> None:
        writers = 4 if store_kind == "s3" else 16
        await store.create("n", b"0")

        async def increment() -> None:
            while True:
                now = await store.get("n")
                try:
                    await store.replace("n", b"%d" % (int(now.data) + 1), now.etag)
                    return
                except errors.StoreConflict:
                    await asyncio.sleep(random.random() * 0.01)

        await asyncio.gather(*(increment() for _ in range(writers)))
        assert int((await store.get("n")).data) == writers


class TestListing:
    async def test_in_key_order_with_sizes_and_etags(self, store: Store) -> None:
        written = {key: await store.put(key, key.encode() * 2) for key in ["p/b", "p/a/2", "p/a-1", "p/a/1", "q/x"]}
        rows = [row async for row in store.list("p/")]
        assert [row.key for row in rows] == sorted(key for key in written if key.startswith("p/"))
        assert all(row.etag == written[row.key] and row.size_bytes == 2 * len(row.key) for row in rows)

    async def test_a_prefix_may_end_inside_a_name(self, store: Store) -> None:
        for key in ["p/ab", "p/ac", "p/b", "pp/a"]:
            await store.put(key, b"")
        assert await keys(store, "p/a") == ["p/ab", "p/ac"]
        assert await keys(store, "p") == ["p/ab", "p/ac", "p/b", "pp/a"]
        assert await keys(store, "none/") == []

    async def test_more_than_a_page(self, store: Store) -> None:
        number = 1030
        gate = asyncio.Semaphore(32)

        async def put(key: str) -> None:
            async with gate:
                await store.put(key, b"x")

        expected = [f"many/{index:05d}" for index in range(number)]
        await asyncio.gather(*map(put, expected))
        assert await keys(store, "many/") == expected

    async def test_the_etag_of_a_listing_is_that_of_a_read(self, store: Store) -> None:
        await store.put("k", b"1")
        [row] = [row async for row in store.list("k")]
        await store.replace("k", b"2", row.etag)


class TestStreams:
    async def test_chunks_become_one_object(self, store: Store) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            for letter in b"abc":
                yield bytes([letter]) * 3_500_000

        etag = await store.put_stream("big", chunks())  # type: ignore[attr-defined]
        assert etag
        assert [row.size_bytes async for row in store.list("big")] == [10_500_000]
        assert await store.get_range("big", 3_499_999, 2) == b"ab"

    async def test_an_error_of_the_source_leaves_nothing(self, store: Store) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"x" * 9_000_000
            raise errors.AdapterCorrupt("the file changed")

        with pytest.raises(errors.AdapterCorrupt):
            await store.put_stream("big", chunks())  # type: ignore[attr-defined]
        assert await keys(store, "") == []


class TestAddresses:
    async def test_memory_is_shared_by_name_only(self) -> None:
        one, same = open_store(StoreSettings(url="memory://shared-a")), open_store(StoreSettings(url="memory://shared-a"))
        other, fresh = open_store(StoreSettings(url="memory://shared-b")), open_store(StoreSettings(url="memory://"))
        await one.put("k", b"1")
        assert (await same.get("k")).data == b"1"
        assert await keys(other, "") == await keys(fresh, "") == []

    @pytest.mark.parametrize("url", ["s3://", "gs://b/p", "file://host/dir", "nonsense", "file:relative"])
    def test_bad_addresses(self, url: str) -> None:
        with pytest.raises(errors.StoreMisconfigured):
            open_store(StoreSettings(url=url))


class TestLocalFolder:
    async def test_leftovers_of_a_crash_are_invisible(self, tmp_path: Path) -> None:
        store = LocalStore.from_url(f"file://{tmp_path}/r")
        await store.put("k", b"1")
        (tmp_path / "r" / ".tmp" / "half").write_bytes(b"half")
        assert await keys(store, "") == ["k"]
        with pytest.raises(errors.InvalidRequest):
            await store.get(".tmp/half")

    async def test_a_folder_that_is_only_read_stays_as_it_is(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "k").write_bytes(b"1")
        store = LocalStore.from_url(f"file://{tmp_path}")
        assert (await store.get("a/k")).data == b"1" and await keys(store, "") == ["a/k"]
        assert (await store.stat("a/k")).size_bytes == 1
        assert os.listdir(tmp_path) == ["a"]
        missing = LocalStore.from_url(f"file://{tmp_path}/nowhere")
        assert await keys(missing, "") == []
        with pytest.raises(errors.StoreMissing):
            await missing.get("k")
        assert not (tmp_path / "nowhere").exists()

    async def test_the_etag_moves_for_equal_content(self, tmp_path: Path) -> None:
        store = LocalStore.from_url(f"file://{tmp_path}/r")
        assert len({await store.put("k", b"same") for _ in range(20)}) == 20

    async def test_two_stores_of_one_folder_exclude_each_other(self, tmp_path: Path) -> None:
        stores = [LocalStore.from_url(f"file://{tmp_path}/r") for _ in range(4)]
        results = await asyncio.gather(*(store.create("k", b"1") for store in stores), return_exceptions=True)
        assert sum(isinstance(result, str) for result in results) == 1

    async def test_a_forbidden_file_is_denied_not_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = LocalStore.from_url(f"file://{tmp_path}/r")
        await store.put("k", b"1")
        (tmp_path / "r" / "k").chmod(stat.S_IWUSR)
        try:
            (tmp_path / "r" / "k").read_bytes()
            pytest.skip("this user may read everything")
        except PermissionError:
            with pytest.raises(errors.StoreDenied):
                await store.get("k")

    async def test_a_full_disk_is_its_own_trouble_and_leaves_what_was_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = LocalStore.from_url(f"file://{tmp_path}/r")
        await store.put("k", b"1")

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        for call in (store.put("k", b"2"), store.create("new", b"2")):
            with pytest.raises(errors.StoreFull):
                await call
        assert (await store.get("k")).data == b"1"
        assert await keys(store, "") == ["k"]
        assert not list((tmp_path / "r" / ".tmp").iterdir())


SHORT_COMMAND = """
import asyncio
from adapters.errors import StoreUnreachable
from adapters.settings import StoreSettings
from adapters.store import open_store

async def main():
    settings = {"url": "s3://b/p", "endpoint": "http://127.0.0.1:1", "access_key_id": "a", "secret_access_key": "b"}
    try:
        await open_store(StoreSettings(**settings, retry_timeout_s=0)).get("k")
    except StoreUnreachable:
        print("told")

asyncio.run(main())
"""


class TestShortCommands:
    async def test_they_end_in_peace(self) -> None:
        """The client's threads must not abort an interpreter that ends right after its last call."""

        async def run() -> tuple[int | None, bytes]:
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", SHORT_COMMAND, stdout=asyncio.subprocess.PIPE)
            out, _ = await process.communicate()
            return process.returncode, out

        assert await asyncio.gather(*(run() for _ in range(4))) == [(0, b"told\n")] * 4


class TestRealS3:
    async def test_another_client_sees_the_same_keys_and_bytes(self, seaweed: Seaweed, s3_settings: StoreSettings) -> None:
        store = open_store(s3_settings)
        keys_and_bytes = {key: key.encode() for key in WEIRD_KEYS}
        for key, data in keys_and_bytes.items():
            await store.create(key, data)
        bucket, _, prefix = s3_settings.url.removeprefix("s3://").partition("/")
        client = boto3.client(
            "s3",
            endpoint_url=seaweed.server.endpoint,
            region_name="us-east-1",
            aws_access_key_id=seaweed.server.credentials.access_key_id,
            aws_secret_access_key=seaweed.server.credentials.secret_access_key,
        )
        for key, data in keys_and_bytes.items():
            assert client.get_object(Bucket=bucket, Key=f"{prefix}/{key}")["Body"].read() == data
        client.put_object(Bucket=bucket, Key=f"{prefix}/b/x%2Fy", Body=b"boto")
        assert (await store.get("b/x%2Fy")).data == b"boto"

    async def test_what_was_written_survives_a_restart(self, seaweed: Seaweed, s3_settings: StoreSettings) -> None:
        store = open_store(s3_settings)
        etag = await store.create("k", b"1")
        await asyncio.to_thread(seaweed.restart)
        await store.replace("k", b"2", etag)

    async def test_wrong_keys_are_denied(self, seaweed: Seaweed, s3_settings: StoreSettings) -> None:
        store = open_store(seaweed.settings("x", secret_access_key="wrong"))
        with pytest.raises(errors.StoreDenied):
            await store.get("k")

    async def test_no_such_bucket(self, seaweed: Seaweed, s3_settings: StoreSettings) -> None:
        store = open_store(seaweed.settings("x", url="s3://other-bucket/x"))
        for call in (store.get("k"), store.stat("k"), keys(store, "")):
            with pytest.raises(errors.StoreNoBucket):
                await call

    async def test_a_broken_connection_is_retried(self, seaweed: Seaweed, s3_settings: StoreSettings) -> None:
        store = open_store(s3_settings)
        await store.put("k", b"1")
        seaweed.proxy.drop_next(2, method="GET")
        assert (await store.get("k")).data == b"1"
        assert seaweed.proxy.count("GET", "/k") == 3

    async def test_no_connection_is_unreachable(self, seaweed: Seaweed, s3_settings: StoreSettings) -> None:
        store = open_store(s3_settings.model_copy(update={"retry_timeout_s": 0.2}))
        seaweed.proxy.refuse = True
        with pytest.raises(errors.StoreUnreachable):
            await store.get("k")
