"""`/healthz`: this process is alive. `/readyz`: the registry was read and every base answers."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

router = APIRouter()


@router.get("/healthz")
async def healthz() -> Response:
    return JSONResponse({"status": "ok"})


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    parts = request.app.state.parts
    checks = {"registry": parts.view.generation > 0, "bases": await parts.backend.is_ready()}
    return JSONResponse({"status": "ok" if all(checks.values()) else "starting", **checks}, 200 if all(checks.values()) else 503)
