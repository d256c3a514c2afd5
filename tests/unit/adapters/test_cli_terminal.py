"""The program in front of somebody: colours, questions, bars, a tree that is watched; and in a pipe, where there are none."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import adapter_folders
from tests.author import Author

LORAMUX = Path(sys.executable).with_name("loramux")
LIMIT_S = 30


class Terminal:
    """The program on a terminal of its own: type, read what it shows, wait for its end."""

    def __init__(self, folder: Path, *arguments: str, **env: str) -> None:
        self._ours, theirs = pty.openpty()
        variables = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "TERM")}
        self._process = subprocess.Popen(
            [str(LORAMUX), *arguments],
            cwd=folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**variables, "TERM": "xterm-256color", "COLUMNS": "160", **env},
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = ""

    def read_until(self, words: str) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while words not in self.seen:
            assert time.monotonic() < deadline_s, f"never saw {words!r}: {self.seen}"
            if not self._read():
                assert words in self.seen, self.seen

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """The exit code, once everything is read."""
        while self._read():
            pass
        os.close(self._ours)
        return self._process.wait(LIMIT_S)

    def _read(self) -> bool:
        if not select.select([self._ours], [], [], LIMIT_S)[0]:
            return False
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # how a terminal says that the other side is gone
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)


@pytest.fixture
def author(tmp_path: Path) -> Author:
    author = Author(tmp_path)
    author.put_base(adapter_folders.TEXT)
    for seed in (1, 2, 3):
        folder = str(adapter_folders.plain(seed=seed).write(tmp_path / f"{seed}"))
        author.run("publish", folder, "--name", "parrot", "--promote")
    return author


def test_colours_are_for_terminals_and_for_those_who_want_them(author: Author):
    terminal = Terminal(author.folder, "list")
    assert terminal.end() == 0
    assert "\x1b[32m3" in terminal.seen
    plain = Terminal(author.folder, "list", NO_COLOR="1")
    plain.end()
    assert "\x1b[3" not in plain.seen


def test_rollback_offers_the_list_and_takes_the_answer(author: Author):
    terminal = Terminal(author.folder, "rollback", "parrot")
    terminal.read_until("back to [2]")
    terminal.type("1\n")
    assert terminal.end() == 0
    assert author.head("parrot").aliases == {"production": 1}


def test_publish_asks_about_a_name_that_is_none(author: Author):
    terminal = Terminal(author.folder, "publish", "1", "--name", "Parrot-X")
    terminal.read_until("publish as `parrot-x`?")
    terminal.type("n\n")
    assert terminal.end() == 1
    assert [row["name"] for row in author.json("list")["adapters"]] == ["parrot"]


def test_a_watched_tree_changes_until_ctrl_c(author: Author):
    terminal = Terminal(author.folder, "rollout", "parrot", "--watch", "--interval-s", "0.2")
    terminal.read_until("@3")
    author.run("promote", "parrot", "1", "--weight", "25")
    terminal.read_until("25%")
    terminal.interrupt()
    assert terminal.end() == 0


def test_a_promotion_that_waits_shows_it_and_ctrl_c_leaves_it_to_the_gateways(author: Author):
    terminal = Terminal(author.folder, "promote", "parrot", "1")
    terminal.read_until("tiny/base:parrot@1 is being warmed, 29")
    terminal.interrupt()
    assert terminal.end() == 1
    assert "the move stays pending" in terminal.seen
    assert author.head("parrot").pending["production"].version == 1


def test_a_watched_tree_in_a_pipe_is_a_line_for_each_change(author: Author):
    command = [str(LORAMUX), "rollout", "parrot", "--watch", "--interval-s", "0.2", "--json"]
    with subprocess.Popen(command, cwd=author.folder, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        author.run("promote", "parrot", "1", "--weight", "25")
        second = json.loads(watching.stdout.readline())
        watching.send_signal(signal.SIGINT)
        assert watching.wait(LIMIT_S) == 0
        assert watching.stdout.read() == ""
    assert [row["version"] for row in first["aliases"]["production"]["versions"]] == [3]
    assert [row["version"] for row in second["aliases"]["production"]["versions"]] == [1, 3]
