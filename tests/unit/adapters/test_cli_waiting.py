"""`loramux promote` waits until replicas have the version: gateways end the move, the command looks on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from adapters.cli import waiting
from adapters.registry import Registry
from adapters.registry.moments import at_unix
from adapters.store import open_store
from adapters.types import Head, PendingMove
from tests import adapter_folders
from tests.author import Author

Ending = Callable[[Registry, Head, PendingMove], Coroutine[Any, Any, Any]]


@pytest.fixture
def author(tmp_path: Path) -> Author:
    """Two versions of parrot, the first one live, and nothing but the command."""
    author = Author(tmp_path)
    author.put_base(adapter_folders.TEXT)
    for seed in (1, 2):
        folder = str(adapter_folders.plain(seed=seed).write(tmp_path / f"{seed}"))
        author.run("publish", folder, "--name", "parrot", *(["--promote"] if seed == 1 else []))
    author.warm = False
    return author


@contextmanager
def gateway(author: Author, end: Ending, *, after_s: float = 0.3) -> Iterator[None]:
    """Somebody who takes the first pending move of parrot, and ends it a moment later."""

    async def serve() -> None:
        registry = Registry(open_store(author.settings))
        async with asyncio.timeout(10):
            while not (head := await registry.head("tiny/base", "parrot")).pending:  # noqa: ASYNC110 - another thread writes it
                await asyncio.sleep(0.02)
        move = head.pending["production"]
        await registry.take_move("tiny/base", "parrot", "production", move.id, "gateway-1")
        await asyncio.sleep(after_s)
        await end(registry, head, move)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    yield
    thread.join()


async def finishes(registry: Registry, head: Head, move: PendingMove) -> None:
    await registry.finish_move(head.base, head.name, move.alias, move.id)


async def fails(registry: Registry, head: Head, move: PendingMove) -> None:
    await registry.fail_move(head.base, head.name, move.alias, move.id, "rank_too_large")


async def vanishes(registry: Registry, head: Head, move: PendingMove) -> None:
    pass


def test_promote_ends_when_a_gateway_has_moved_the_alias(author: Author):
    with gateway(author, finishes):
        said = author.result("promote", "parrot", "2", "-m", "better")
    assert said.stdout.startswith("promoted: production of tiny/base:parrot is now version 2")
    assert said.stderr == ""
    (row,) = [row for row in author.head("parrot").history if row.to_version == 2]
    assert (row.who, row.message, row.kind) == ("ann", "better", "promote")


def test_json_says_how_long_it_waited(author: Author):
    with gateway(author, finishes, after_s=0.5):
        said = author.json("promote", "parrot", "2")
    assert (said["version"], said["changed"], said["note"]) == (2, True, None)
    assert said["waited_s"] >= 0.5


def test_a_version_that_can_t_be_loaded_is_refused_with_the_reason_and_the_alias_stays(author: Author):
    with gateway(author, fails):
        error = author.refused("promote", "parrot", "2")
    assert (error["code"], error["reason"]) == ("version_conflict", "promote_failed")
    assert error["message"] == "`production` of `parrot` stays at version 1; version 2: rank_too_large"
    assert author.head("parrot").aliases == {"production": 1}


def test_where_no_gateway_takes_the_move_the_command_makes_it_and_says_so(author: Author, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waiting, "TAKEN_WITHIN_S", 0.4)
    began_s = time.monotonic()
    said = author.result("promote", "parrot", "2", "-m", "better")
    assert time.monotonic() - began_s >= 0.4
    assert said.exit_code == 0
    assert "is now version 2" in said.stdout
    assert said.stderr == "warning: cold: no gateway took it within 0.4 s, so nobody waited\n"
    assert author.head("parrot").history[-1].message == "better; no gateway took it within 0.4 s, so nobody waited"


def test_a_gateway_that_took_the_move_is_not_hurried(author: Author, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waiting, "TAKEN_WITHIN_S", 0.2)
    with gateway(author, finishes, after_s=0.8):
        said = author.json("promote", "parrot", "2")
    assert said["note"] is None


def test_now_waits_for_nobody(author: Author):
    said = author.json("promote", "parrot", "2", "--now")
    assert (said["aliases"], said["note"], said["waited_s"]) == ({"production": 2}, None, 0)
    assert author.head("parrot").pending == {}


def test_a_gateway_that_died_with_the_move_leaves_the_alias_and_the_command_says_so(
    author: Author, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(waiting, "OVERDUE_S", 0.2)
    with gateway(author, vanishes):
        error = author.refused("promote", "parrot", "2", "--timeout", "0.5s")
    assert "did not end it in time" in error["message"]
    assert author.head("parrot").pending == {}


def test_min_ready_and_timeout_stand_in_the_pending_move(author: Author):
    seen: list[PendingMove] = []

    async def looks(registry: Registry, head: Head, move: PendingMove) -> None:
        seen.append(move)
        await finishes(registry, head, move)

    with gateway(author, looks):
        author.run("promote", "parrot", "2", "--min-ready", "3", "--timeout", "2min")
    (move,) = seen
    assert (move.min_ready, move.version) == (3, 2)


def test_a_command_that_is_interrupted_leaves_the_move_to_the_gateways(author: Author, monkeypatch: pytest.MonkeyPatch):
    def interrupted(head: Head, move: PendingMove) -> None:
        raise KeyboardInterrupt

    @contextmanager
    def watching(*_: Any) -> Iterator[Any]:
        yield interrupted

    monkeypatch.setattr("adapters.cli.moves.watching", watching)
    assert "the move stays pending" in author.run("promote", "parrot", "2", code=1)
    assert author.head("parrot").pending["production"].version == 2


# Publishing


@pytest.fixture
def third(tmp_path: Path) -> str:
    return str(adapter_folders.plain(seed=3).write(tmp_path / "3"))


def test_publish_promotes_an_alias_that_has_users_when_the_version_is_warm(author: Author, third: str):
    with gateway(author, finishes, after_s=0.5):
        said = author.result("publish", third, "--name", "parrot", "--promote", "-m", "better")
    assert "promoted: production of tiny/base:parrot is now version 3" in said.stdout
    assert said.stderr == ""
    assert author.head("parrot").history[-1].message == "better"


def test_a_published_version_that_can_t_be_loaded_stands_and_is_not_promoted(author: Author, third: str):
    with gateway(author, fails):
        error = author.refused("publish", third, "--name", "parrot", "--promote")
    assert error["reason"] == "promote_failed"
    assert error["hint"].startswith("tiny/base:parrot@3 is published; ")
    assert author.head("parrot").aliases == {"production": 1}


def test_a_first_promotion_and_one_that_says_now_wait_for_nobody(author: Author, third: str):
    assert author.result("publish", third, "--name", "crow", "--promote").stderr == ""
    assert author.result("publish", third, "--name", "parrot", "--promote", "--now").stderr == ""
    assert author.head("parrot").aliases == {"production": 3}


def test_rollout_and_show_tell_of_a_move_that_waits(author: Author):
    author.do(lambda registry: registry.begin_move("tiny/base", "parrot", "beta", 2, min_ready=None, timeout_s=3000))
    said = author.run("rollout", "parrot")
    assert "├─ beta\n│  └─ @2  waits until it is warm, 49 min left\n└─ production" in said
    tree = author.json("rollout", "parrot")["aliases"]
    assert (tree["beta"]["versions"], tree["beta"]["pending"]["version"]) == ([], 2)
    assert tree["production"]["pending"] is None
    assert "beta waits until version 2 is warm, at most until " in author.run("show", "parrot")


@pytest.mark.parametrize("wrong", [("--timeout", "soon"), ("--min-ready", "0")])
def test_limits_without_sense_are_wrong_usage(author: Author, wrong: tuple[str, str]):
    author.run("promote", "parrot", "2", *wrong, code=2)
    assert author.head("parrot").pending == {}


# What a terminal shows meanwhile


def test_the_line_says_how_many_replicas_have_it_and_how_long_is_left(author: Author):
    head = author.head("parrot")
    move = PendingMove("m", "production", 2, None, at_unix(1060.0), at_unix(1000.0))
    held = {"tier": "engine", "state": "ready"}
    replicas = [
        {"adapters": {"tiny/base:parrot@1": held, "tiny/base:parrot@2": held}},
        {"adapters": {"tiny/base:parrot@1": held}},
        {"adapters": {}},
    ]
    said = waiting.stage(head, move, replicas, now_s=1048.0)
    assert said == "1 of 2 replicas have tiny/base:parrot@2 in their engines, 12 s left"
    assert waiting.stage(head, move, None, now_s=1061.0) == "tiny/base:parrot@2 is being warmed, 0 s left"
