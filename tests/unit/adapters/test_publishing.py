"""Publishing as one call: what is refused leaves nothing in the store, and the refusal looks around."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from adapters.errors import AdapterRefused
from adapters.publishing import Publication, publish_folder
from adapters.registry import Registry
from tests.adapter_folders import TEXT, contract_of, plain
from tests.fake_store import FakeStore


async def registry_with(*contracts) -> Registry:
    registry = Registry(FakeStore())
    for contract in contracts:
        await registry.put_base(contract)
    return registry


async def test_an_adapter_of_another_size_is_told_where_it_fits(tmp_path):
    wide = replace(contract_of("model", wider=2), base="tiny-wide")
    registry = await registry_with(replace(TEXT, base="tiny"), wide, replace(TEXT, base="tiny-again"))
    folder = plain(contract_of("model", wider=2)).write(tmp_path)
    with pytest.raises(AdapterRefused) as caught:
        await publish_folder(registry, Publication("tiny", "sql", folder))

    assert (caught.value.reason, caught.value.hint) == ("shape_mismatch", "it fits `tiny-wide`: publish it there")
    assert (await publish_folder(registry, Publication("tiny-wide", "sql", folder))).created


async def test_an_adapter_that_fits_nowhere_is_not_sent_anywhere(tmp_path):
    registry = await registry_with(replace(TEXT, base="tiny"), replace(contract_of("model", wider=3), base="tiny-wide"))
    with pytest.raises(AdapterRefused) as caught:
        await publish_folder(registry, Publication("tiny", "sql", plain(contract_of("model", wider=2)).write(tmp_path)))

    assert "tiny-wide" not in str(caught.value.hint)


async def test_an_archive_and_its_folder_are_one_version(tmp_path):
    registry = await registry_with(replace(TEXT, base="tiny"))
    folder = plain().write(tmp_path / "folder")
    archive = Path(shutil.make_archive(str(tmp_path / "packed"), "zip", folder))
    first = await publish_folder(registry, Publication("tiny", "sql", folder))
    second = await publish_folder(registry, Publication("tiny", "sql", archive))

    assert (second.created, second.ref) == (False, first.ref)


async def test_a_refused_adapter_leaves_nothing_in_the_store(tmp_path):
    registry = await registry_with(replace(TEXT, base="tiny"))
    before = [row.key async for row in registry.store.list("")]
    with pytest.raises(AdapterRefused):
        await publish_folder(registry, Publication("tiny", "sql", plain(rank=16).write(tmp_path)))

    assert [row.key async for row in registry.store.list("")] == before
