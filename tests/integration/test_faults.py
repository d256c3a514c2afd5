"""Broken adapters, a store that goes away, clients that disconnect and a replica that is killed, on the running product."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from pathlib import Path

import httpx
import openai
import pytest

from adapters.errors import AdapterRefused

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def broken(tmp_path: Path, artifacts: Path, published):
    """A copy of a good adapter folder, to be broken."""
    folder = tmp_path / "broken"
    shutil.copytree(artifacts / "adapters" / sorted(published)[0], folder)
    return folder


def edit_config(folder: Path, **changes) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def too_large_rank(folder: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path = folder / "adapter_model.safetensors"
    tensors = {}
    for name, value in load_file(path).items():
        axis = 0 if "lora_A" in name else 1
        tensors[name] = value.repeat(8, axis=axis)
    save_file(tensors, path)
    edit_config(folder, r=64)


def truncate(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


BREAKS = {
    "rank_too_large": too_large_rank,
    "adapter_corrupt": truncate,
    "no_tensors": lambda folder: (folder / "adapter_model.safetensors").unlink(),
    "config_invalid": lambda folder: (folder / "adapter_config.json").write_text("{nonsense"),
    "dora_unsupported": lambda folder: edit_config(folder, use_dora=True),
    "extra_weights": lambda folder: edit_config(folder, modules_to_save=["lm_head"]),
    "extra_tensors": lambda folder: edit_config(folder, target_modules=["no_such_proj"]),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_adapter_is_refused_with_its_code_and_nothing_is_left(stack, publish, broken, name):
    BREAKS[name](broken)
    with pytest.raises(AdapterRefused) as caught:
        publish(f"broken-{name}".replace("_", "-"), broken)
    assert caught.value.reason == name
    listed = {row["name"] for row in stack.get("/registry/v1/adapters")["adapters"]}
    assert not any(row.startswith("broken-") for row in listed)


async def test_a_blob_that_was_tampered_with_is_a_422_and_harms_nobody(stack, ask, publish, cold):
    from adapters.store import open_store

    ((name, _),) = cold(1).items()
    store = open_store(stack.registry)
    key = f"blobs/{stack.digest(name)}/adapter_model.safetensors"
    good = (await store.get(key)).data
    await store.put(key, good[:-8] + b"\x00" * 8)
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(f"demo:{name}")
    assert (caught.value.status_code, caught.value.code) == (422, "adapter_corrupt")
    assert (await ask("demo"))[0] == "demo"
    await store.put(key, good)
    assert (await ask(f"demo:{name}"))[0] == f"demo:{name}@1"


async def test_cached_adapters_go_on_while_the_store_is_away_and_cold_ones_recover(stack, ask, published, cold):
    warm = sorted(published)[0]
    assert await ask(f"demo:{warm}") == (f"demo:{warm}@1", published[warm])
    ((name, sentence),) = cold(1).items()
    await asyncio.to_thread(stack.seaweed.server.stop)
    try:
        for _ in range(3):
            assert await ask(f"demo:{warm}") == (f"demo:{warm}@1", published[warm])
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(f"demo:{name}")
        assert (caught.value.status_code, caught.value.code) == (503, "storage_unavailable")
        assert int(caught.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.NotFoundError):
            await ask("demo:nobody")
    finally:
        await asyncio.to_thread(stack.seaweed.server.start)
    deadline = time.monotonic() + 15
    while True:
        with contextlib.suppress(openai.APIStatusError):
            assert await ask(f"demo:{name}") == (f"demo:{name}@1", sentence)
            break
        assert time.monotonic() < deadline, "no recovery after the store came back"
        await asyncio.sleep(0.3)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("headers", [{}, {"x-request-disconnect-disabled": "?1"}, {"x-request-timeout-seconds": "0"}])
async def test_a_client_that_disconnects_frees_the_engine_at_once(stack, published, stream, headers):
    name = sorted(published)[0]
    await asyncio.to_thread(stack.wait_until, lambda: stack.residency()["requests"] == 0)
    body = {"model": f"demo:{name}", "messages": HELLO, "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        if stream:
            async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                await anext(response.aiter_lines())
                assert stack.residency()["requests"] == 1
        else:
            sending = asyncio.create_task(http.post("/v1/chat/completions", json=body, headers=headers))
            await asyncio.to_thread(stack.wait_until, lambda: stack.residency()["requests"] == 1)
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending
    await asyncio.to_thread(stack.wait_until, lambda: stack.residency()["requests"] == 0, timeout_s=1.5)
    assert stack.residency()["resident"][f"demo:{name}@1"] == 0


async def test_a_killed_replica_recovers_and_never_answers_wrongly(stack, ask, published):
    names = sorted(published)[:3]
    for name in names:
        await ask(f"demo:{name}")
    asking = [asyncio.create_task(ask(f"demo:{name}", f"Hello {n}", timeout=120)) for n in range(4) for name in names]
    await asyncio.sleep(0.02)
    stack.replica("demo").kill()
    results = await asyncio.gather(*asking, return_exceptions=True)
    for name, result in zip(names * 4, results, strict=True):
        if isinstance(result, BaseException):
            assert isinstance(result, openai.APIStatusError)
            assert result.code == "engine_unavailable"
        else:
            assert result == (f"demo:{name}@1", published[name])
    deadline = time.monotonic() + 120
    for name in names:
        while True:
            try:
                assert await ask(f"demo:{name}", timeout=120) == (f"demo:{name}@1", published[name])
                break
            except openai.APIStatusError as error:
                assert error.code == "engine_unavailable"
                assert time.monotonic() < deadline
                await asyncio.sleep(0.5)
