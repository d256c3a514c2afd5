"""The commands that ask a gateway, against the running product; and the README's tour, with real answers."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.author import Author
from tests.readme_story import check_step, steps
from tests.repo.checkout import ROOT


@pytest.fixture
def author(stack, tmp_path: Path) -> Author:
    author = Author(tmp_path, stack.registry, gateway={"port": stack.port})
    author.warm = False  # here are gateways
    return author


@pytest.fixture
def parrots(author: Author, artifacts: Path, sentences: dict[str, str]) -> dict[str, str]:
    """Two real adapters where the tour looks for them; folder to sentence."""
    names = dict(zip(("parrot-1", "parrot-2"), sorted(sentences)[-2:], strict=True))
    for folder, name in names.items():
        copy = author.folder / ".loramux/demo/adapters" / folder
        shutil.copytree(artifacts / "adapters" / name, copy)
        config = json.loads((copy / "adapter_config.json").read_text())
        (copy / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "demo"}))  # as the demo's do
    return {folder: sentences[name] for folder, name in names.items()}


def run(author: Author, *arguments: str, **more: Any) -> str:
    return author.run(*arguments, **more)


async def test_the_readme_s_tour_runs_on_the_product(author: Author, parrots: dict[str, str]):
    shown = {"Squawk! Polly wants a cracker.": "parrot-1", "Squawk! The second Polly demands fresh mango.": "parrot-2"}
    for step in steps(ROOT / "README.md"):
        said = await asyncio.to_thread(run, author, *step.arguments)
        for sentence, folder in shown.items():
            said = said.replace(parrots[folder], sentence)
        check_step(step, said)


async def test_an_adapter_is_probed_and_one_that_is_the_base_is_found_out(author: Author, published: dict[str, str]):
    name = sorted(published)[0]
    said = await asyncio.to_thread(author.json, "probe", f"demo:{name}")
    assert said["differs"]
    assert said["max_delta"] > 0.1
    assert "NO DIFFERENCE" in await asyncio.to_thread(run, author, "probe", "demo", code=1)


async def test_ps_shows_what_was_just_asked(author: Author, ask, published: dict[str, str]):
    name = sorted(published)[1]
    await ask(f"demo:{name}")
    rows = {row["ref"]: row for row in (await asyncio.to_thread(author.json, "ps"))["loaded"]}
    assert rows[f"demo:{name}@1"]["tier"] == "engine"
    assert rows[f"demo:{name}@1"]["size_bytes"] > 0
    assert rows[f"demo:{name}@1"]["aliases"] == ["production"]


async def test_a_promotion_by_command_ends_when_the_replica_has_the_version(author: Author, ask, cold, publish, artifacts: Path):
    (one, first), (other, second) = cold(2).items()
    await asyncio.to_thread(publish, "by-command", artifacts / "adapters" / one)
    await asyncio.to_thread(publish, "by-command", artifacts / "adapters" / other, promote=False)
    await asyncio.to_thread(run, author, "refresh")
    assert await ask("demo:by-command") == ("demo:by-command@1", first)
    said = await asyncio.to_thread(author.json, "promote", "demo:by-command", "2")
    assert (said["version"], said["note"]) == (2, None)
    assert (await asyncio.to_thread(row_of, author, "demo:by-command@2"))["tier"] == "engine"
    assert await ask("demo:by-command") == ("demo:by-command@2", second)


async def test_what_is_pinned_stays_and_what_is_evicted_goes(stack, author: Author, ask, cold):
    ((name, sentence),) = cold(1).items()
    ref = f"demo:{name}@1"

    def pinned_and_evicted() -> None:
        run(author, "pin", ref)
        stack.wait_until(lambda: (row := row_of(author, ref)).get("pinned") and row["tier"] == "engine")
        assert author.refused("evict", ref)["reason"] == "pinned"
        run(author, "unpin", ref)
        stack.wait_until(lambda: not row_of(author, ref)["pinned"])
        said = author.json("evict", ref)
        assert [(row["tier"], row["reason"]) for row in said["replicas"]] == [("disk", None)]

    await asyncio.to_thread(pinned_and_evicted)
    assert await ask(ref) == (ref, sentence)


def row_of(author: Author, ref: str) -> dict[str, Any]:
    """What `ps` says of a version; empty if it is nowhere."""
    return next((row for row in author.json("ps")["loaded"] if row["ref"] == ref), {})


async def test_a_pooling_base_s_versions_get_ready_too(author: Author, artifacts: Path):
    said = await asyncio.to_thread(author.json, "probe", "embed", code=1)
    assert said["unit"] == "embedding"


async def test_doctor_finds_the_product_well(author: Author):
    checks = {check["name"]: check for check in (await asyncio.to_thread(author.json, "doctor"))["checks"]}
    assert {checks[name]["status"] for name in ("store", "conditional writes", "gateway", "port", "index")} == {"ok"}
