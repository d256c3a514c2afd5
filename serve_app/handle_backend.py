"""The gateway's backend over Ray Serve handles. Ray's errors become ours here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from adapters.errors import EngineUnavailable, InternalError, LoraMuxError, Overloaded
from gateway.backend import BaseInfo, Reply, ReplyHead, ResolvedRequest
from serve_app.node_metrics import node_metrics


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
        """One replica's view a base, as `Replica.residency` gives it."""
        return {base: await handle.remote(audit) for base, handle in self._health.items()}

    async def metrics(self) -> bytes:
        return await node_metrics()

    async def dispatch(self, request: ResolvedRequest) -> Reply:
        """A replica that died before it answered anything costs one more try: nothing was said yet, so nothing is said twice."""
        try:
            return await self._dispatch(request)
        except RayActorError:
            try:
                return await self._dispatch(request)
            except RayActorError:
                raise EngineUnavailable(f"the replica of `{request.base}` died", retry_after_s=5) from None

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


def _translated(error: Exception) -> LoraMuxError:
    if isinstance(error, (RayActorError, DeploymentUnavailableError)):
        return EngineUnavailable("the replica died in the middle of the answer", retry_after_s=5)
    if isinstance(error, RequestCancelledError):
        return EngineUnavailable("the replica gave the request up")
    return InternalError("the replica failed on this request")
