"""`/registry/v1`: adapters as this gateway sees them, and alias moves. Names are query or body values, never path segments."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse, Response

from adapters.errors import ModelNotFound
from adapters.names import PRODUCTION, check_adapter_name, check_alias, check_base_id
from adapters.types import AdapterEntry, By, Head

router = APIRouter(prefix="/registry/v1")


class Move(BaseModel):
    """An alias move. `version` is where it goes; a roll-back may leave it out and walk back in history."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: str
    name: str
    alias: str = PRODUCTION
    version: int | None = None
    expected_revision: int | None = None
    message: str | None = None


class Promotion(Move):
    version: int


@router.get("/adapters")
async def list_adapters(request: Request, base: str | None = None) -> Response:
    view = request.app.state.parts.view
    rows = [_row(entry) for entry in view.adapters() if base in (None, entry.base)]
    return JSONResponse({"generation": view.generation, "adapters": rows})


@router.get("/adapter")
async def show_adapter(request: Request, base: str, name: str) -> Response:
    entry = request.app.state.parts.view.entry(base, name)
    if entry is None:
        raise ModelNotFound(f"there is no adapter `{name[:80]}` of `{base[:80]}`", param="name")
    return JSONResponse(_row(entry), headers={"etag": f'"{entry.revision}"'})


@router.post("/promote")
async def promote(request: Request, move: Promotion) -> Response:
    _check(move)
    parts = request.app.state.parts
    head = await parts.registry.promote(
        move.base, move.name, move.alias, move.version, By(None, move.message, move.expected_revision)
    )
    return await _moved(request, head)


@router.post("/rollback")
async def rollback(request: Request, move: Move) -> Response:
    _check(move)
    parts = request.app.state.parts
    head = await parts.registry.rollback(
        move.base, move.name, move.alias, to=move.version, by=By(None, move.message, move.expected_revision)
    )
    return await _moved(request, head)


@router.post("/refresh")
async def refresh(request: Request) -> Response:
    """Makes this gateway look at the registry now."""
    view = request.app.state.parts.view
    await view.refresh()
    return JSONResponse({"generation": view.generation})


@router.get("/residency")
async def residency(request: Request, audit: bool = False) -> Response:
    """Where adapters are in the engines now; with `?audit=true` also what each engine itself lists."""
    return JSONResponse(await request.app.state.parts.backend.residency(audit))


async def _moved(request: Request, head: Head) -> Response:
    await request.app.state.parts.view.refresh()
    return JSONResponse(
        {"base": head.base, "name": head.name, "revision": head.revision, "aliases": head.aliases},
        headers={"etag": f'"{head.revision}"'},
    )


def _check(move: Move) -> None:
    check_base_id(move.base)
    check_adapter_name(move.name)
    check_alias(move.alias)


def _row(entry: AdapterEntry) -> dict[str, Any]:
    versions = [
        {
            "version": number,
            "digest": version.digest,
            "rank": version.rank,
            "size_bytes": version.size_bytes,
            "created_at": version.created_at,
            "retired": version.retired,
        }
        for number, version in sorted(entry.versions.items())
    ]
    return {"base": entry.base, "name": entry.name, "revision": entry.revision, "aliases": entry.aliases, "versions": versions}
