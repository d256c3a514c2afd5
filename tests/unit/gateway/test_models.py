"""`/v1/models` of a registry with many adapters: whole, in pages, after changes."""

from __future__ import annotations

import dataclasses

import pytest

from adapters.types import AdapterEntry, FileDigest, VersionEntry
from gateway.catalogue import Catalogue
from gateway.model_routes import ModelLists
from tests.scripted_backend import ScriptedBackend
from tests.unit.gateway.conftest import prepared


@pytest.fixture
async def many(http, registry) -> list[str]:
    for number in range(8):
        await registry.publish("demo", f"bird-{number}", prepared(b"%d" % number))
        await registry.promote("demo", f"bird-{number}", "production", 1)
    await registry.publish("demo", "unpromoted", prepared(b"u"))
    await http.post("/registry/v1/refresh")
    return ["demo", *(f"demo:bird-{number}" for number in range(8)), "demo:parrot"]


async def page(http, status: int = 200, **query) -> dict:
    answer = await http.get("/v1/models", params=query)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_the_whole_list_by_default(http, many):
    whole = await page(http)
    assert [card["id"] for card in whole["data"]] == many
    assert (whole["has_more"], whole["first_id"], whole["last_id"]) == (False, "demo", "demo:parrot")


@pytest.mark.parametrize("limit", [1, 3, 10, 10_000])
async def test_pages_hold_every_model_once_in_the_order_of_the_whole(http, many, limit):
    found, query = [], {"limit": limit}
    for _ in range(20):
        part = await page(http, **query)
        found += [card["id"] for card in part["data"]]
        if not part["has_more"]:
            break
        query["after"] = part["last_id"]
    assert found == many


async def test_pages_of_all_versions(http, many):
    ids = [card["id"] for card in (await page(http, versions=True))["data"]]
    assert ids[-3:] == ["demo:parrot@1", "demo:parrot@2", "demo:unpromoted@1"]
    rest = await page(http, versions=True, after="demo:parrot")
    assert [card["id"] for card in rest["data"]] == ids[-3:]


@pytest.mark.parametrize("after", ["nonsense:", "a b", "x" * 600, "", "demo:Parrot"])
async def test_an_after_that_is_no_model_name_is_a_400(http, many, after):
    assert (await page(http, 400, after=after))["error"]["code"] == "invalid_model_name"


@pytest.mark.parametrize("after", ["other", "demo:nobody", "demo:parrot@canary", "demo:parrot@9"])
async def test_an_after_that_no_list_holds_is_a_404(http, many, after):
    assert (await page(http, 404, after=after))["error"]["param"] == "after"


@pytest.mark.parametrize("limit", ["0", "-1", "10001", "many"])
async def test_a_limit_that_is_none_is_a_400(http, limit):
    assert (await page(http, 400, limit=limit))["error"]["param"] == "limit"


async def test_a_model_that_left_the_list_keeps_its_place_for_who_is_paging(http, registry, many):
    await registry.unset("demo", "bird-3", "production")
    await http.post("/registry/v1/refresh")
    part = await page(http, limit=2, after="demo:bird-3")
    assert [card["id"] for card in part["data"]] == ["demo:bird-4", "demo:bird-5"]


async def test_a_change_is_in_the_next_list(http, registry, many):
    await page(http)
    await registry.publish("demo", "aardvark", prepared(b"a"))
    await registry.promote("demo", "aardvark", "production", 1)
    await http.post("/registry/v1/refresh")
    assert [card["id"] for card in (await page(http))["data"]][:2] == ["demo", "demo:aardvark"]


class StubView:
    """A picture of the registry that tests change by hand."""

    def __init__(self, entries: list[AdapterEntry]) -> None:
        self.entries = entries
        self.generation = 1

    def adapters(self) -> tuple[AdapterEntry, ...]:
        return tuple(self.entries)


def entry(name: str, production: int = 1) -> AdapterEntry:
    files = (FileDigest("adapter_model.safetensors", 1, "a" * 64),)
    versions = {n: VersionEntry(n, "d" * 64, files, 8, "2026-01-01T00:00:00Z") for n in (1, 2, 3)}
    return AdapterEntry("demo", name, 1, {"production": production}, versions)


def test_after_a_change_only_the_cards_of_what_changed_are_made_again(monkeypatch):
    made = []
    view = StubView([entry(f"bird-{number}") for number in range(5)])
    lists = ModelLists(Catalogue(view), ScriptedBackend())
    original = dataclasses.replace(view.entries[2], revision=2, aliases={"production": 3})
    lists.get(False)
    monkeypatch.setattr("gateway.model_routes._adapter_cards", lambda *args: made.append(args[0].name) or _cards(*args))
    view.entries[2], view.generation = original, 2
    lists.get(False)
    assert made == ["bird-2"]


def _cards(*args):
    from gateway.model_routes import Cards

    return Cards(args[0], (), (), ())
