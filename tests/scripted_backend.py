"""A backend for unit tests of the gateway: answers from a script, and remembers what happened to each request.

It keeps the promises of `gateway.backend.Backend`; `tests/contracts/backend_contract.py` runs against it and the real one alike.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from adapters.errors import EngineUnavailable
from adapters.names import AdapterRef
from gateway.backend import BaseInfo, LowerTier, ReplyHead, ResolvedRequest

SSE = "text/event-stream; charset=utf-8"


class ScriptedReply:
    def __init__(self, head: ReplyHead, chunks: AsyncIterator[bytes], on_close: Callable[[], None]) -> None:
        self.head = head
        self.chunks = chunks
        self._on_close = on_close

    async def aclose(self) -> None:
        await self.chunks.aclose()
        on_close, self._on_close = self._on_close, lambda: None
        on_close()


class ScriptedBackend:
    """`words` is the answer; `delay_s` passes before the head, `gap_s` before each later word; `error` is raised instead of a
    head, `break_with` after the first word; `refusal` is what the engine itself says no with, as JSON with the status 400."""

    def __init__(self, words: tuple[str, ...] = ("Hello", " there"), bases: tuple[str, ...] = ("demo",)) -> None:
        self.words = words
        self.delay_s = 0.0
        self.gap_s = 0.0
        self.error: Exception | None = None
        self.break_with: Exception | None = None
        self.refusal: bytes | None = None
        self.requests: list[ResolvedRequest] = []
        self.running = 0
        self.closed = 0
        self.ready = True
        self.metrics_text = b""
        self.resident: dict[str, dict[str, Any]] = {}
        self.evictions: list[tuple[str, str]] = []
        self._bases = bases

    def bases(self) -> dict[str, BaseInfo]:
        return {base: BaseInfo(base, 1_700_000_000, 2048) for base in self._bases}

    async def is_ready(self) -> bool:
        return self.ready

    async def residency(self, audit: bool = False) -> dict[str, Any]:
        if isinstance(self.error, EngineUnavailable):
            raise self.error
        return self.resident

    async def evict(self, base: str, ref: AdapterRef, tier: LowerTier) -> list[dict[str, Any]]:
        self.evictions.append((str(ref), tier))
        return [
            {"replica": row["replica"], "tier": tier, "reason": None} for row in self.resident.get(base, {}).get("replicas", ())
        ]

    async def metrics(self) -> bytes:
        if self.error:
            raise self.error
        return self.metrics_text

    async def dispatch(self, request: ResolvedRequest) -> ScriptedReply:
        self.requests.append(request)
        self.running += 1
        try:
            await asyncio.sleep(self.delay_s)
            if self.error:
                raise self.error
        except BaseException:
            self.running -= 1
            raise
        if self.refusal is not None:
            return ScriptedReply(ReplyHead(400, "application/json", "base", "none"), _once(self.refusal), self._close)
        head = ReplyHead(
            200, SSE if request.stream else "application/json", "engine" if request.adapter else "base", "none", {"engine": 1.5}
        )
        return ScriptedReply(head, self._chunks(request), self._close)

    def _close(self) -> None:
        self.running -= 1
        self.closed += 1

    async def _chunks(self, request: ResolvedRequest) -> AsyncIterator[bytes]:
        model = json.loads(request.body)["model"]
        if not request.stream:
            yield json.dumps(_completion(model, "".join(self.words))).encode()
            return
        for index, word in enumerate(self.words):
            if index:
                await asyncio.sleep(self.gap_s)
                if self.break_with:
                    raise self.break_with
            yield b"data: " + json.dumps(_chunk(model, word)).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


def _completion(model: str, text: str) -> dict:
    message = {"role": "assistant", "content": text}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    }


def _chunk(model: str, text: str) -> dict:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": model,
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}],
    }
