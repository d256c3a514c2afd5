"""The replica: claims a slot for a request and asks the engine. The one file that knows Ray LLM's insides (2.60)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray import serve
from ray.serve.llm import LLMConfig, LLMServer

from adapters.cache import AdapterCache
from adapters.errors import InvalidRequest, LoraMuxError, StoreError
from adapters.names import AdapterRef
from adapters.registry import Registry
from adapters.store import open_store
from adapters.types import BaseContract, ResolvedAdapter, WarmTier
from gateway.backend import ReplyHead, ResolvedRequest
from serve_app.engine import asgi_call
from serve_app.engine.base_contract import report
from serve_app.engine.vllm_engine import VllmEngine, translate_error
from serve_app.engine.warmup import warm
from serve_app.ray_meter import RayMeter
from serve_app.residency.resident import EvictTier, Outcome, Resident, ResidentOptions
from serve_app.settings import ReplicaSettings
from serve_app.slots.engine_slots import EngineSlots, SlotUse

log = logging.getLogger(__name__)

REPORT_WAIT_S = 10.0
REPORT_AGAIN_S = 5.0

ReplyItem = tuple[ReplyHead, bytes] | bytes | LoraMuxError


class Replica(LLMServer):
    """One engine and its adapters. Requests come in resolved; nothing here looks a name up."""

    async def __init__(self, llm_config: LLMConfig, *, settings: ReplicaSettings) -> None:
        self._resident: Resident | None = None
        self._reporting: asyncio.Future[None] | None = None
        await super().__init__(llm_config)
        self._settings = settings
        self._vllm = VllmEngine(self.engine._engine_client, self.engine._app_state, self.engine._vllm_args)
        self._running = 0
        meter = RayMeter()
        registry = Registry(open_store(settings.registry, meter=meter))
        await self._vllm.prepare()
        contract = await self._vllm.contract(settings.base)
        await warm(self._vllm, contract)
        tried = asyncio.Event()
        self._reporting = asyncio.ensure_future(_report_until_done(registry, contract, tried))
        if self._vllm.lora is not None:
            self._resident = self._make_resident(registry, meter)
            await self._resident.start(settings.warm_start_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_WAIT_S):
                await tried.wait()

    def _make_resident(self, registry: Registry, meter: RayMeter) -> Resident:
        settings = self._settings
        cache = AdapterCache(registry.store, settings.cache, meter)
        slots = EngineSlots(self._vllm, cache, self._vllm.lora.max_cpu_loras, wait_s=settings.slot_wait_s, meter=meter)
        options = ResidentOptions(
            settings.base,
            cache_dir=settings.cache.dir,
            poll_interval_s=settings.registry.poll_interval_s,
            prewarm_on_publish=settings.prewarm_on_publish == "disk",
            max_rank=self._vllm.lora.max_lora_rank,
        )
        rank, world_size = _whereabouts()
        return Resident(options, registry, cache, slots, rank=rank, world_size=world_size, meter=meter)

    async def __del__(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        if self._resident is not None:
            await self._resident.close()
        await super().__del__()

    def reconfigure(self, user_config: Any, rank: Any) -> None:
        """Serve tells a new rank."""
        if self._resident is not None and rank is not None:
            self._resident.set_rank(rank.rank, _whereabouts()[1])

    async def record_routing_stats(self) -> dict[str, Any]:
        """What the router goes by; Serve asks every `routing_stats_period_s`."""
        if self._resident is None:
            return {}
        self._resident.set_rank(*_whereabouts())  # the number of replicas changes without a word
        return self._resident.stats()

    async def answer(self, request: ResolvedRequest) -> AsyncIterator[ReplyItem]:
        """The head together with the first bytes, then the rest. An error is the last item, as a value: raising it would
        make Ray log a trace and send its text."""
        self._running += 1
        try:
            async for item in self._answer(request):
                self._end_with_the_engine()
                yield item
        except LoraMuxError as error:
            self._end_with_the_engine()
            yield error
        finally:
            self._running -= 1

    async def residency(self, audit: bool = False) -> dict[str, Any]:
        """This replica's row of the residency view: who it is, the answers under way, and `Resident.report`.

        With `audit` also the ids that the engine itself lists; asking it wakes its process for a second, so nobody polls that.
        """
        context = serve.get_replica_context()
        rank, _ = _whereabouts()
        row: dict[str, Any] = {
            "replica": context.replica_id.unique_id,
            "rank": rank,
            "node": ray.get_runtime_context().get_node_id(),
            "requests": self._running,
        }
        row |= self._resident.report() if self._resident else {"slots": 0, "generation": 0, "int_ids": [], "adapters": {}}
        return row | ({"engine_ids": sorted(await self._vllm.registered()) if self._resident else []} if audit else {})

    async def evict(self, ref: str, tier: EvictTier) -> Outcome:
        """Takes an adapter out of the engine, and off the disk for `remote`; as `Resident.evict`, with this replica's id."""
        found = await self._resident.evict(AdapterRef.parse(ref), tier) if self._resident else {"tier": "remote", "reason": None}
        return {"replica": serve.get_replica_context().replica_id.unique_id} | found

    async def prewarm(self, adapter: ResolvedAdapter, tier: WarmTier) -> None:
        """Returns when the adapter is in `tier`, or can't come there: the request that follows is told why."""
        if self._resident is not None:
            try:
                await self._resident.prewarm(adapter, tier)
            except LoraMuxError as error:
                log.warning("%s could not be brought to the tier %s: %s", adapter.ref, tier, error)

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
        if self._resident is None:
            raise InvalidRequest(f"`{request.base}` takes no adapters", param="model")
        return await self._resident.use(request.adapter, wait=request.wait_cold)

    async def _ask(self, request: ResolvedRequest) -> asgi_call.Answer:
        answer = await asgi_call.call(self._vllm.app, request.route, request.body, {"x-request-id": request.request_id})
        if answer.status >= 400:
            body = b"".join([chunk async for chunk in answer.chunks()])
            self._end_with_the_engine()
            raise translate_error(answer.status, body)
        return answer

    def _end_with_the_engine(self) -> None:
        """A dead engine can't come back in this process. Ending it at once lets requests that nothing was answered to go to
        another replica, and Serve start a new one; its health check would take seconds to find out."""
        if self._vllm.is_dead:
            log.critical("the engine of `%s` died; its replica ends", self._settings.base)
            os._exit(1)


def _whereabouts() -> tuple[int, int]:
    """The rank of this replica and the number of its base's replicas."""
    context = serve.get_replica_context()
    return (context.rank.rank if context.rank else 0), context.world_size or 1


async def _report_until_done(registry: Registry, contract: BaseContract, tried: asyncio.Event) -> None:
    """Says what the base takes, again and again until the store is there; `tried` is set after the first time, for what is on
    the disk is served without the store."""
    while True:
        try:
            await report(registry, contract)
            return
        except StoreError as error:
            log.warning("what `%s` takes can't be reported: %s", contract.base, error)
        finally:
            tried.set()
        await asyncio.sleep(REPORT_AGAIN_S)


async def _items(head: ReplyHead, answer: asgi_call.Answer) -> AsyncIterator[ReplyItem]:
    """A stream goes on item by item; a whole answer is one item."""
    chunks = answer.chunks()
    if not head.content_type.startswith("text/event-stream"):
        yield head, b"".join([chunk async for chunk in chunks])
        return
    yield head, await anext(chunks, b"")
    async for chunk in chunks:
        yield chunk
