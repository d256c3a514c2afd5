"""The commands that ask a gateway: chat, probe, ps, rollout, and publish when it waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import adapter_folders
from tests.author import Author
from tests.stub_gateway import StubGateway

PARROT = {
    "versions": [{"version": 1, "size_bytes": 8000}, {"version": 2, "size_bytes": 9000}],
    "aliases": {"production": 1},
    "weights": {"production": {"1": 90, "2": 10}},
}


@pytest.fixture
def gateway() -> Iterator[StubGateway]:
    stub = StubGateway()
    stub.says = {"tiny/base": "I am the base.", "tiny/base:parrot@1": "Squawk!", "tiny/base:parrot@2": "Squawk two!"}
    stub.resident = {"tiny/base": {"requests": 1, "resident": {"tiny/base:parrot@1": 1, "tiny/base:parrot@2": 0}}}
    stub.adapters = {"parrot": PARROT}
    stub.start()
    yield stub
    stub.stop()


@pytest.fixture
def author(tmp_path: Path, gateway: StubGateway) -> Author:
    author = Author(tmp_path)
    author.env["LORAMUX_GATEWAY_URL"] = gateway.url
    author.put_base(adapter_folders.TEXT)
    return author


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(adapter_folders.plain(seed=1).write(tmp_path / "adapter"))


def test_chat_streams_the_answer_and_says_who_spoke_on_stderr(author: Author):
    result = author.result("chat", "parrot@2", "Hello")
    assert result.stdout == "Squawk two! \n"
    assert result.stderr.startswith("tiny/base:parrot@2  tier disk  first token ")


def test_chat_knows_the_tier_also_when_it_came_late(author: Author, gateway: StubGateway):
    gateway.late_headers = True
    assert author.json("chat", "parrot@2", "Hello")["answers"][0]["tier"] == "remote"


def test_an_error_in_mid_stream_ends_what_was_said(author: Author, gateway: StubGateway, monkeypatch: pytest.MonkeyPatch):
    def broken(model: str) -> list[dict]:
        word = {"model": model, "choices": [{"delta": {"content": "Squ"}}]}
        return [word, {"model": model, "error": {"code": "engine_unavailable", "message": "the engine died"}}]

    monkeypatch.setattr(gateway, "_events", broken)
    said = author.run("chat", "parrot@2", "Hello", code=1)
    assert said.startswith("Squ\n")
    assert "engine_unavailable: the engine died" in said


def test_chat_makes_the_gateway_look_first(author: Author, gateway: StubGateway):
    author.run("chat", "parrot@1", "Hello")
    assert gateway.asked[0] == ("/registry/v1/refresh", None)


def test_chat_with_two_versions_gives_both_answers(author: Author):
    said = author.run("chat", "parrot@1", "parrot@2", "Hello")
    assert "== tiny/base:parrot@1\nSquawk!" in said
    assert "== tiny/base:parrot@2\nSquawk two!" in said


def test_chat_takes_the_prompt_from_a_pipe(author: Author):
    assert "I am the base." in author.run("chat", "tiny/base", stdin="Who are you?\n")
    assert author.run("chat", "parrot@1", "parrot@2", stdin="Hello").count("==") == 2
    assert "there is no prompt" in author.run("chat", "parrot@1", stdin="", code=2)


def test_chat_tells_the_gateway_s_error_as_it_is(author: Author, gateway: StubGateway):
    gateway.refuse("tiny/base:nobody", 404, "model_not_found", "does not exist", hint="did you mean `parrot`?")
    assert author.refused("chat", "nobody", "Hello")["hint"] == "did you mean `parrot`?"


def test_no_gateway_is_an_error_that_says_where_it_was_looked_for(author: Author):
    said = author.refused("chat", "parrot", "Hello", "--gateway", "http://127.0.0.1:9")
    assert (said["code"], said["reason"], said["value"]) == ("engine_unavailable", "gateway_unreachable", "http://127.0.0.1:9")


def test_ps_shows_what_is_loaded_how_big_it_is_and_who_uses_it(author: Author):
    assert author.run("ps").splitlines() == [
        "REF                 TIER    REPLICAS  PINNED  USES  STATE  SIZE  ALIASES",
        "tiny/base:parrot@1  engine  1         -       1     ready  8 kB  production",
        "tiny/base:parrot@2  engine  1         -       0     ready  9 kB  production",
        "tiny/base: 2 loaded, 1 answers under way",
    ]
    assert author.run("ps", "-q").split() == ["tiny/base:parrot@1", "tiny/base:parrot@2"]


def test_a_probe_measures_the_difference_to_the_base(author: Author, gateway: StubGateway):
    gateway.logprobs = {"tiny/base": [None, -1.0, -2.0, -9.0], "tiny/base:parrot@1": [None, -1.5, -2.1, -9.0]}
    said = author.json("probe", "parrot@1")
    assert said["differs"]
    assert said["max_delta"] == pytest.approx(0.5)
    assert said["mean_delta"] == pytest.approx(0.3)
    assert said["greedy_differs"] == 4


def test_an_adapter_without_effect_is_reported_as_such(author: Author, gateway: StubGateway):
    gateway.says["tiny/base:parrot@1"] = gateway.says["tiny/base"]
    gateway.logprobs = {model: [None, -1.0, -2.0] for model in ("tiny/base", "tiny/base:parrot@1")}
    assert "NO DIFFERENCE to tiny/base" in author.run("probe", "parrot@1", code=1)


def test_a_base_that_embeds_is_probed_by_its_embeddings(author: Author, gateway: StubGateway):
    gateway.embeds = True
    gateway.logprobs = {"tiny/base": [0.1, 0.2], "tiny/base:parrot@1": [0.1, 0.4]}
    said = author.json("probe", "parrot@1")
    assert (said["unit"], said["differs"], said["max_delta"]) == ("embedding", True, pytest.approx(0.2))


def test_publish_waits_until_a_gateway_has_answered(author: Author, gateway: StubGateway, folder: str):
    gateway.refuse("tiny/base:parrot@1", 404, "model_not_found", "not yet seen")
    gateway.refuse("tiny/base:parrot@1", 503, "adapter_loading", "loading")
    said = author.json("publish", folder, "--name", "parrot", "--wait-ready")
    assert said["ready"] == {"ready": True, "error": None}
    assert ("/registry/v1/refresh", None) in gateway.asked


def test_a_version_that_no_engine_takes_is_published_but_not_ready(author: Author, gateway: StubGateway, folder: str):
    for _ in range(3):
        gateway.refuse("tiny/base:parrot@1", 422, "adapter_incompatible", "rank 99", reason="rank_too_large", limit=8, value=99)
    said = author.json("publish", folder, "--name", "parrot", "--wait-ready", code=1)
    assert said["ref"] == "tiny/base:parrot@1"
    assert (said["ready"]["ready"], said["ready"]["error"]["reason"]) == (False, "rank_too_large")


def test_nobody_waits_for_a_base_that_is_not_served(author: Author, gateway: StubGateway, folder: str):
    gateway.refuse("other:parrot@1", 404, "model_not_found", "no such model")
    said = author.json("publish", folder, "--name", "parrot", "--base", "other", "--wait-ready", code=1)
    assert said["ready"]["error"]["reason"] == "base_not_served"


def test_an_engine_that_comes_back_is_waited_for(author: Author, gateway: StubGateway, folder: str):
    gateway.refuse("tiny/base:parrot@1", 503, "engine_unavailable", "the engine of this base died and is being restarted")
    assert author.json("publish", folder, "--name", "parrot", "--wait-ready")["ready"]["ready"]


def test_waiting_ends_with_the_last_trouble(author: Author, gateway: StubGateway, folder: str):
    for _ in range(50):
        gateway.refuse("tiny/base:parrot@1", 503, "adapter_loading", "still loading")
    said = author.json("publish", folder, "--name", "parrot", "--wait-ready", "--timeout-s", "1", code=1)
    assert "still loading" in said["ready"]["error"]["message"]


def test_publish_with_a_probe_warns_of_no_difference_and_stands(author: Author, gateway: StubGateway, folder: str):
    gateway.says["tiny/base:parrot@1"] = gateway.says["tiny/base"]
    gateway.logprobs = {model: [None, -1.0, -2.0] for model in ("tiny/base", "tiny/base:parrot@1")}
    assert "NO DIFFERENCE" in author.run("publish", folder, "--name", "parrot", "--probe")


def test_list_has_the_tier_where_a_gateway_answers(author: Author, folder: str):
    author.run("publish", folder, "--name", "parrot", "--promote")
    author.run("publish", folder, "--name", "quiet", "--promote")
    assert [row["tier"] for row in author.json("list")["adapters"]] == ["engine", "remote"]
    assert author.run("list").splitlines()[0].endswith("TIER")
    del author.env["LORAMUX_GATEWAY_URL"]
    assert "tier" not in author.json("list")["adapters"][0]


def test_a_gateway_in_the_settings_that_is_down_costs_list_only_its_column(tmp_path: Path, folder: str):
    author = Author(tmp_path, gateway={"port": 9})
    author.put_base(adapter_folders.TEXT)
    author.run("publish", folder, "--name", "parrot")
    assert "TIER" not in author.run("list")


def test_rollout_says_where_each_version_is(author: Author, folder: str):
    author.run("publish", folder, "--name", "parrot", "--promote")
    tree = author.json("rollout", "parrot")
    assert tree["aliases"]["production"]["versions"][0]["tier"] == "engine"
