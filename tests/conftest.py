"""Fixtures that any test may use."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapters.settings import StoreSettings
from adapters.store import Store, open_store
from tests.seaweed import Seaweed

STORES = ("memory", "local", "s3")


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """One S3 server for the whole run; tests share it by prefix."""
    server = Seaweed(tmp_path_factory.mktemp("seaweed"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def s3_settings(seaweed: Seaweed) -> Iterator[StoreSettings]:
    """Settings of an S3 store with a prefix of this test's own; the proxy's counts and faults start fresh."""
    seaweed.proxy.reset()
    yield seaweed.settings(f"t-{uuid.uuid4().hex[:12]}/registry")
    seaweed.proxy.reset()


@pytest.fixture(params=STORES)
def store_settings(request: pytest.FixtureRequest, tmp_path: Path) -> StoreSettings:
    """Settings of each kind of store in turn, each empty."""
    if request.param == "s3":
        return request.getfixturevalue("s3_settings")
    url = f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/registry"
    return StoreSettings(url=url)


@pytest.fixture
def store(store_settings: StoreSettings) -> Store:
    """An empty store of each kind in turn."""
    return open_store(store_settings)


@pytest.fixture
def store_kind(store_settings: StoreSettings) -> str:
    """`memory`, `file` or `s3`."""
    return store_settings.url.partition(":")[0]
