"""The gateway's backend over Ray Serve handles. Ray's errors become ours here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from adapters.errors import EngineUnavailable, InternalError, LoraMuxError, Overloaded
from adapters.names import AdapterRef
from gateway.backend import BaseInfo, LowerTier, Reply, ReplyHead, ResolvedRequest
from serve_app.node_metrics import node_metrics
from serve_app.residency import summary as residency

RESIDENCY_TIMEOUT_S = 2.0
EVICT_TIMEOUT_S = 30.0
TRIES = 2  # a request may itself be what kills replicas: it gets no third


class HandleBackend:
    """One handle a base, made once: a handle costs a metrics pusher and a long poll each."""

    def __init__(self, handles: dict[str, DeploymentHandle], *, bases: dict[str, BaseInfo], max_queued: dict[str, int]) -> None:
        self._handles = {base: handle.options(stream=True, method_name="answer") for base, handle in handles.items()}
        self._health = {base: handle.options(method_name="residency") for base, handle in handles.items()}
        self._bases = bases
        self._max_queued = max_queued

    def bases(self) -> dict[str, BaseInfo]:
        return self._bases

    async def is_ready(self) -> bool:
        try:
            async with asyncio.timeout(2):
                await asyncio.gather(*(handle.remote() for handle in self._health.values()))
        except (TimeoutError, RayError, DeploymentUnavailableError):
            return False
        return True

    async def residency(self, audit: bool = False) -> dict[str, Any]:
        """What all live replicas hold, by base (gateway/README.md, Residency); one that doesn't answer in time is there, empty.
        Raises EngineUnavailable where one failed at it."""
        views = await asyncio.gather(*(self._reports(base, audit) for base in self._health))
        return dict(zip(self._health, (residency.summed(reports) for reports in views), strict=True))

    async def evict(self, base: str, ref: AdapterRef, tier: LowerTier) -> list[dict[str, Any]]:
        """Lets every replica give the version up, down to `tier`: a row for each that answered."""
        return [row for row in await self._ask_all(base, EVICT_TIMEOUT_S, "evict", str(ref), tier) if row is not None]

    async def _reports(self, base: str, audit: bool) -> list[dict[str, Any]]:
        answers = await self._ask_all(base, RESIDENCY_TIMEOUT_S, "residency", audit)
        return [residency.UNKNOWN if answer is None else answer for answer in answers]

    async def _ask_all(self, base: str, timeout_s: float, method: str, *args: Any) -> list[Any]:
        """Each live replica's answer, None for one that is late or died. Raises EngineUnavailable where one failed."""
        try:
            # Serve's own `results_async` gives all answers or none, and one replica that hangs would hide the others.
            calls = await self._health[base].broadcast(method, *args)._fetch_replica_results_async()
        except DeploymentUnavailableError:
            return []
        return await asyncio.gather(*(_answer_of(call, timeout_s) for call in calls))

    async def metrics(self) -> bytes:
        return await node_metrics()

    async def dispatch(self, request: ResolvedRequest) -> Reply:
        """A replica that died before it answered anything costs one more try: nothing was said yet, so nothing is said twice."""
        for _ in range(TRIES):
            with contextlib.suppress(RayActorError):
                return await self._dispatch(request)
        raise EngineUnavailable(f"the replica of `{request.base}` died", retry_after_s=5)

    async def _dispatch(self, request: ResolvedRequest) -> Reply:
        stream = self._handles[request.base].remote(request)
        try:
            first = await anext(stream)
        except asyncio.CancelledError:
            stream.cancel()
            raise
        except BackPressureError:
            limit = self._max_queued[request.base]
            raise Overloaded(f"{limit} requests wait for `{request.base}` already", limit=limit, retry_after_s=1) from None
        except RayActorError:
            raise
        except (RayError, DeploymentUnavailableError, RequestCancelledError, StopAsyncIteration) as error:
            raise _translated(error) from error
        if isinstance(first, LoraMuxError):
            raise first
        head, chunk = first
        return HandleReply(head, chunk, stream)


class HandleReply:
    """A stream that comes from a replica through a handle."""

    def __init__(self, head: ReplyHead, first: bytes, stream: Any) -> None:
        self.head = head
        self._stream = stream
        self._ended = False
        self.chunks = self._chunks(first)

    async def _chunks(self, first: bytes) -> AsyncIterator[bytes]:
        if first:
            yield first
        try:
            async for item in self._stream:
                if isinstance(item, LoraMuxError):
                    raise item
                yield item
        except (RayError, RequestCancelledError) as error:
            raise _translated(error) from error
        self._ended = True

    async def aclose(self) -> None:
        if not self._ended:
            self._stream.cancel()


async def _answer_of(call: Any, timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            return await call.get_async()
    except (TimeoutError, RayActorError):
        return None
    except RayError as error:
        raise EngineUnavailable("a replica failed to say what it holds") from error


def _translated(error: Exception) -> LoraMuxError:
    if isinstance(error, (RayActorError, DeploymentUnavailableError)):
        return EngineUnavailable("the replica died in the middle of the answer", retry_after_s=5)
    if isinstance(error, RequestCancelledError):
        return EngineUnavailable("the replica gave the request up")
    return InternalError("the replica failed on this request")
