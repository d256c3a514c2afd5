"""A fetch over a bad wire, through the real client: what is read again, how often, and by whom."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from adapters import metrics
from adapters.cache import AdapterCache
from adapters.errors import AdapterCorrupt, StoreCutOff, StoreThrottled
from adapters.names import AdapterRef
from adapters.settings import CacheSettings
from adapters.store import open_store
from adapters.types import CONFIG_FILE, WEIGHTS_FILE, FileDigest, ResolvedAdapter, content_digest
from tests import stub_s3
from tests.recorded_meter import RecordedMeter
from tests.stub_s3 import StubS3

RANGE = 2**16
CONTENTS = {CONFIG_FILE: b'{"peft_type": "LORA"}', WEIGHTS_FILE: b"".join(bytes([number]) * RANGE for number in range(5))}
RANGES = 5
FILES = tuple(FileDigest(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in CONTENTS.items())
ADAPTER = ResolvedAdapter(AdapterRef("base", "maze", 1), content_digest(FILES), FILES, 8)


@pytest.fixture
def stub() -> Iterator[StubS3]:
    with StubS3() as server:
        for name, data in CONTENTS.items():
            server.put(f"blobs/{ADAPTER.digest}/{name}", data)
        yield server


@pytest.fixture
def meter() -> RecordedMeter:
    return RecordedMeter()


@pytest.fixture
async def cache(stub: StubS3, tmp_path: Path, meter: RecordedMeter) -> AsyncIterator[AdapterCache]:
    store = open_store(stub.settings(retry_timeout_s=20))
    cache = AdapterCache(store, CacheSettings(dir=tmp_path, range_bytes=RANGE, fetch_concurrency=3), meter)
    yield cache
    await cache.close()


async def weights_in(cache: AdapterCache) -> bytes:
    async with await cache.lease(ADAPTER) as lease:
        return (lease.local.path / WEIGHTS_FILE).read_bytes()


@pytest.mark.parametrize(
    "answer", [stub_s3.CUT_IN_BODY, stub_s3.RESET_IN_BODY, stub_s3.SLOW_DOWN], ids=["closed", "reset", "503"]
)
async def test_only_the_range_that_failed_is_read_again(stub: StubS3, cache: AdapterCache, answer: stub_s3.Answer) -> None:
    stub.answer(answer, method="GET", key=WEIGHTS_FILE, times=1)
    assert await weights_in(cache) == CONTENTS[WEIGHTS_FILE]
    assert stub.count("GET", WEIGHTS_FILE) == RANGES + 1


async def test_a_damaged_file_is_read_once_more_and_the_other_is_not(
    stub: StubS3, cache: AdapterCache, meter: RecordedMeter
) -> None:
    stub.answer(stub_s3.CORRUPT_BODY, method="GET", key=WEIGHTS_FILE, times=1)
    assert await weights_in(cache) == CONTENTS[WEIGHTS_FILE]
    assert (stub.count("GET", WEIGHTS_FILE), stub.count("GET", CONFIG_FILE)) == (2 * RANGES, 1)
    assert meter.counted(metrics.CACHE_BAD_READS, reason="digest_mismatch") == 1


async def test_a_file_that_stays_damaged_is_refused_after_two_readings(stub: StubS3, cache: AdapterCache, tmp_path: Path) -> None:
    stub.answer(stub_s3.CORRUPT_BODY, method="GET", key=WEIGHTS_FILE)
    with pytest.raises(AdapterCorrupt) as caught:
        await weights_in(cache)
    assert caught.value.reason == "digest_mismatch"
    assert stub.count("GET", WEIGHTS_FILE) == 2 * RANGES
    assert not cache.has(ADAPTER.digest)


async def test_a_range_that_comes_too_short_is_read_once_more(stub: StubS3, cache: AdapterCache) -> None:
    short = stub_s3.Answer(
        206, b"x", (("content-range", f"bytes 0-{RANGE - 1}/{5 * RANGE}"), ("last-modified", stub_s3.SOME_DATE))
    )
    stub.answer(short, method="GET", key=WEIGHTS_FILE, times=1)
    assert await weights_in(cache) == CONTENTS[WEIGHTS_FILE]
    assert stub.count("GET", WEIGHTS_FILE) == RANGES + 1


async def test_a_file_that_is_too_short_is_refused_after_one_more_reading_of_its_end(
    stub: StubS3, cache: AdapterCache, meter: RecordedMeter
) -> None:
    stub.put(f"blobs/{ADAPTER.digest}/{WEIGHTS_FILE}", CONTENTS[WEIGHTS_FILE][:-1])
    with pytest.raises(AdapterCorrupt) as caught:
        await weights_in(cache)
    assert caught.value.reason == "short_file"
    assert stub.count("GET", WEIGHTS_FILE) == RANGES + 1
    assert meter.counted(metrics.CACHE_BAD_READS, reason="short_file") == 2


@pytest.mark.parametrize(("answer", "error"), [(stub_s3.SLOW_DOWN, StoreThrottled), (stub_s3.CUT_IN_BODY, StoreCutOff)])
async def test_the_caches_reads_do_not_multiply_the_stores_retries(
    stub: StubS3, tmp_path: Path, answer: stub_s3.Answer, error: type[Exception]
) -> None:
    stub.answer(answer, method="GET", key=WEIGHTS_FILE)
    store = open_store(stub.settings(retry_timeout_s=0))
    cache = AdapterCache(store, CacheSettings(dir=tmp_path, range_bytes=RANGE, fetch_concurrency=1))
    with pytest.raises(error):
        await weights_in(cache)
    assert stub.count("GET", WEIGHTS_FILE) == 1
    await cache.close()
