"""The drop prefix as its users fill it: objects copied one by one, files that grow; a version appears only when all is there."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import boto3
import pytest
from fastapi import FastAPI

from adapters.adoption import DropWatcher, Outcome, find
from adapters.names import AdapterRef
from adapters.registry import Registry
from adapters.settings import DropSettings, RegistrySettings
from adapters.store import open_store
from serve_app.drop import watch_drop
from tests.adapter_folders import TEXT, plain
from tests.seaweed import Seaweed

LOOK_S = 0.05
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EXTRA = {  # beside the adapter in a policy export
    "README.md": b"# adapter",
    "config.json": b'{"model_type": "qwen3_vl"}',
    "tokenizer.json": b"{}" + b" " * 2_000_000,
    "preprocessor_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
}


class Bucket:
    """A drop prefix in a bucket, filled with boto3 as the AWS command line does."""

    def __init__(self, server: Seaweed) -> None:
        settings = server.direct(f"t-{uuid.uuid4().hex[:12]}/drop")
        self.settings = DropSettings(**settings.model_dump(), base=TEXT.base, interval_s=LOOK_S, settle_s=0.2, promote="canary")
        secret = settings.secret_access_key.get_secret_value() if settings.secret_access_key else None
        keys = {"aws_access_key_id": settings.access_key_id, "aws_secret_access_key": secret, "region_name": settings.region}
        self._client: Any = boto3.client("s3", endpoint_url=settings.endpoint, **keys)
        self._bucket, _, self._prefix = settings.url.removeprefix("s3://").partition("/")

    async def put(self, name: str, data: bytes) -> None:
        await asyncio.to_thread(self._client.put_object, Bucket=self._bucket, Key=f"{self._prefix}/{name}", Body=data)

    @contextlib.asynccontextmanager
    async def in_parts(self, name: str, data: bytes) -> AsyncIterator[None]:
        """The object is there only after the body of `async with`."""
        where = {"Bucket": self._bucket, "Key": f"{self._prefix}/{name}"}
        upload = (await asyncio.to_thread(self._client.create_multipart_upload, **where))["UploadId"]
        sent = await asyncio.to_thread(self._client.upload_part, **where, UploadId=upload, PartNumber=1, Body=data)
        yield
        parts = {"Parts": [{"PartNumber": 1, "ETag": sent["ETag"]}]}
        await asyncio.to_thread(self._client.complete_multipart_upload, **where, UploadId=upload, MultipartUpload=parts)


class Watched:
    """A running watcher; `looks` waits until it has looked so often again."""

    def __init__(self, registry: Registry, drop: DropSettings) -> None:
        self._watcher = DropWatcher(registry, open_store(drop), drop)
        self._looked = asyncio.Condition()
        self._count = 0
        self.outcomes: list[Outcome] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Watched]:
        look: Callable[[], Awaitable[Any]] = self._watcher.look

        async def counted() -> None:
            self.outcomes = list(await look())
            async with self._looked:
                self._count += 1
                self._looked.notify_all()

        self._watcher.look = counted  # type: ignore[method-assign]
        running = asyncio.create_task(self._watcher.run())
        try:
            yield self
        finally:
            running.cancel()

    async def looks(self, number: int = 4) -> list[Outcome]:
        async with self._looked:
            until = self._count + number
            await self._looked.wait_for(lambda: self._count >= until)
        return self.outcomes

    async def until_nothing_waits(self) -> None:
        while await self.looks(1):
            pass


@pytest.fixture
async def registry(seaweed: Seaweed) -> Registry:
    registry = Registry(open_store(seaweed.direct(f"t-{uuid.uuid4().hex[:12]}/registry")))
    await registry.put_base(TEXT)
    return registry


def files_of(tmp_path: Path, seed: int) -> dict[str, bytes]:
    folder = plain(seed=seed).write(tmp_path / str(seed))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def test_a_walkthrough_copied_in_slices(registry: Registry, seaweed: Seaweed, tmp_path: Path) -> None:
    bucket, files = Bucket(seaweed), files_of(tmp_path, 1)
    async with Watched(registry, bucket.settings).running() as watched:
        await bucket.put(f"maze-grpo/{CONFIG}", files[CONFIG])
        assert {outcome.reason for outcome in await watched.looks()} == {"no_weights"}
        async with bucket.in_parts(f"maze-grpo/{WEIGHTS}", files[WEIGHTS]):
            assert {outcome.reason for outcome in await watched.looks()} == {"no_weights"}
            assert await registry.versions(TEXT.base, "maze-grpo") == []
        await watched.until_nothing_waits()
    assert await registry.versions(TEXT.base, "maze-grpo") == [1]
    assert (await registry.head(TEXT.base, "maze-grpo")).aliases == {"canary": 1}


async def test_a_trainers_exports_step_by_step(registry: Registry, seaweed: Seaweed, tmp_path: Path) -> None:
    bucket = Bucket(seaweed)
    async with Watched(registry, bucket.settings).running() as watched:
        for step in (20, 40):
            for name, data in {**EXTRA, **files_of(tmp_path, step)}.items():
                await bucket.put(f"r1-train/global_step_{step}/policy/{name}", data)
        await bucket.put("r1-train/dumped_evals/step_40.jsonl", b"{}")
        await bucket.put(f"r1-train/global_step_60/policy/{WEIGHTS}", files_of(tmp_path, 60)[WEIGHTS])
        await watched.looks(2)
        while {outcome.reason for outcome in await watched.looks(1)} != {"no_config"}:
            pass
    assert await registry.versions(TEXT.base, "r1-train") == [1, 2]
    sources = [(await registry.manifest(AdapterRef(TEXT.base, "r1-train", version))).source for version in (1, 2)]
    assert [source["step"] for source in sources] == [20, 40]
    assert {source["address"] for source in sources} == {bucket.settings.url}
    keys = [row.key async for row in registry.store.list("blobs/")]
    assert {key.rpartition("/")[2] for key in keys} == {CONFIG, WEIGHTS}, "nothing but the two files is published"


async def test_two_gateways_and_the_same_content_twice(registry: Registry, seaweed: Seaweed, tmp_path: Path) -> None:
    bucket, files = Bucket(seaweed), files_of(tmp_path, 1)
    other = Registry(registry.store)
    async with Watched(registry, bucket.settings).running() as one, Watched(other, bucket.settings).running() as two:
        for name, data in files.items():
            await bucket.put(f"maze/{name}", data)
        await asyncio.gather(one.looks(2), two.looks(2))
        await asyncio.gather(one.until_nothing_waits(), two.until_nothing_waits())
        assert await registry.versions(TEXT.base, "maze") == [1]
        for name, data in files.items():
            await bucket.put(f"maze/{name}", data)
        await asyncio.gather(one.looks(2), two.looks(2))
        await asyncio.gather(one.until_nothing_waits(), two.until_nothing_waits())
    assert await registry.versions(TEXT.base, "maze") == [1]


async def test_a_file_that_grows_on_a_shared_disk(registry: Registry, tmp_path: Path) -> None:
    files, drop = files_of(tmp_path, 1), tmp_path / "drop"
    folder = drop / "maze"
    folder.mkdir(parents=True)
    settings = DropSettings(url=f"file://{drop}", base=TEXT.base, interval_s=LOOK_S, settle_s=0)
    async with Watched(registry, settings).running() as watched:
        (folder / CONFIG).write_bytes(files[CONFIG])
        with (folder / WEIGHTS).open("wb") as file:
            for start in range(0, len(files[WEIGHTS]) - 1, 4000):
                file.write(files[WEIGHTS][start : start + 4000][: len(files[WEIGHTS]) - 1 - start])
                file.flush()
                assert {outcome.reason for outcome in await watched.looks(3)} == {"weights_cut_off"}
            file.write(files[WEIGHTS][-1:])
        await watched.looks(1)
        await watched.until_nothing_waits()
    assert await registry.versions(TEXT.base, "maze") == [1]


async def test_looking_once_tells_everything(seaweed: Seaweed, tmp_path: Path) -> None:
    bucket = Bucket(seaweed)
    for name, data in files_of(tmp_path, 1).items():
        await bucket.put(f"a/{name}", data)
        await bucket.put(f"team/B/{name}", data[:-3])
    found = await find(open_store(bucket.settings), settle_s=0, look_again_s=0.1)
    assert [(one.name, one.original, one.reason) for one in found] == [
        ("a", "a", None),
        ("team/b", "team/B", "config_cut_off"),
    ]


async def test_the_gateways_app_watches_while_it_lives(registry: Registry, seaweed: Seaweed, tmp_path: Path) -> None:
    bucket, app = Bucket(seaweed), FastAPI()
    like = RegistrySettings(**bucket.settings.model_dump(include=set(RegistrySettings.model_fields)))
    watch_drop(app, registry, bucket.settings, like)
    for name, data in files_of(tmp_path, 1).items():
        await bucket.put(f"maze/{name}", data)
    async with asyncio.timeout(60), app.router.lifespan_context(app):
        await _until_published(registry)
    assert await registry.versions(TEXT.base, "maze") == [1]


async def _until_published(registry: Registry) -> None:
    for _ in range(600):
        if await registry.versions(TEXT.base, "maze"):
            return
        await asyncio.sleep(0.05)


def test_without_a_drop_section_nothing_is_watched() -> None:
    app = FastAPI()
    before = app.router.lifespan_context
    watch_drop(app, None, None, RegistrySettings(url="memory://"))  # type: ignore[arg-type]
    assert app.router.lifespan_context is before
