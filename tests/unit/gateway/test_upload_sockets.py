"""Uploads over real sockets: answers while the client still sends, clients that go away, sizes that don't fit memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import uvicorn

from gateway.app import build_app
from gateway.settings import GatewaySettings
from tests.adapter_folders import TEXT, plain
from tests.scripted_backend import ScriptedBackend
from tests.unit.gateway.conftest import until

BASE = "tiny/base"
PATH = f"/registry/v1/publish?base={BASE}&name=crow"
ANNOUNCED = 100_000_000


@pytest.fixture
def settings(tmp_path: Path) -> GatewaySettings:
    return GatewaySettings(upload_dir=tmp_path / "uploads", max_upload_bytes=2 * ANNOUNCED)


@pytest.fixture
async def server(settings, registry) -> AsyncIterator[uvicorn.Server]:
    await registry.put_base(TEXT)
    app = build_app(settings, registry, ScriptedBackend(bases=(BASE,)))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="on"))
    running = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    yield server
    server.should_exit = True
    await running


def port_of(server: uvicorn.Server) -> int:
    return server.servers[0].sockets[0].getsockname()[1]


@contextlib.asynccontextmanager
async def connected(server, announced: int = ANNOUNCED):
    """A connection over which the head of an upload went out."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
    head = [
        f"POST {PATH} HTTP/1.1",
        "host: gateway",
        f"content-length: {announced}",
        "content-type: multipart/form-data; boundary=b",
    ]
    writer.write("\r\n".join([*head, "", ""]).encode())
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = int(next(line for line in head.lower().split("\r\n") if line.startswith("content-length:")).partition(":")[2])
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


def part(name: str, data: bytes) -> bytes:
    return f'--b\r\ncontent-disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode() + data


def pieces_of(folder: Path, announced: int = ANNOUNCED // 2) -> tuple[bytes, bytes]:
    """The configuration, and a header of weights that announces far more than was sent."""
    weights = (folder / "adapter_model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", weights[:8])
    return (folder / "adapter_config.json").read_bytes(), weights[: 8 + length]


async def until_empty(settings: GatewaySettings) -> None:
    await until(lambda: not settings.upload_dir.exists() or not list(settings.upload_dir.iterdir()))


@pytest.mark.parametrize("config_first", [True, False])
async def test_the_refusal_comes_before_the_values_do(server, settings, tmp_path, config_first):
    config, header = pieces_of(plain(rank=16).write(tmp_path / "bad"))
    whole = (tmp_path / "bad" / "adapter_model.safetensors").read_bytes()
    if config_first:
        body = part("adapter_config.json", config) + b"\r\n" + part("adapter_model.safetensors", header)
    else:
        body = part("adapter_model.safetensors", whole) + b"\r\n" + part("adapter_config.json", config) + b"\r\n--b\r\n"
    async with connected(server) as (reader, writer):
        writer.write(body)
        status, answer = await asyncio.wait_for(answer_of(reader), 5)
    assert (status, answer["error"]["reason"], answer["error"]["limit"]) == (422, "rank_too_large", 8)
    await until_empty(settings)


async def test_an_announced_length_over_the_limit_is_refused_before_a_byte_of_the_body(server):
    async with connected(server, announced=10 * ANNOUNCED) as (reader, _):
        status, answer = await asyncio.wait_for(answer_of(reader), 5)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")


async def test_a_client_that_sends_on_after_its_refusal_still_reads_it(server, tmp_path):
    config, header = pieces_of(plain(rank=16).write(tmp_path / "bad"))
    body = part("adapter_config.json", config) + b"\r\n" + part("adapter_model.safetensors", header)

    async def sending() -> AsyncIterator[bytes]:
        yield body
        for _ in range(300):
            yield b"x" * 65536

    async with httpx.AsyncClient(timeout=20) as client:
        answer = await client.post(
            f"http://127.0.0.1:{port_of(server)}{PATH}",
            content=sending(),
            headers={"content-type": "multipart/form-data; boundary=b"},
        )
    assert answer.status_code == 422


async def test_a_client_that_goes_away_in_the_middle_leaves_nothing_behind(server, settings, registry, tmp_path):
    config, header = pieces_of(plain().write(tmp_path / "good"))
    async with connected(server) as (_, writer):
        writer.write(part("adapter_config.json", config) + b"\r\n" + part("adapter_model.safetensors", header + b"x" * 5000))
        await writer.drain()
        await until(lambda: bool(list(settings.upload_dir.rglob("adapter_model.safetensors"))))
    await until_empty(settings)
    assert await registry.versions(BASE, "crow") == []
