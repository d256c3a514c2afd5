"""What can break around a load: the store, the disk, the files on it, the engine, the replica. Each failure has its answer, harms
nobody else, and is over with its cause."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import openai
import psutil
import pytest

from adapters.cache.locks import FileLock
from adapters.registry import Registry
from adapters.store import open_store
from tests.integration.stack import CACHE_BYTES, Stack
from tests.prepared import prepared

RESTART_S = 120
HANGS_S = 60.0
SOON_S = 3.0


@pytest.fixture
def cold_again(stack: Stack, published: dict[str, str]) -> Callable[..., list[tuple[str, str]]]:
    """Adapters, name and sentence, that were asked for before and are in the store alone now; by their places in the alphabet."""

    def take(*places: int) -> list[tuple[str, str]]:
        names = [stack.alone(published)[place] for place in places]
        for name in names:
            stack.evict(name, "remote")
        return [(name, published[name]) for name in names]

    return take


@pytest.fixture
async def on_disk(stack: Stack, ask, cold_again) -> tuple[str, str]:
    """An adapter that is on the node's disk and not in the engine: its name and its sentence."""
    ((name, sentence),) = cold_again(0)
    await ask(f"demo:{name}")
    await asyncio.to_thread(stack.evict, name, "disk")
    return name, sentence


@pytest.fixture
def hanging_store(stack: Stack) -> Iterator[None]:
    """Takes every request from now on and answers none."""
    stack.seaweed.proxy.latency_s = HANGS_S
    yield
    stack.seaweed.proxy.latency_s = 0.0


@contextlib.contextmanager
def no_room(stack: Stack) -> Iterator[None]:
    """Another process of the node has reserved the whole cache for a fetch of its own, and dies in the end."""
    cache, digest = stack.folder / "cache", "0" * 64
    lock = FileLock.take_blocking(cache / ".locks" / f"{digest}.fetch")
    reserved = cache / ".tmp" / digest
    reserved.mkdir()
    with (reserved / "adapter_model.safetensors").open("wb") as file:
        file.truncate(CACHE_BYTES)
    try:
        yield
    finally:
        lock.release_and_delete()


async def refusal(ask, model: str, **options) -> openai.APIStatusError:
    """The error that a request to the model is answered with."""
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(model, **options)
    return caught.value


def said(error: openai.APIStatusError) -> tuple[int, str | None, str | None]:
    """Status, code and reason."""
    return error.status_code, error.code, error.body.get("reason")


async def first_answer(stack: Stack, ask, model: str, killed: psutil.Process) -> tuple[str, str]:
    """What the next process of the replica answers."""
    deadline = time.monotonic() + RESTART_S
    while True:
        with contextlib.suppress(openai.APIStatusError, psutil.Error, StopIteration):
            if stack.replica("demo").pid != killed.pid:
                return await ask(model, timeout=RESTART_S)
        assert time.monotonic() < deadline, "no replica came back"
        await asyncio.sleep(0.3)


async def test_what_is_on_the_disk_is_served_while_the_store_hangs_by_this_replica_and_by_the_next(
    stack: Stack, ask, aclient, on_disk, hanging_store
):
    name, sentence = on_disk
    began = time.monotonic()
    answer = await aclient.chat.completions.with_raw_response.create(
        model=f"demo:{name}", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
    )
    assert answer.headers["x-loramux-tier"] == "disk"
    assert time.monotonic() - began < SOON_S
    process = stack.replica("demo")
    process.kill()
    assert await first_answer(stack, ask, f"demo:{name}", process) == (f"demo:{name}@1", sentence)
    await asyncio.to_thread(stack.evict, name, "disk")
    assert await ask(f"demo:{name}") == (f"demo:{name}@1", sentence)


async def test_an_answer_that_breaks_off_is_read_again(stack: Stack, ask, cold_again):
    ((name, sentence),) = cold_again(0)
    stack.seaweed.proxy.lose_answer_next(1, method="GET", contains=f"blobs/{stack.digest(name)}/adapter_model")
    assert await ask(f"demo:{name}") == (f"demo:{name}@1", sentence)


async def test_a_full_cache_refuses_what_is_cold_serves_what_is_there_and_is_over_when_there_is_room(
    stack: Stack, ask, cold_again, on_disk
):
    here, sentence = on_disk
    ((name, cold_sentence),) = cold_again(1)
    with no_room(stack):
        error = await refusal(ask, f"demo:{name}")
        assert said(error) == (503, "storage_unavailable", None)
        assert error.body["limit"] == CACHE_BYTES
        assert "retry-after-ms" in error.response.headers
        assert str(stack.folder) not in error.response.text
        assert await ask(f"demo:{here}") == (f"demo:{here}@1", sentence)
    assert await ask(f"demo:{name}") == (f"demo:{name}@1", cold_sentence)


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[BinaryIO]:
    """The weights, to be damaged."""
    weights = folder / "adapter_model.safetensors"
    weights.chmod(0o644)
    with weights.open("r+b") as file:
        yield file


def cut(folder: Path) -> None:
    with opened(folder) as file:
        file.truncate(file.seek(0, os.SEEK_END) - 1)


def overwrite(folder: Path) -> None:
    """Numbers of the right size that the engine would take."""
    with opened(folder) as file:
        file.seek(-1_000, os.SEEK_END)
        file.write(bytes(1_000))


def rot(folder: Path) -> None:
    """As a failing disk does it: nobody wrote to the file. The header can't be read any more."""
    before = (folder / "adapter_model.safetensors").stat()
    with opened(folder) as file:
        file.write(b"\xff" * 64)
    os.utime(folder / "adapter_model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))


DAMAGES = {
    "cut": cut,
    "overwritten": overwrite,
    "rotten": rot,
    "no_weights": lambda folder: (folder / "adapter_model.safetensors").unlink(),
    "no_folder": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_files_that_are_not_what_they_were_on_the_disk_are_fetched_again(stack: Stack, ask, on_disk, damage):
    name, sentence = on_disk
    DAMAGES[damage](stack.on_disk(name))
    stack.seaweed.proxy.seen.clear()
    assert await ask(f"demo:{name}") == (f"demo:{name}@1", sentence)
    assert stack.seaweed.proxy.count("GET", "/adapter_model.safetensors") == 1


async def test_files_that_are_damaged_on_the_disk_and_in_the_store_are_corrupt_until_the_store_has_them_right(
    stack: Stack, ask, published, on_disk
):
    name, sentence = on_disk
    other = next(one for one in published if one != name)
    store, key = open_store(stack.registry), f"blobs/{stack.digest(name)}/adapter_model.safetensors"
    good = (await store.get(key)).data
    rot(stack.on_disk(name))
    await store.put(key, good[:-8] + b"\x00" * 8)
    try:
        for _ in range(2):
            error = await refusal(ask, f"demo:{name}")
            assert said(error) == (422, "adapter_corrupt", "digest_mismatch")
            assert error.response.headers["x-should-retry"] == "false"
        assert await ask(f"demo:{other}") == (f"demo:{other}@1", published[other])
    finally:
        await store.put(key, good)
    assert await ask(f"demo:{name}") == (f"demo:{name}@1", sentence)


async def test_a_node_cache_that_is_removed_under_the_feet_costs_fetches_and_no_answer(stack: Stack, ask, aclient, cold_again):
    warm, gone, cold = cold_again(0, 1, 2)
    for name, sentence in (warm, gone):
        assert await ask(f"demo:{name}") == (f"demo:{name}@1", sentence)
    await asyncio.to_thread(stack.evict, gone[0], "disk")
    stream = await aclient.chat.completions.create(
        model=f"demo:{warm[0]}",
        messages=[{"role": "user", "content": "Hello"}],
        temperature=0,
        max_tokens=300,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    await anext(stream)
    shutil.rmtree(stack.folder / "cache")
    stack.seaweed.proxy.seen.clear()
    for name, sentence in (warm, gone, cold):
        assert await ask(f"demo:{name}") == (f"demo:{name}@1", sentence)
    assert stack.seaweed.proxy.count("GET", "/adapter_model.safetensors") == 2
    assert len([chunk async for chunk in stream]) > 100
    await asyncio.to_thread(stack.evict, warm[0], "disk")
    assert await ask(f"demo:{warm[0]}") == (f"demo:{warm[0]}@1", warm[1])


async def test_what_the_engine_refuses_is_told_each_time_and_leaves_nothing(stack: Stack, ask, published):
    """It got around the contract: the files are what the manifest says, but no adapter."""
    head = await Registry(open_store(stack.registry)).publish("demo", "junk", prepared(b"no safetensors"))
    ref = f"demo:junk@{head.ref.version}"
    await asyncio.to_thread(stack.wait_until, lambda: _is_known(stack, "junk"))
    before = set(stack.residency()["int_ids"])
    for _ in range(2):
        error = await refusal(ask, ref)
        assert said(error) == (422, "adapter_incompatible", "engine_refused")
        assert str(stack.folder) not in error.response.text
    assert set(stack.residency(audit=True)["engine_ids"]) <= before
    name = sorted(published)[0]
    assert await ask(f"demo:{name}") == (f"demo:{name}@1", published[name])


def _is_known(stack: Stack, name: str) -> bool:
    return name in {row["name"] for row in stack.get("/registry/v1/adapters?base=demo")["adapters"]}
