"""Where versions should be: pin, unpin, prewarm, evict; and `ps`, which shows where they are."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from adapters.types import Directive
from tests import adapter_folders
from tests.author import Author
from tests.stub_gateway import StubGateway

FIRST, SECOND = "tiny/base:parrot@1", "tiny/base:parrot@2"


def row(tier: str = "engine", state: str = "ready", **more: Any) -> dict[str, Any]:
    return {"tier": tier, "users": 0, "pinned": False, "state": state, "reason": None, "size_bytes": 8000, "move_id": None} | more


def residency(*held: dict[str, dict[str, Any]], slots: int = 4) -> dict[str, Any]:
    reports = [{"replica": f"r{rank}", "slots": slots, "adapters": adapters} for rank, adapters in enumerate(held)]
    users = {ref: what["users"] for adapters in held for ref, what in adapters.items() if what["tier"] == "engine"}
    return {"tiny/base": {"requests": 3, "resident": users, "int_ids": [], "slots": slots, "replicas": reports}}


@pytest.fixture
def gateway() -> Iterator[StubGateway]:
    stub = StubGateway()
    stub.resident = residency({}, {})
    stub.adapters = {"parrot": {"versions": [{"version": 1, "size_bytes": 8000}], "aliases": {"production": 1}}}
    stub.start()
    yield stub
    stub.stop()


@pytest.fixture
def author(tmp_path: Path, gateway: StubGateway) -> Author:
    author = Author(tmp_path)
    author.env["LORAMUX_GATEWAY_URL"] = gateway.url
    author.put_base(adapter_folders.TEXT)
    for seed in (1, 2):
        folder = str(adapter_folders.plain(seed=seed).write(tmp_path / f"{seed}"))
        author.run("publish", folder, "--name", "parrot", *(["--promote"] if seed == 1 else []))
    return author


def directives(author: Author) -> tuple[Directive, ...]:
    return author.head("parrot").directives


# Pins and prewarms


def test_a_pin_on_a_name_follows_production_and_says_how_to_end_it(author: Author):
    said = author.run("pin", "parrot", "--replicas", "2", "-m", "busy")
    (pin,) = directives(author)
    assert (pin.target, pin.tier, pin.pin, pin.replicas, pin.who, pin.message) == ("production", "engine", True, 2, "ann", "busy")
    assert said.splitlines() == [
        f"pinned: tiny/base:parrot@production, kept in engines (revision {author.head('parrot').revision})",
        "undo: loramux unpin tiny/base:parrot@production",
    ]


def test_the_same_pin_again_changes_nothing(author: Author):
    author.run("pin", "parrot@1")
    assert "unchanged: tiny/base:parrot@1" in author.run("pin", "parrot@1")
    assert author.json("pin", "parrot@1")["changed"] is False


def test_unpin_ends_pins_and_leaves_prewarms(author: Author):
    author.run("pin", "parrot@1")
    author.run("prewarm", "parrot@1")
    assert author.run("unpin", "parrot@1").startswith("unpinned: tiny/base:parrot@1 ")
    assert [directive.pin for directive in directives(author)] == [False]
    assert "unchanged" in author.run("unpin", "parrot@1")
    author.run("prewarm", "parrot@1", "--off")
    assert directives(author) == ()


def test_a_window_may_be_said_in_hours_from_now_and_come_back(author: Author):
    author.run("prewarm", "parrot@2", "--tier", "disk", "--start", "1h", "--until", "2h", "--every", "1d")
    (warm,) = directives(author)
    start, until = (datetime.fromisoformat(text) for text in (warm.start, warm.until))
    assert until - start == timedelta(hours=1)
    assert (warm.tier, warm.pin, warm.every_s) == ("disk", False, 86400)


def test_more_pins_than_fit_are_refused_with_numbers_and_nothing_is_written(author: Author, gateway: StubGateway):
    gateway.resident = residency({}, {}, slots=2)
    author.run("pin", "parrot@1")
    error = author.refused("pin", "parrot@2")
    assert (error["reason"], error["limit"], error["value"]) == ("too_many_pins", 2, 4)
    assert [directive.target for directive in directives(author)] == ["1"]


def test_a_pin_that_nobody_could_check_stands_with_a_warning(author: Author, gateway: StubGateway):
    gateway.stop()
    said = author.result("pin", "parrot@1")
    assert said.exit_code == 0
    assert said.stderr.startswith("warning: no gateway said what room its engines have")
    assert author.result("pin", "parrot@1", "--tier", "disk").stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("pin", "parrot", "--tier", "remote"), 2, "remote"),
        (("pin", "parrot", "--until", "soon"), 2, "is no time"),
        (("pin", "parrot", "--every", "daily"), 2, "is no duration"),
        (("pin", "parrot", "--every", "1d"), 1, "a schedule needs the end"),
        (("pin", "parrot@9"), 1, "model_not_found"),
        (("pin", "parrot@beta"), 1, "no alias `beta`"),
        (("prewarm", "nobody"), 1, "model_not_found"),
        (("unpin", "parrot", "--if-revision", "99"), 1, "version_conflict"),
    ],
)
def test_what_makes_no_sense_is_refused(author: Author, arguments: tuple[str, ...], code: int, says: str):
    assert says in author.run(*arguments, code=code)
    assert directives(author) == ()


def test_show_tells_what_replicas_are_asked_to_keep(author: Author):
    author.run("pin", "parrot", "--replicas", "2", "-m", "busy")
    author.run("prewarm", "parrot@2", "--tier", "disk", "--start", "2030-01-01", "--until", "2030-01-02", "--every", "7d")
    rows = [line.split() for line in author.run("show", "parrot").splitlines()]
    header = next(at for at, row in enumerate(rows) if row[:2] == ["ASKED", "TARGET"])
    assert rows[header + 1][:5] == ["pin", "production", "engine", "2", "always"]
    assert rows[header + 2][:5] == ["prewarm", "2", "disk", "all", "from"]
    assert "until 2030-01-02 00:00:00Z every 7 d" in " ".join(rows[header + 2])


# Eviction


def test_evict_says_how_many_replicas_gave_it_up_and_which_did_not(author: Author, gateway: StubGateway):
    gateway.evicts = [
        {"replica": "r0", "tier": "disk", "reason": None},
        {"replica": "r1", "tier": "engine", "reason": "in_use"},
    ]
    said = author.run("evict", "parrot")
    assert said.splitlines() == [
        f"evicted: {FIRST} from 1 of 2 replicas, down to disk",
        "  r1: still engine (in_use)",
        f"again: loramux prewarm {FIRST}",
    ]
    assert author.json("evict", "parrot@1", "--tier", "remote")["ref"] == FIRST


def test_evict_needs_a_gateway(author: Author):
    assert author.refused("evict", "parrot", "--gateway", "http://127.0.0.1:9")["reason"] == "gateway_unreachable"


# What is where


def test_ps_counts_replicas_and_says_what_is_pinned_and_what_failed(author: Author, gateway: StubGateway):
    gateway.resident = residency(
        {FIRST: row(users=2, pinned=True), SECOND: row("disk", "failed", reason="rank_too_large")},
        {FIRST: row(users=1), SECOND: row("disk")},
        {FIRST: row("disk")},
    )
    assert [line.rstrip() for line in author.run("ps").splitlines()] == [
        "REF                 TIER    REPLICAS  PINNED  USES  STATE   SIZE  ALIASES     REASON",
        "tiny/base:parrot@1  engine  2/3       yes     3     ready   8 kB  production",
        "tiny/base:parrot@2  disk    2/3       -       0     failed  8 kB  -           rank_too_large",
        "tiny/base: 1 loaded, 3 answers under way; 3 replicas of 4 slots",
    ]
    assert author.run("ps", "-q").split() == [FIRST, SECOND]


def test_ps_says_how_many_replicas_gave_no_answer(author: Author, gateway: StubGateway):
    gateway.resident = residency({FIRST: row()}, {})
    gateway.resident["tiny/base"]["replicas"][1]["replica"] = None
    said = author.run("ps")
    assert "tiny/base: 1 loaded, 3 answers under way; 2 replicas of 4 slots, 1 of them silent" in said
    assert author.json("ps")["bases"]["tiny/base"]["silent"] == 1


def test_lists_show_the_best_tier_that_any_replica_has(author: Author, gateway: StubGateway):
    gateway.resident = residency({FIRST: row("disk")}, {})
    assert author.json("list")["adapters"][0]["tier"] == "disk"
    gateway.resident = residency({FIRST: row("disk")}, {FIRST: row()})
    assert author.json("list")["adapters"][0]["tier"] == "engine"
