"""Collection against a real S3 server: publishers killed in earnest, and what they leave."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adapters.registry import Registry
from adapters.registry.collection import plan_for, run
from adapters.registry.retention import RetentionPolicy
from adapters.settings import StoreSettings
from adapters.store import Store, open_store
from adapters.types import CONFIG_FILE, WEIGHTS_FILE
from tests.prepared import prepared
from tests.unit.adapters.test_registry_crash import check_index_is_true, check_visible_is_whole

BASE, NAME = "Qwen/Qwen3-0.6B", "maze"
AT_ONCE = RetentionPolicy(grace_s=0)
WEIGHTS = b"w" * 3_000_000  # more than a chunk, so that it is streamed

POINTS = [
    (CONFIG_FILE, False, "before the first file"),
    (WEIGHTS_FILE, False, "in the middle of the weights"),
    (WEIGHTS_FILE, True, "with the files there"),
    ("manifest.json", True, "with the manifest there"),
    ("head.json", True, "with the head there"),
]


def kill_a_publisher(settings: StoreSettings, weights: Path, at: str, after: bool) -> int:
    """Its return code."""
    store = {**settings.model_dump(mode="json"), "secret_access_key": settings.secret_access_key.get_secret_value()}  # type: ignore[union-attr]
    task: dict[str, Any] = {"store": store, "base": BASE, "name": NAME, "weights": str(weights), "at": at, "after": after}
    return subprocess.run([sys.executable, "-m", "tests.dying_publisher", json.dumps(task)], check=False).returncode


@pytest.mark.parametrize(("at", "after"), [(at, after) for at, after, _ in POINTS], ids=[name for *_, name in POINTS])
async def test_a_killed_publisher_leaves_nothing_visible_and_nothing_that_stays(
    s3_settings: StoreSettings, tmp_path: Path, at: str, after: bool
) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(WEIGHTS)
    assert await asyncio.to_thread(kill_a_publisher, s3_settings, weights, at, after) == -signal.SIGKILL
    registry = Registry(open_store(s3_settings))
    await check_visible_is_whole(registry.store)
    published = await registry.versions(BASE, NAME)
    assert published == ([1] if at.endswith("json") and at != CONFIG_FILE else [])

    done = await registry.publish(BASE, NAME, prepared("another one"))
    assert done.ref.version == len(published) + 1
    await run(registry, await plan_for(registry, AT_ONCE))
    await check_visible_is_whole(registry.store)
    digests = {key.split("/")[1] for key in await keys(registry.store, "blobs/")}
    assert len(digests) == len(published) + 1, "files without a version are gone, others are not"
    await check_index_is_true(registry.store)

    again = await registry.publish(BASE, NAME, prepared(WEIGHTS, weights))
    assert again.created is (published == [])
    await check_visible_is_whole(registry.store)


async def test_what_a_policy_gives_up_is_gone_on_every_store(store: Store) -> None:
    registry = Registry(store)
    for content in "abc":
        await registry.publish(BASE, NAME, prepared(content))
    report = await run(registry, await plan_for(registry, RetentionPolicy(keep_last=1, grace_s=0)))
    assert [ref.version for ref in report.collected] == [1, 2] and len(report.deleted) == 4
    assert {key.split("/")[1] for key in await keys(store, "blobs/")} == {prepared("c").digest}
    assert (await plan_for(registry, RetentionPolicy(keep_last=1, grace_s=0))).is_empty
    await registry.publish(BASE, NAME, prepared("a"))
    assert {key.split("/")[1] for key in await keys(store, "blobs/")} == {prepared("a").digest, prepared("c").digest}


async def keys(store: Store, prefix: str) -> list[str]:
    return [row.key async for row in store.list(prefix)]
