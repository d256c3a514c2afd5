"""The replica: leases files, claims a slot, asks the engine. The one file that knows Ray LLM's insides (2.60)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from ray.serve.llm import LLMConfig, LLMServer

from adapters.cache import AdapterCache
from adapters.errors import (
    AdapterIncompatible,
    EngineUnavailable,
    InvalidRequest,
    LoraMuxError,
)
from adapters.registry import Registry
from adapters.store import open_store
from gateway.backend import ReplyHead, ResolvedRequest
from serve_app import asgi_call
from serve_app.base_contract import report
from serve_app.engine_vllm import VllmEngine, translate_error
from serve_app.ray_meter import RayMeter
from serve_app.settings import ReplicaSettings
from serve_app.slots import EngineSlots, SlotUse
from serve_app.warmup import warm

ReplyItem = tuple[ReplyHead, bytes] | bytes | LoraMuxError


class Replica(LLMServer):
    """One engine and its adapters. Requests come in resolved; nothing here looks a name up."""

    async def __init__(self, llm_config: LLMConfig, *, settings: ReplicaSettings) -> None:
        await super().__init__(llm_config)
        self._settings = settings
        self._vllm = VllmEngine(self.engine._engine_client, self.engine._app_state, self.engine._vllm_args)
        self._slots: EngineSlots | None = None
        self._running = 0
        meter = RayMeter()
        store = open_store(settings.registry, meter=meter)
        if self._vllm.lora is not None:
            cache = AdapterCache(store, settings.cache, meter)
            await cache.sweep()
            self._slots = EngineSlots(self._vllm, cache, self._vllm.lora.max_cpu_loras, wait_s=settings.slot_wait_s)
        await self._vllm.prepare()
        contract = await self._vllm.contract(settings.base)
        await warm(self._vllm, contract)
        await report(Registry(store), contract)

    async def answer(self, request: ResolvedRequest) -> AsyncIterator[ReplyItem]:
        """The head together with the first bytes, then the rest. An error is the last item, as a value: raising it would
        make Ray log a trace and send its text."""
        self._running += 1
        try:
            async for item in self._answer(request):
                yield item
        except LoraMuxError as error:
            yield error
        finally:
            self._running -= 1

    async def residency(self, audit: bool = False) -> dict[str, Any]:
        """The answers under way and what the slots hold: refs with their users, and the table's engine ids.

        With `audit` also the ids that the engine itself lists; asking it wakes its process for a second, so nobody polls that.
        """
        table = self._slots
        view: dict[str, Any] = {
            "requests": self._running,
            "resident": {str(ref): users for ref, users in table.resident().items()} if table else {},
            "int_ids": sorted(table.int_ids()) if table else [],
        }
        return view | ({"engine_ids": sorted(await self._vllm.registered()) if table else []} if audit else {})

    async def _answer(self, request: ResolvedRequest) -> AsyncIterator[ReplyItem]:
        use = await self._use(request)
        try:
            start_s = time.monotonic()
            answer = await self._ask(request)
            try:
                timings = (use.timings_ms if use else {}) | {"engine": (time.monotonic() - start_s) * 1e3}
                head = ReplyHead(
                    status=answer.status,
                    content_type=answer.content_type,
                    tier=use.tier if use else "base",
                    load=use.load if use else "none",
                    timings_ms=timings,
                )
                async for item in _items(head, answer):
                    yield item
            finally:
                await answer.aclose()
        finally:
            if use:
                use.release()

    async def _use(self, request: ResolvedRequest) -> SlotUse | None:
        if request.adapter is None:
            return None
        if self._slots is None or self._vllm.lora is None:
            raise InvalidRequest(f"`{request.base}` takes no adapters", param="model")
        limit = self._vllm.lora.max_lora_rank
        if request.adapter.rank > limit:
            raise AdapterIncompatible(
                f"`{request.ref}` has rank {request.adapter.rank}; this base takes at most {limit}",
                reason="rank_too_large",
                limit=limit,
                value=request.adapter.rank,
            )
        return await self._slots.use(request.adapter, wait=request.wait_cold)

    async def _ask(self, request: ResolvedRequest) -> asgi_call.Answer:
        answer = await asgi_call.call(self._vllm.app, request.route, request.body, {"x-request-id": request.request_id})
        if answer.status >= 400:
            body = b"".join([chunk async for chunk in answer.chunks()])
            raise self._engine_error(answer.status, body)
        return answer

    def _engine_error(self, status: int, body: bytes) -> LoraMuxError:
        if self._vllm.is_dead:
            return EngineUnavailable("the engine of this base died and is being restarted")
        return translate_error(status, body)


async def _items(head: ReplyHead, answer: asgi_call.Answer) -> AsyncIterator[ReplyItem]:
    """A stream goes on item by item; a whole answer is one item."""
    chunks = answer.chunks()
    if not head.content_type.startswith("text/event-stream"):
        yield head, b"".join([chunk async for chunk in chunks])
        return
    yield head, await anext(chunks, b"")
    async for chunk in chunks:
        yield chunk
