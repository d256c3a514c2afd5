"""Whether a version really answers: one token from it, through the same door as everybody's requests."""

from __future__ import annotations

import asyncio
import uuid

import msgspec

from adapters.errors import LoraMuxError
from adapters.types import Manifest, ResolvedAdapter
from gateway.backend import Backend, ResolvedRequest
from gateway.registry_routes.answers import Readiness

_ASKED = (
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 1}),
    ("/v1/embeddings", {"input": "Hello"}),  # of a pooling base
)


async def ready(backend: Backend, manifest: Manifest, timeout_s: float) -> Readiness:
    """Waits until a replica has loaded the version and answered from it, or says why that did not come about."""
    if manifest.ref.base not in backend.bases():
        return Readiness(False, "base_not_served", f"the base `{manifest.ref.base}` is not served here")
    try:
        async with asyncio.timeout(timeout_s):
            for route, fields in _ASKED:
                status = await _status(backend, manifest, route, fields)
                if status < 300:
                    return Readiness(True)
    except TimeoutError:
        return Readiness(False, "deadline_exceeded", f"no answer within {timeout_s:g} s")
    except LoraMuxError as error:
        return Readiness(False, error.reason or error.code, str(error))
    return Readiness(False, "no_answer", f"the replica answered with the status {status}")


async def _status(backend: Backend, manifest: Manifest, route: str, fields: dict[str, object]) -> int:
    adapter = ResolvedAdapter(manifest.ref, manifest.digest, manifest.files, manifest.rank, manifest.num_modules)
    body = msgspec.json.encode({"model": str(manifest.ref), **fields})
    reply = await backend.dispatch(
        ResolvedRequest(route, manifest.ref.base, adapter, body, stream=False, request_id=f"ready-{uuid.uuid4().hex}")
    )
    try:
        async for _ in reply.chunks:
            pass
    finally:
        await reply.aclose()
    return reply.head.status
