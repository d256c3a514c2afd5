"""The digest of a file by its parts."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from adapters.cache import AdapterCache, hashing
from adapters.publishing import Publication, publish_folder
from adapters.registry import Registry
from adapters.settings import CacheSettings
from adapters.tree_digest import TREE_PART_BYTES, TreeDigest, tree_of
from adapters.types import CONFIG_FILE, WEIGHTS_FILE, ResolvedAdapter
from tests.fake_store import FakeStore
from tests.measure_contract import contract, write_adapter


def digest_of(data: bytes, piece_bytes: int) -> str | None:
    digest = TreeDigest()
    for start in range(0, len(data), piece_bytes):
        digest.update(data[start : start + piece_bytes])
    return digest.hexdigest()


@pytest.mark.parametrize("size", [0, 1, TREE_PART_BYTES])
def test_a_file_of_one_part_needs_none(size: int) -> None:
    assert digest_of(b"x" * size, 2**20) is None


@pytest.mark.parametrize("size", [TREE_PART_BYTES + 1, 2 * TREE_PART_BYTES, 2 * TREE_PART_BYTES + 5])
def test_pieces_of_any_size_give_the_digest_over_the_parts(size: int) -> None:
    data = hashlib.shake_256(b"seed").digest(2**16) * (size // 2**16 + 1)
    data = data[:size]
    parts = [hashlib.sha256(data[start : start + TREE_PART_BYTES]).digest() for start in range(0, size, TREE_PART_BYTES)]
    for piece_bytes in (1_000_003, TREE_PART_BYTES, TREE_PART_BYTES + 1, 3 * TREE_PART_BYTES):
        assert digest_of(data, piece_bytes) == tree_of(parts)


async def test_what_publishing_writes_down_of_a_large_file_is_what_a_node_checks_it_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(FakeStore())
    await registry.put_base(contract())
    write_adapter(tmp_path / "in", 50)
    published = await publish_folder(registry, Publication("measured", "large", tmp_path / "in"))
    entry = await registry.entry("measured", "large")
    version = entry.versions[published.ref.version]
    by_name = {file.name: file for file in version.files}
    assert by_name[CONFIG_FILE].tree is None
    assert by_name[WEIGHTS_FILE].tree is not None

    checked: list[str] = []
    monkeypatch.setattr(hashing, "tree_of", lambda parts: checked.append(tree_of(parts)) or checked[-1])
    cache = AdapterCache(registry.store, CacheSettings(dir=tmp_path / "cache"))
    await cache.fetch(ResolvedAdapter(published.ref, version.digest, version.files, version.rank))
    await cache.close()
    assert checked == [by_name[WEIGHTS_FILE].tree]
