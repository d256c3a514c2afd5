"""Replicas without vLLM, and doors to them, on a real Ray Serve: all but the engine is the product's own.

A load takes `load_s`, an answer as long as the request says.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve

from adapters.cache import AdapterCache
from adapters.errors import LoraMuxError
from adapters.names import AdapterRef, parse_model_name
from adapters.registry import Registry
from adapters.registry.view import RegistryView
from adapters.settings import CacheSettings, RegistrySettings
from adapters.store import open_store
from adapters.types import By, LocalAdapter, ResolvedAdapter, WarmTier
from gateway.backend import BaseInfo, ReplyHead, ResolvedRequest
from serve_app.app import ONE_LOOP
from serve_app.handle_backend import HandleBackend
from serve_app.residency.resident import EvictTier, Resident, ResidentOptions
from serve_app.routing.router import router_config
from serve_app.slots.engine_slots import EngineSlots
from tests.prepared import prepared
from tests.scripted_engine import ScriptedEngine

BASE = "demo"
APP = "scripted"
SLOTS = 4
ROOM = 8
POLL_S = 0.3
STATS_S = 0.2


@dataclass(frozen=True)
class Answer:
    """What came back: which replica, where the adapter was, who loaded it; `error` instead, where it failed."""

    replica: str | None = None
    tier: str | None = None
    load: str | None = None
    error: str | None = None


class SlowEngine(ScriptedEngine):
    def __init__(self, capacity: int, load_s: float) -> None:
        super().__init__(capacity)
        self._load_s = load_s

    async def add(self, ref: AdapterRef, int_id: int, files: LocalAdapter) -> int:
        await asyncio.sleep(self._load_s)
        return await super().add(ref, int_id, files)


class ScriptedReplica:
    """`serve_app.replica.Replica` without its engine."""

    async def __init__(self, registry: RegistrySettings, folder: str, load_s: float) -> None:
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        cache_dir = Path(folder) / self._id  # a disk of its own: a second load is a second fetch
        known = Registry(open_store(registry))
        cache = AdapterCache(known.store, CacheSettings(dir=cache_dir, budget_bytes=1_000_000))
        slots = EngineSlots(SlowEngine(SLOTS, load_s), cache, SLOTS)
        options = ResidentOptions(BASE, cache_dir, POLL_S, prewarm_on_publish=False)
        self._resident = Resident(options, known, cache, slots, rank=context.rank.rank, world_size=context.world_size)
        self._running = 0
        await self._resident.start(1)

    def reconfigure(self, user_config: Any, rank: Any) -> None:
        self._resident.set_rank(rank.rank, serve.get_replica_context().world_size)

    async def record_routing_stats(self) -> dict[str, Any]:
        context = serve.get_replica_context()
        self._resident.set_rank(context.rank.rank, context.world_size)
        return self._resident.stats()

    async def residency(self, audit: bool = False) -> dict[str, Any]:
        who = {"replica": self._id, "requests": self._running, "pid": os.getpid(), "node": "here"}
        return who | self._resident.report()

    async def evict(self, ref: str, tier: EvictTier) -> dict[str, Any]:
        return {"replica": self._id} | await self._resident.evict(AdapterRef.parse(ref), tier)

    async def prewarm(self, adapter: ResolvedAdapter, tier: WarmTier) -> None:
        await self._resident.prewarm(adapter, tier)

    async def answer(self, request: ResolvedRequest) -> AsyncIterator[Any]:
        self._running += 1
        use = None
        try:
            use = await self._resident.use(request.adapter) if request.adapter else None
            await asyncio.sleep(json.loads(request.body)["seconds"])
            head = ReplyHead(200, "text/plain", use.tier if use else "base", use.load if use else "none")
            yield head, self._id.encode()
        except LoraMuxError as error:
            yield error
        finally:
            self._running -= 1
            if use:
                use.release()


def application(registry: RegistrySettings, folder: Path, count: int, load_s: float) -> serve.Application:
    deployment = serve.deployment(
        ScriptedReplica,
        name="Replica",
        num_replicas=count,
        max_ongoing_requests=256,
        health_check_period_s=1,
        graceful_shutdown_timeout_s=10,
        ray_actor_options={"num_cpus": 0.1, "runtime_env": {"env_vars": ONE_LOOP}},
        request_router_config=router_config(ROOM, STATS_S),
    )
    return deployment.bind(registry, str(folder), load_s)


@ray.remote(num_cpus=0.1, runtime_env={"env_vars": ONE_LOOP})
class Door:
    """A gateway's side: one `HandleBackend`, on one loop with its router as in a gateway."""

    async def open(self) -> None:
        handle = serve.get_deployment_handle("Replica", app_name=APP)
        self.backend = HandleBackend({BASE: handle}, bases={BASE: BaseInfo(BASE, 0)}, max_queued={BASE: -1})
        await self.backend.residency()

    async def ask(self, adapter: ResolvedAdapter | None, count: int = 1, seconds: float = 0.0) -> list[Answer]:
        """So many requests at once, each answered after so many seconds with its adapter."""
        return await asyncio.gather(*(self._ask(adapter, seconds) for _ in range(count)))

    async def keep_asking(self, adapter: ResolvedAdapter | None, at_once: int, seconds: float, for_s: float) -> list[Answer]:
        """As many clients, each of which asks again when it was answered."""
        end_s = asyncio.get_running_loop().time() + for_s

        async def client() -> list[Answer]:
            answers = []
            while asyncio.get_running_loop().time() < end_s:
                answers.append(await self._ask(adapter, seconds))
            return answers

        return [answer for answers in await asyncio.gather(*(client() for _ in range(at_once))) for answer in answers]

    async def _ask(self, adapter: ResolvedAdapter | None, seconds: float) -> Answer:
        body = json.dumps({"seconds": seconds}).encode()
        try:
            reply = await self.backend.dispatch(ResolvedRequest("/v1/completions", BASE, adapter, body, False, "scripted"))
            text = b"".join([chunk async for chunk in reply.chunks])
        except LoraMuxError as error:
            return Answer(error=f"{error.code}: {error}")
        return Answer(text.decode(), reply.head.tier, reply.head.load)

    async def residency(self) -> dict[str, Any]:
        return (await self.backend.residency())[BASE]

    async def evict(self, ref: str, tier: str) -> list[dict[str, Any]]:
        return await self.backend.evict(BASE, AdapterRef.parse(ref), tier)


class Cluster:
    """A running application of scripted replicas, its registry, and two doors."""

    def __init__(self, folder: Path, *, load_s: float = 0.3) -> None:
        self._folder = folder
        self._load_s = load_s
        self._settings = RegistrySettings(url=f"file://{folder}/registry")
        self.registry = Registry(open_store(self._settings))
        self.doors: list[Any] = []

    def run(self, count: int) -> None:
        """Starts so many replicas, or replaces those that run by so many new ones."""
        serve.run(application(self._settings, self._folder / "disks", count, self._load_s), name=APP, route_prefix=None)
        if not self.doors:
            self.doors = [Door.remote() for _ in range(2)]
            ray.get([door.open.remote() for door in self.doors])

    @property
    def door(self) -> Any:
        return self.doors[0]

    async def publish(self, name: str) -> ResolvedAdapter:
        await self.registry.publish(BASE, name, prepared(name))
        await self.registry.promote(BASE, name, "production", 1, By("tests"))
        view = RegistryView(self.registry, POLL_S)
        await view.refresh()
        return view.resolve(parse_model_name(f"{BASE}:{name}"))

    async def rows(self) -> list[dict[str, Any]]:
        """The replicas' rows, by rank."""
        return (await self.door.residency.remote())["replicas"]

    async def holders(self, adapter: ResolvedAdapter) -> set[str]:
        where = {row["replica"]: row["adapters"].get(str(adapter.ref), {}) for row in await self.rows()}
        return {replica for replica, row in where.items() if row.get("tier") == "engine"}

    async def empty(self) -> None:
        """Takes all adapters out of all engines and off all disks."""
        for ref in {ref for row in await self.rows() for ref in row["adapters"]}:
            await self.door.evict.remote(ref, "remote")
        await self.reported()

    async def reported(self) -> None:
        """Waits until what replicas hold now has come to the routers."""
        await asyncio.sleep(4 * STATS_S)

    async def until(self, holds: Any, timeout_s: float = 20) -> None:
        async with asyncio.timeout(timeout_s):
            while not await holds():  # noqa: ASYNC110 - what is waited for happens in other processes
                await asyncio.sleep(0.1)
