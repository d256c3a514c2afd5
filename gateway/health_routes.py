"""`/healthz`: this process is alive. `/readyz`: the registry was read and every base answers. `/metrics`: what was measured."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from adapters.registry.view import RegistryView
from gateway.documents import answers, errors

router = APIRouter()

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Alive(BaseModel):
    """This process answers."""

    status: str


class Ready(Alive):
    """Whether the registry was read and every base answers, and how good the picture of the registry is."""

    registry: bool
    bases: bool
    registry_generation: int
    registry_age_s: float | None
    registry_error: str | None


_STARTING = {503: {"model": Ready, "description": "Not yet, or not any more."}}
_TEXT = {200: {"description": "Prometheus' text.", "content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get("/healthz", responses=answers(Alive))
async def healthz() -> Response:
    return JSONResponse({"status": "ok"})


@router.get("/readyz", responses=answers(Ready) | _STARTING)
async def readyz(request: Request) -> Response:
    """A registry that can't be read any more does not make a gateway unready: it serves on from the picture that it has."""
    parts = request.app.state.parts
    checks = {"registry": parts.view.loaded, "bases": await parts.backend.is_ready()}
    ready = all(checks.values())
    body = {"status": "ok" if ready else "starting", **checks, **picture(parts.view)}
    return JSONResponse(body, 200 if ready else 503)


@router.get("/metrics", responses=_TEXT | errors(), response_class=Response)
async def metrics(request: Request) -> Response:
    """What all processes of the node that answers have measured: one process' numbers would pass for the whole."""
    return Response(await request.app.state.parts.backend.metrics(), media_type=PROMETHEUS_TEXT)


def picture(view: RegistryView) -> dict[str, Any]:
    """How good this process' picture of the registry is: its generation, its age in seconds and the reason of the last failed
    look; None for an age that there isn't yet and for a look that succeeded."""
    age_s = None if view.age_s is None else round(view.age_s, 3)
    return {"registry_generation": view.generation, "registry_age_s": age_s, "registry_error": view.error_reason}
