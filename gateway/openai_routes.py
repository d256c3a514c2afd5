"""The OpenAI routes: read the body, resolve the name once, dispatch, relay."""

from __future__ import annotations

import re
import time
import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from adapters.errors import InvalidRequest, ModelNotFound
from adapters.names import parse_model_name
from adapters.types import ResolvedAdapter
from gateway.backend import ResolvedRequest
from gateway.body import Body, read_body
from gateway.documents import ModelRequest, errors, header, json_body, spoken
from gateway.limited import read_limited
from gateway.relay import Limits, relay

router = APIRouter()

MAX_TIMEOUT_MS = 99_999_999
_TIMEOUT_MS = re.compile("[1-9][0-9]{0,7}")


_ERRORS = errors(403, 404, 409, 410, 413, 422, 504)
_SPOKEN = spoken("application/json", "text/event-stream") | _ERRORS
_ASKED = json_body(ModelRequest) | {
    "parameters": [
        header("x-loramux-cold", "Whether to wait for a cold adapter.", {"type": "string", "enum": ["wait", "fail"]}),
        header(
            "x-loramux-timeout-ms",
            "Limit for the whole answer: a whole number of milliseconds.",
            {"type": "string", "pattern": f"^{_TIMEOUT_MS.pattern}$"},
        ),
    ]
}


@router.post("/v1/chat/completions", operation_id="chat_completions", responses=_SPOKEN, openapi_extra=_ASKED)
@router.post("/v1/completions", operation_id="completions", responses=_SPOKEN, openapi_extra=_ASKED)
@router.post("/v1/embeddings", operation_id="embeddings", responses=spoken("application/json") | _ERRORS, openapi_extra=_ASKED)
async def answer(request: Request) -> Response:
    """Chat, completions and embeddings differ only behind the door."""
    parts = request.app.state.parts
    body = read_body(await read_limited(request, parts.settings.max_body_bytes))
    limits = _limits(request, parts.settings)
    start_s = time.monotonic()
    base, adapter = _resolve(parts, body, body.sticky_key or _sticky_header(request, parts.settings.sticky_headers))
    resolve_ms = (time.monotonic() - start_s) * 1e3
    resolved = ResolvedRequest(
        route=request.url.path,
        base=base,
        adapter=adapter,
        stream=body.stream,
        request_id=_request_id(request),
        body=body.for_engine(str(adapter.ref) if adapter else base),
        wait_cold=_wait_cold(request),
    )
    return await relay(request.receive, resolved, parts.backend, limits, resolve_ms)


def _sticky_header(request: Request, names: tuple[str, ...]) -> str | None:
    return next((value for name in names if (value := request.headers.get(name))), None)


def _resolve(parts, body: Body, sticky_key: str | None) -> tuple[str, ResolvedAdapter | None]:
    model = parse_model_name(body.model)
    if model.base not in parts.backend.bases():
        raise ModelNotFound(f"there is no base `{model.base}`", param="model", hint=_near(model.base, parts.backend.bases()))
    if model.adapter is None:
        return model.base, None
    return model.base, parts.view.resolve(model, sticky_key)


def _near(base: str, bases: dict) -> str | None:
    shown = sorted(bases)[:3]
    return f"served here: {', '.join(shown)}" if shown else None


def _limits(request: Request, settings) -> Limits:
    text = request.headers.get("x-loramux-timeout-ms")
    if text is None:
        return Limits(settings.max_wait_s, settings.keepalive_after_s)
    if not _TIMEOUT_MS.fullmatch(text):
        raise InvalidRequest(
            f"`x-loramux-timeout-ms` is a whole number from 1 to {MAX_TIMEOUT_MS}", param="x-loramux-timeout-ms", value=text[:40]
        )
    return Limits(min(int(text) / 1e3, settings.max_wait_s), settings.keepalive_after_s)


def _wait_cold(request: Request) -> bool:
    text = request.headers.get("x-loramux-cold", "wait")
    if text not in ("wait", "fail"):
        raise InvalidRequest("`x-loramux-cold` is `wait` or `fail`", param="x-loramux-cold", value=text[:40])
    return text == "wait"


def _request_id(request: Request) -> str:
    """Serve's own id, which it also answers with; one of ours where no Serve is in front."""
    return request.headers.get("x-request-id") or str(uuid.uuid4())
