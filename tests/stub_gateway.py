"""A gateway that answers by script, for the commands that ask one."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Refusal = tuple[int, dict[str, Any]]


class StubGateway:
    """`says` maps a model to its text, `logprobs` to those of its tokens, `refusals` to what it says instead, first to last;
    `refs` a model field to the model that answers, `evicts` is what replicas say to an eviction. `asked` holds route and
    model of each request."""

    def __init__(self) -> None:
        self.says: dict[str, str] = {}
        self.logprobs: dict[str, list[float | None]] = {}
        self.refusals: dict[str, list[Refusal]] = {}
        self.resident: dict[str, dict[str, Any]] = {}
        self.adapters: dict[str, dict[str, Any]] = {}
        self.refs: dict[str, str] = {}
        self.evicts: list[dict[str, Any]] = []
        self.embeds = False
        self.late_headers = False
        self.asked: list[tuple[str, str | None]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def refuse(self, model: str, status: int, code: str, message: str, **details: Any) -> None:
        self.refusals.setdefault(model, []).append((status, {"error": {"code": code, "message": message, **details}}))

    def answer(self, route: str, body: dict[str, Any]) -> tuple[int, Any]:
        path, model = route.partition("?")[0], body.get("model")
        self.asked.append((path, model))
        if path == "/registry/v1/residency":
            return 200, self.resident
        if path == "/registry/v1/refresh":
            return 200, {"generation": 3}
        if path in ("/healthz", "/readyz"):
            return 200, {"status": "ok"}
        if path == "/v1/models":
            return 200, {
                "object": "list",
                "data": [*({"id": base} for base in self.resident or ("tiny/base",)), {"id": "tiny/base:parrot"}],
            }
        if path == "/registry/v1/evict":
            ref = f"{body['base']}:{body['name']}@{body['version']}"
            return 200, {"ref": ref, "tier": body["tier"], "replicas": self.evicts}
        if path in ("/registry/v1/adapter", "/registry/v1/versions"):
            return self._adapter(route)
        return self._model(path, model or "", body)

    def _adapter(self, route: str) -> tuple[int, Any]:
        found = next((adapter for name, adapter in self.adapters.items() if f"name={name}" in route), None)
        return (200, found) if found else (404, {"error": {"code": "model_not_found", "message": "there is none"}})

    def _model(self, path: str, model: str, body: dict[str, Any]) -> tuple[int, Any]:
        model = self.refs.get(model, model)
        if self.refusals.get(model):
            return self.refusals[model].pop(0)
        if (path == "/v1/embeddings") != self.embeds:
            return 400, {"error": {"code": "invalid_request", "message": "not a route of this base"}}
        if path == "/v1/embeddings":
            return 200, {"data": [{"embedding": self.logprobs[model]}]}
        if path == "/v1/completions":
            choice = {"text": self.says[model], "logprobs": {"token_logprobs": self.logprobs.get(model)}}
            return 200, {"model": model, "choices": [choice]}
        return 200, self._events(model) if body.get("stream") else {"model": model, "choices": []}

    def _events(self, model: str) -> list[dict[str, Any]]:
        words = [{"model": model, "choices": [{"delta": {"content": f"{word} "}}]} for word in self.says[model].split()]
        end = {"model": model, "choices": [{"delta": {}, "finish_reason": "stop"}]}
        usage = {"model": model, "choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": len(words)}}
        return [*words, end, usage]

    def sse(self, events: list[dict[str, Any]]) -> str:
        """The events as they go over the wire; what came too late for the headers stands before them, as comments."""
        late = ": keep-alive\n\n: x-loramux-tier: remote\n\n" if self.late_headers else ""
        return late + "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(*stub.answer(self.path, {}))

            def do_POST(self) -> None:
                length = int(self.headers.get("content-length", 0))
                self._send(*stub.answer(self.path, json.loads(self.rfile.read(length) or b"{}")))

            def _send(self, status: int, body: Any) -> None:
                events = isinstance(body, list)
                data = stub.sse(body) if events else json.dumps(body)
                self.send_response(status)
                self.send_header("content-type", "text/event-stream" if events else "application/json")
                self.send_header("content-length", str(len(data)))
                if events:
                    self.send_header("x-loramux-adapter", body[-1]["model"])
                if events and not stub.late_headers:
                    self.send_header("x-loramux-tier", "disk")
                self.end_headers()
                self.wfile.write(data.encode())

            def log_message(self, *_: Any) -> None:
                pass

        return Handler
