"""A move on the command line tells the webhook; trouble with it is a warning, never a failure."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests import adapter_folders
from tests.author import Author


class Receiver:
    """Keeps what it is told, and answers with `status`."""

    def __init__(self) -> None:
        self.status = 204
        self.told: list[dict[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.told.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.stop()


@pytest.fixture
def author(tmp_path: Path, receiver: Receiver) -> Author:
    author = Author(tmp_path, webhook={"url": receiver.url, "secret": "s3cret", "attempts": 1})
    author.put_base(adapter_folders.TEXT)
    for seed in (1, 2):
        folder = str(adapter_folders.plain(seed=seed).write(tmp_path / f"{seed}"))
        author.run("publish", folder, "--name", "parrot", *(["--promote"] if seed == 1 else []))
    return author


def test_every_move_is_told_and_nothing_else(author: Author, receiver: Receiver):
    assert [row["row"]["kind"] for row in receiver.told] == ["promote"]
    author.run("promote", "parrot", "2", "-m", "better")
    author.run("promote", "parrot", "2")
    author.run("tag", "parrot@2", "k=v")
    author.run("rollback", "parrot")
    assert [(row["row"]["kind"], row["row"]["message"]) for row in receiver.told[1:]] == [
        ("promote", "better"),
        ("rollback", None),
    ]
    assert receiver.told[1]["adapter"] == "tiny/base:parrot"


def test_a_receiver_that_refuses_is_a_warning_and_the_move_stands(author: Author, receiver: Receiver):
    receiver.status = 400
    assert "warning: the webhook was not told (refused, status 400)" in author.run("promote", "parrot", "2")
    assert author.head("parrot").aliases == {"production": 2}
    assert author.json("rollback", "parrot")["version"] == 1
