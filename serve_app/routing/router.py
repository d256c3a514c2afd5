"""Ray Serve's request router, as `placement` decides. The one file that knows what goes on inside a router (Ray 2.60).

Each process that calls a base has one. Serve gives it the replicas with their reports (`record_routing_stats`, at most
`stats_period_s` and a controller's turn old), asks it for a replica for each request, and tells it what became of that.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from typing import Any

from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)

from adapters.types import ResolvedAdapter
from gateway.backend import ResolvedRequest
from serve_app.routing.placement import OUT_OF_REACH, Placement, Reported

log = logging.getLogger(__name__)

DOUBT_S = 1.0  # a replica that the cluster could not reach is left alone for so long
REPORT_LAG_S = 1.5  # until what a replica began shows in its report, with some to spare
MAX_BACKOFF_S = 0.2
FADE_S = 2.0  # what a replica said of other routers' requests counts less and less for so long


def router_config(room: int, stats_period_s: float) -> RequestRouterConfig:
    """What a base's deployment needs to be called through this router."""
    return RequestRouterConfig(
        request_router_class="serve_app.routing.router.AffinityRouter",
        request_router_kwargs={"room": room},
        request_routing_stats_period_s=stats_period_s,
        max_backoff_s=MAX_BACKOFF_S,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Others:
    """Requests at once that were not this router's, and the loop's time when a replica said so."""

    count: int
    at_s: float

    def faded(self, now_s: float) -> float:
        return self.count * max(0.0, 1 - (now_s - self.at_s) / FADE_S)


class AffinityRouter(RequestRouter):
    """Sends a request where its ref is, or comes to. Without Serve's FIFOMixin: that may hand the replica chosen for one request
    to another."""

    def initialize_state(self, room: int) -> None:
        self._placement = Placement(room)
        self._by_name: dict[str, RunningReplica] = {}
        self._others: dict[str, _Others] = {}
        self._doubted: dict[str, float] = {}  # replica to the loop's time until which it counts as out of reach
        self._adding: set[asyncio.Future[Any]] = set()

    @property
    def max_num_routing_tasks(self) -> int:
        """Serve's own number is twice the replicas: so many requests that wait for a full replica would hold up all others."""
        return self.max_num_routing_tasks_cap

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica, or none for now: if it takes no more, Serve asks again a moment later, when things stand differently."""
        if pending_request is None:
            return [candidate_replicas]
        # otherwise Serve asks again without a pause
        pending_request.routing_context.should_backoff = True
        request = _resolved(pending_request)
        try:
            choice = self._placement.choose(request.ref if request else None, self._load)
        except LookupError:
            return []
        if request:
            self._give(pending_request, request.ref, choice.replica)
            if choice.add and request.adapter:
                self._add(self._by_name[choice.add], pending_request, request.adapter)
        return [[self._by_name[choice.replica]]]

    # -- what Serve tells --------------------------------------------------------------------------------------------

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        self._placement.update({name: Reported.of(replica.routing_stats) for name, replica in self._by_name.items()})
        super().update_replicas(replicas)
        self._others = {name: others for name, others in self._others.items() if name in self._by_name}
        self._doubted = {name: until for name, until in self._doubted.items() if until > self._event_loop.time()}

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._placement.forget(replica_id.unique_id)
        self._by_name.pop(replica_id.unique_id, None)

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_unavailable(replica_id)
        self._doubted[replica_id.unique_id] = self._event_loop.time() + DOUBT_S

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        name = replica_id.unique_id
        others = num_ongoing_requests - self._placement.own(name)
        self._others[name] = _Others(max(0, others), self._event_loop.time())

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._placement.end(internal_request_id, replica_id.unique_id)

    # -- flights -----------------------------------------------------------------------------------------------------

    def _give(self, pending: PendingRequest, ref: str | None, replica: str) -> None:
        request_id = pending.metadata.internal_request_id
        self._placement.begin(request_id, ref, replica)
        # Serve tells the end of what was sent only. A request that a replica rejected comes back with another future.
        pending.future.add_done_callback(lambda future: self._placement.end(request_id) if future.cancelled() else None)

    def _load(self, name: str) -> float:
        """The replica's requests at once: this router's own, and others' as they were when it was last sent a request. What is
        known of others fades, or a replica that was busy once would get nothing, and so say nothing, for ever."""
        if self._doubted and self._doubted.get(name, 0) > self._event_loop.time():
            return OUT_OF_REACH
        own = self._placement.own(name)
        replica_id = self._by_name[name].replica_id
        if self.replica_queue_len_cache.get(replica_id) is None:
            # Serve would ask first, which costs a round, and a replica that is busy loading answers too late to be chosen.
            self.replica_queue_len_cache.update(replica_id, own)
        others = self._others.get(name)
        return own + (others.faded(self._event_loop.time()) if others else 0)

    # -- one more owner ----------------------------------------------------------------------------------------------

    def _add(self, replica: RunningReplica, pending: PendingRequest, adapter: ResolvedAdapter) -> None:
        """Lets the replica load the adapter, so that no request has to. Counts as a load under way until its report shows it."""
        flight = f"add {uuid.uuid4().hex}"
        self._placement.begin(flight, str(adapter.ref), replica.replica_id.unique_id)
        metadata = dataclasses.replace(
            pending.metadata, call_method="prewarm", is_streaming=False, internal_request_id=flight, tracing_context=None
        )
        task = asyncio.ensure_future(self._prewarm(replica, PendingRequest([adapter, "engine"], {}, metadata), flight))
        self._adding.add(task)
        task.add_done_callback(self._adding.discard)

    async def _prewarm(self, replica: RunningReplica, call: PendingRequest, flight: str) -> None:
        try:
            result: ReplicaResult = replica.try_send_request(call, with_rejection=False)
            await result.get_async()
            await asyncio.sleep(REPORT_LAG_S)
        except RayError:
            log.warning("a replica could not be asked to load one more adapter; the next request that finds no room asks again")
        finally:
            self._placement.end(flight)


def _resolved(pending: PendingRequest) -> ResolvedRequest | None:
    first = pending.args[0] if pending.args else None
    return first if isinstance(first, ResolvedRequest) else None
