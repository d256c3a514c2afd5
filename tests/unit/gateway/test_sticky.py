"""Aliases that share their traffic: who gets which version, and how the answer says so."""

from __future__ import annotations

import pytest

from gateway.settings import GatewaySettings

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def settings() -> GatewaySettings:
    return GatewaySettings(sticky_headers=("x-session", "x-device"), keepalive_after_s=0.1)


@pytest.fixture
async def shared(app, registry) -> None:
    await registry.set_weights("demo", "parrot", "production", {1: 50, 2: 50})
    await app.state.parts.view.refresh()


async def ask(http, headers: dict[str, str] | None = None, **fields) -> tuple[str, str | None]:
    body = {"model": "demo:parrot", "messages": HELLO} | fields
    answer = await http.post("/v1/chat/completions", json=body, headers=headers or {})
    assert answer.status_code == 200, answer.text
    return answer.json()["model"], answer.headers.get("x-loramux-sticky")


@pytest.mark.parametrize("field", ["user", "safety_identifier", "prompt_cache_key"])
async def test_a_caller_keeps_its_version(http, shared, field):
    versions = set()
    for number in range(40):
        first, again = [await ask(http, **{field: f"caller-{number}"}) for _ in range(2)]
        assert first == again
        assert first[1] == "key"
        versions.add(first[0])
    assert versions == {"demo:parrot@1", "demo:parrot@2"}


async def test_a_configured_header_keeps_a_caller_too(http, shared):
    by_header = [await ask(http, {"x-session": f"caller-{number}"}) for number in range(20)]
    by_field = [await ask(http, user=f"caller-{number}") for number in range(20)]
    assert by_header == by_field


async def test_the_first_that_is_there_decides(http, shared):
    keys = {"user": "a", "safety_identifier": "b", "prompt_cache_key": "c"}
    for number in range(20):
        user = f"caller-{number}"
        expected = await ask(http, user=user)
        assert await ask(http, {"x-session": "d"}, **(keys | {"user": user})) == expected
        header_only = await ask(http, {"x-device": "e", "x-session": user})
        assert header_only == expected


async def test_who_gives_no_key_gets_either_and_is_told_so(http, shared):
    answers = {await ask(http) for _ in range(60)}
    assert answers == {("demo:parrot@1", "none"), ("demo:parrot@2", "none")}


async def test_an_alias_without_shares_says_nothing(http):
    assert await ask(http, user="ann") == ("demo:parrot@1", None)


async def test_a_growing_share_takes_nobody_back(http, app, registry):
    before: set[int] = set()
    for share in (10, 40, 90):
        await registry.set_weights("demo", "parrot", "production", {1: 100 - share, 2: share})
        await app.state.parts.view.refresh()
        now = {number for number in range(60) if (await ask(http, user=str(number)))[0].endswith("@2")}
        assert before <= now
        before = now


async def test_a_late_stream_names_the_version_and_how_it_was_chosen(http, shared, backend):
    backend.delay_s = 0.3
    body = {"model": "demo:parrot", "messages": HELLO, "stream": True, "user": "ann"}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.headers["x-loramux-sticky"] == "key"


async def test_the_card_of_a_shared_alias_stays_the_same(http, shared):
    cards = {(await http.get("/v1/models/demo:parrot")).text for _ in range(20)}
    assert len(cards) == 1
