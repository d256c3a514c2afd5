"""The client of the load tests: one streamed chat request as a user sees it, and a closed loop of them over a trace."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx2

TIMEOUT_S = 120
HELLO = [{"role": "user", "content": "Hello"}]
STAGE = re.compile(r"([a-z_]+);dur=([0-9.]+)")
TIMING, TIER, LOAD = "server-timing", "x-loramux-tier", "x-loramux-load"


@dataclass(frozen=True)
class Answer:
    """One request as the client saw it. Times in ms; `ttft_ms` is to the first data event.

    `model` is the name that answered, `tier`, `load` and `stages_ms` what the server said of itself ("" and empty where it says
    nothing), `began_s` the client's clock when the request was sent, `events_s` at each data event, `error` how the body begins
    if it was refused.
    """

    status: int
    text: str
    ttft_ms: float
    total_ms: float
    model: str = ""
    tier: str = ""
    load: str = ""
    stages_ms: dict[str, float] = field(default_factory=dict)
    began_s: float = 0.0
    error: str = ""
    events_s: tuple[float, ...] = ()

    @property
    def good(self) -> bool:
        """Whole, and not empty."""
        return self.whole and bool(self.text)

    @property
    def whole(self) -> bool:
        """A base with weights of no meaning may answer with nothing that can be read."""
        return self.status == 200 and not self.error and bool(self.events_s)


def client(connections: int = 100) -> httpx2.AsyncClient:
    """A client that keeps its connections, and asks no proxy of the environment the way to loopback."""
    return httpx2.AsyncClient(timeout=TIMEOUT_S, limits=httpx2.Limits(max_connections=connections), trust_env=False)


async def ask(http: httpx2.AsyncClient, url: str, model: str, events_s: list[float] | None = None, **fields: Any) -> Answer:
    """One streamed chat request, or a plain completion where `fields` hold a `prompt`; they go over those of the body. A failure
    is an answer too: status 0 if there was none. `events_s` gets the client's clock at each data event, while they come."""
    way = {} if "prompt" in fields else {"messages": HELLO}
    path = "/v1/chat/completions" if way else "/v1/completions"
    body = {"model": model, "max_tokens": 32, "temperature": 0, "stream": True} | way | fields
    heard, began_s = _Heard([] if events_s is None else events_s), time.perf_counter()
    try:
        async with http.stream("POST", f"{url}{path}", json=body) as response:
            heard.headers(response.headers)
            async for line in response.aiter_lines():
                heard.line(line)
            status = response.status_code
    except httpx2.HTTPError as trouble:
        status, heard.error = 0, type(trouble).__name__
    return heard.answer(status, began_s, time.perf_counter())


class _Heard:
    """What came of one answer so far."""

    def __init__(self, events_s: list[float]) -> None:
        self.events_s = events_s
        self.error = ""
        self._text: list[str] = []
        self._model = ""
        self._said: dict[str, str] = {}

    def headers(self, headers: Any) -> None:
        self._said |= {name: headers[name] for name in (TIMING, TIER, LOAD) if name in headers}

    def line(self, line: str) -> None:
        if line.startswith(": ") and line.count(": ") > 1:  # a stream that waited long says its headers as comments
            name, _, value = line[2:].partition(": ")
            self._said[name] = value
        elif line.startswith("data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                self.error = line[:300]
                return
            self.events_s.append(time.perf_counter())
            self._model = event.get("model", self._model)
            self._text += [
                (choice.get("delta", {}).get("content") or choice.get("text") or "") for choice in event.get("choices", [])
            ]
        elif line.startswith("{"):
            self.error = line[:300]

    def answer(self, status: int, began_s: float, ended_s: float) -> Answer:
        return Answer(
            status=status,
            text="" if self.error else "".join(self._text).strip(),
            ttft_ms=((self.events_s or [ended_s])[0] - began_s) * 1e3,
            total_ms=(ended_s - began_s) * 1e3,
            model=self._model,
            tier=self._said.get(TIER, ""),
            load=self._said.get(LOAD, ""),
            stages_ms={stage: float(ms) for stage, ms in STAGE.findall(self._said.get(TIMING, ""))},
            began_s=began_s,
            error=self.error,
            events_s=tuple(self.events_s),
        )


async def closed_loop(
    http: httpx2.AsyncClient, url: str, models: Iterable[str], clients: int, *, until: Callable[[], bool] = lambda: False
) -> list[tuple[str, Answer]]:
    """Asks for `models` in their order, `clients` at a time, each its next when its last is answered; ends early when `until` is
    true. The answers beside the model that was asked, in the order of their ends."""
    left, done = iter(models), []

    async def work() -> None:
        for model in left:
            done.append((model, await ask(http, url, model)))
            if until():
                return

    await asyncio.gather(*(work() for _ in range(clients)))
    return done
