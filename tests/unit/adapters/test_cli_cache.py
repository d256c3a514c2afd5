"""`loramux cache`: what lies on this node's disk, whole or not, in use or not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from adapters.cache import AdapterCache
from adapters.cli.node_cache import to_prune
from adapters.registry import Registry
from adapters.settings import CacheSettings
from adapters.store import open_store
from adapters.types import ResolvedAdapter
from tests import adapter_folders
from tests.author import Author


@pytest.fixture
def author(tmp_path: Path) -> Author:
    """Somebody on a node that has two versions on its disk."""
    author = Author(tmp_path, cache={"dir": str(tmp_path / "cache")})
    author.put_base(adapter_folders.TEXT)
    for seed in (1, 2):
        author.run("publish", str(adapter_folders.plain(seed=seed).write(tmp_path / f"{seed}")), "--name", "parrot")
    asyncio.run(fetch(author))
    return author


async def fetch(author: Author) -> None:
    cache, versions = await opened(author)
    for version in versions:
        (await cache.lease(version)).release()
    await cache.close()


async def opened(author: Author) -> tuple[AdapterCache, list[ResolvedAdapter]]:
    store = open_store(author.settings)
    entry = await Registry(store).entry("tiny/base", "parrot")
    refs = {number: await Registry(store).manifest(ref) for number, ref in ((n, _ref(n)) for n in entry.versions)}
    cache = AdapterCache(store, CacheSettings(dir=author.folder / "cache"))
    return cache, [ResolvedAdapter(m.ref, m.digest, m.files, m.rank) for m in refs.values()]


def _ref(number: int) -> Any:
    from adapters.names import AdapterRef

    return AdapterRef("tiny/base", "parrot", number)


def digests(author: Author) -> set[str]:
    return {path.name for path in (author.folder / "cache").iterdir() if not path.name.startswith(".")}


def test_ls_shows_refs_and_sizes(author: Author):
    said = author.json("cache")
    assert sorted(ref for row in said["entries"] for ref in row["refs"]) == ["tiny/base:parrot@1", "tiny/base:parrot@2"]
    assert said["used_bytes"] == sum(row["size_bytes"] for row in said["entries"])
    assert "2 adapters" in author.run("cache", "ls")


def test_a_node_without_a_cache_has_nothing(tmp_path: Path):
    author = Author(tmp_path, cache={"dir": str(tmp_path / "none")})
    assert author.json("cache")["entries"] == []
    assert not (tmp_path / "none").exists()


def test_verify_finds_what_is_damaged_and_removes_it_when_told(author: Author):
    assert "all whole" in author.run("cache", "verify")
    victim = next((author.folder / "cache").glob("[0-9a-f]*/adapter_config.json"))
    victim.chmod(0o644)
    victim.write_text("{}")
    assert author.json("cache", "verify", code=1)["chosen"] == [victim.parent.name]
    author.run("cache", "verify", "--yes")
    assert victim.parent.name not in digests(author)
    assert len(digests(author)) == 1


def test_prune_shows_first_and_never_takes_what_is_in_use(author: Author):
    assert len(author.json("cache", "prune", "--to", "0")["chosen"]) == 2
    assert len(digests(author)) == 2

    async def prune_beside_a_lease() -> str:
        cache, versions = await opened(author)
        async with await cache.lease(versions[0]):
            await asyncio.to_thread(author.run, "cache", "prune", "--to", "0", "--yes")
        await cache.close()
        return versions[0].digest

    assert {asyncio.run(prune_beside_a_lease())} == digests(author)
    author.run("cache", "prune", code=2)


def row(name: str, size: int, unused_s: float) -> dict[str, Any]:
    return {"digest": name, "size_bytes": size, "unused_s": unused_s}


def test_what_is_long_unused_goes_and_then_the_oldest_until_the_rest_fits():
    rows = [row("a", 10, 5), row("b", 10, 50), row("c", 10, 500)]
    assert [found["digest"] for found in to_prune(rows, 100, None)] == ["c"]
    assert [found["digest"] for found in to_prune(rows, None, 10)] == ["c", "b"]
    assert [found["digest"] for found in to_prune(rows, 100, 10)] == ["c", "b"]
    assert to_prune(rows, None, 30) == []
