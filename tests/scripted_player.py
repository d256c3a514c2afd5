"""An OpenAI endpoint that plays mazes as it is told: it knows a maze by its first picture, and where the agent is by the replies.

By default it plays as the oracle does. `faults` are answers that the next requests get instead; `mistaken` are seeds whose first
move goes wrong; `broken` are seeds whose requests are always refused.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from training.maze import Episode, MazeSpec, begin, messages, oracle, step
from training.maze.actions import as_text

MODEL = "maze:agent@3"


@dataclass(frozen=True, slots=True)
class Fault:
    """An answer that is no completion; `hang_up` closes without one."""

    status: int = 200
    body: str = "{}"
    headers: tuple[tuple[str, str], ...] = ()
    hang_up: bool = False


def refused(status: int, code: str, **headers: str) -> Fault:
    body = json.dumps({"error": {"message": f"told {code}", "type": "error", "param": None, "code": code}})
    return Fault(status, body, tuple((name.replace("_", "-"), value) for name, value in headers.items()))


class Server(ThreadingHTTPServer):
    def handle_error(self, *request: Any) -> None:
        """Clients that have gone away are nothing to print traces about."""


@dataclass
class Endpoint:
    spec: MazeSpec
    seeds: Iterable[int]
    faults: list[Fault] = field(default_factory=list)
    mistaken: frozenset[int] = frozenset()
    broken: frozenset[int] = frozenset()
    always: Fault | None = None
    wrong_reply: str = "I would rather not."
    bodies: list[dict[str, Any]] = field(default_factory=list)
    models: tuple[str, ...] = (MODEL,)
    most_together: int = 0

    def __enter__(self) -> Endpoint:
        self._begun = {_picture(messages(episode)): episode for episode in (begin(self.spec, seed) for seed in self.seeds)}
        self._lock, self._together = threading.Lock(), 0
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                endpoint.answer(self, json.loads(self.rfile.read(int(self.headers["content-length"]))))

            def do_GET(self) -> None:
                names = ("maze", "maze:agent")
                _send(self, Fault(200, json.dumps({"object": "list", "data": [{"id": name} for name in names]})))

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        with self._lock:
            self._together += 1
            self.most_together = max(self.most_together, self._together)
            self.bodies.append(body)
            fault = self.faults.pop(0) if self.faults else self.always
        try:
            _send(handler, fault or self._reply(body))
        finally:
            with self._lock:
                self._together -= 1

    def _reply(self, body: dict[str, Any]) -> Fault:
        episode = self._begun[_picture(body["messages"])]
        if episode.seed in self.broken:
            return refused(400, "invalid_request")
        replies = [message["content"] for message in body["messages"] if message["role"] == "assistant"]
        for reply in replies:
            episode = step(episode, reply).episode
        text = self.wrong_reply if episode.seed in self.mistaken and not replies else self._next(episode)
        model = self.models[len(self.bodies) % len(self.models)]
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
        told = {"id": "c", "object": "chat.completion", "created": 1, "model": model, "choices": [choice], "usage": usage}
        return Fault(200, json.dumps(told))

    def _next(self, episode: Episode) -> str:
        return as_text(oracle(episode.maze, episode.position)[0], self.spec.actions)


def _picture(conversation: list[dict[str, Any]]) -> str:
    return next(part["image_url"]["url"] for part in conversation[0]["content"] if part["type"] == "image_url")


def _send(handler: BaseHTTPRequestHandler, fault: Fault) -> None:
    if fault.hang_up:
        handler.close_connection = True
        return
    data = fault.body.encode()
    handler.send_response(fault.status)
    for name, value in (("content-type", "application/json"), ("content-length", str(len(data))), *fault.headers):
        handler.send_header(name, value)
    handler.end_headers()
    with contextlib.suppress(OSError):  # who asked has gone
        handler.wfile.write(data)
