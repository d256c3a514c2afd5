"""Authors without keys of the store, on the running product: upload, share, roll back, pull, through Ray Serve's own proxy."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import struct
import subprocess
import tarfile
import tempfile
from pathlib import Path

import httpx
import pytest

from tests.adapter_folders import plain

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def http(stack):
    with httpx.Client(base_url=f"{stack.url}/registry/v1", timeout=120) as client:
        yield client


@pytest.fixture
def folders(sentences, artifacts) -> list[tuple[Path, str]]:
    """Adapter folders with the sentence that each answers with."""
    return [(artifacts / "adapters" / name, sentence) for name, sentence in sorted(sentences.items())]


def upload(http: httpx.Client, folder: Path, status: int = 201, **query) -> dict:
    names = ("adapter_config.json", "adapter_model.safetensors")
    files = [("file", (name, (folder / name).read_bytes())) for name in names]
    answer = http.post("/publish", params={"base": "demo"} | query, files=files)
    assert answer.status_code == status, answer.text
    return answer.json()


def post(http: httpx.Client, verb: str, status: int = 200, **body) -> dict:
    answer = http.post(f"/{verb}", json={"base": "demo"} | body)
    assert answer.status_code == status, answer.text
    return answer.json()


def leftovers() -> set[str]:
    folder = Path(tempfile.gettempdir(), f"loramux-uploads-{os.getuid()}")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


async def test_what_curl_uploads_answers_at_once(stack, folders, ask):
    folder, sentence = folders[0]
    parts = [f"-Ffile=@{folder}/{name}" for name in ("adapter_config.json", "adapter_model.safetensors")]
    address = f"{stack.url}/registry/v1/publish?base=demo&name=by-curl&promote=production&wait_ready=true"
    done = await asyncio.to_thread(subprocess.run, ["curl", "-sS", *parts, address], capture_output=True, check=True)
    made = json.loads(done.stdout)
    assert made["ref"] == "demo:by-curl@1"
    assert made["readiness"] == {"ready": True, "reason": None, "message": None}
    assert "demo:by-curl@1" in stack.residency()["resident"]
    assert await ask("demo:by-curl") == ("demo:by-curl@1", sentence)


async def test_a_canary_is_shared_kept_and_rolled_back(http, folders, aclient, stack):
    upload(http, folders[1][0], name="canary-http", promote="production")
    upload(http, folders[2][0], name="canary-http")
    post(http, "weights", name="canary-http", weights={"1": 50, "2": 50}, message="a canary")

    async def who_gets(user: str) -> tuple[str, str]:
        raw = await aclient.chat.completions.with_raw_response.create(
            model="demo:canary-http", messages=HELLO, max_tokens=1, user=user
        )
        return raw.parse().model, raw.headers["x-loramux-sticky"]

    users = [f"user-{number}" for number in range(16)]
    first = await asyncio.gather(*map(who_gets, users))
    again = await asyncio.gather(*map(who_gets, users))
    assert first == again
    assert set(first) == {("demo:canary-http@1", "key"), ("demo:canary-http@2", "key")}
    assert post(http, "rollback", name="canary-http")["aliases"] == {"production": 1}
    answer = await aclient.chat.completions.create(model="demo:canary-http", messages=HELLO, max_tokens=1)
    assert answer.model == "demo:canary-http@1"


def test_a_pull_through_the_proxy_is_what_was_published(http, folders):
    made = upload(http, folders[3][0], name="pulled")
    answer = http.get("/pull", params={"base": "demo", "name": "pulled", "version": 1})
    assert answer.headers["x-loramux-digest"] == f"sha256:{made['digest']}"
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        names = tar.getnames()
        tar.extractall(folder := Path(tempfile.mkdtemp()), filter="data")
    assert sorted(names) == ["adapter_config.json", "adapter_model.safetensors"]
    again = upload(http, folder, status=200, name="pulled")
    assert (again["version"], again["digest"]) == (1, made["digest"])


def test_a_retired_version_is_a_410_everywhere_until_it_is_restored(http, folders, client):
    upload(http, folders[4][0], name="retired-http")
    post(http, "retire", name="retired-http", version=1)
    raw = httpx.post(f"{client.base_url}chat/completions", json={"model": "demo:retired-http@1", "messages": HELLO}, timeout=60)
    assert (raw.status_code, raw.json()["error"]["code"]) == (410, "version_retired")
    post(http, "restore", name="retired-http", version=1)
    answer = client.chat.completions.create(model="demo:retired-http@1", messages=HELLO, max_tokens=1)
    assert answer.model == "demo:retired-http@1"


async def test_a_refusal_comes_through_the_proxy_while_the_client_still_sends(stack, tmp_path):
    before = leftovers()
    folder = plain().write(tmp_path / "bad")  # made for another base: no module of it is here, or none fits
    weights = (folder / "adapter_model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", weights[:8])
    body = b""
    for name, data in (
        ("adapter_config.json", (folder / "adapter_config.json").read_bytes() + b"\r\n"),
        ("adapter_model.safetensors", weights[: 8 + length]),
    ):
        body += f'--b\r\ncontent-disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode() + data
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    head = (
        "POST /registry/v1/publish?base=demo&name=refused HTTP/1.1\r\nhost: gateway\r\ncontent-length: 100000000\r\n"
        "content-type: multipart/form-data; boundary=b\r\n\r\n"
    )
    writer.write(head.encode() + body)
    said = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    assert re.match(rb"HTTP/1\.1 422 ", said), said
    writer.close()
    await asyncio.to_thread(stack.wait_until, lambda: leftovers() <= before)


async def test_a_client_that_goes_away_in_the_middle_of_an_upload_leaves_nothing(stack, http):
    before = leftovers()
    _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    head = (
        "POST /registry/v1/publish?base=demo&name=half HTTP/1.1\r\nhost: gateway\r\ncontent-length: 100000000\r\n"
        "content-type: multipart/form-data; boundary=b\r\n\r\n"
        '--b\r\ncontent-disposition: form-data; name="file"; filename="adapter_model.safetensors"\r\n\r\n'
    )
    writer.write(head.encode() + b"\0" * 3_000_000)
    await writer.drain()
    await asyncio.to_thread(stack.wait_until, lambda: bool(leftovers() - before))
    writer.close()
    await asyncio.to_thread(stack.wait_until, lambda: leftovers() <= before, 20)
    assert http.get("/adapter", params={"base": "demo", "name": "half"}).status_code == 404


def test_sources_are_forbidden_where_none_is_allowed(http):
    error = post(http, "publish-source", 403, name="stolen", source="s3://somewhere/else")["error"]
    assert (error["code"], error["reason"]) == ("forbidden", "source_not_allowed")


def test_the_document_is_served(stack):
    paths = stack.get("/openapi.json")["paths"]
    assert {"/v1/chat/completions", "/registry/v1/publish", "/registry/v1/pull"} <= paths.keys()
