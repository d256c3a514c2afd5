"""`/v1/models`: the bases, and `base:name` for each adapter with a production version."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import unquote

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from adapters.errors import ModelNotFound
from adapters.names import parse_model_name
from adapters.types import AdapterEntry, VersionEntry
from gateway.backend import BaseInfo

router = APIRouter()


@dataclass(frozen=True, slots=True)
class ModelList:
    """The body of a list, good for one generation of the registry view."""

    generation: int
    body: bytes


@router.get("/v1/models")
async def list_models(request: Request, versions: bool = False) -> Response:
    """All models; with `?versions=true` every version's ref as well. Made once for each generation of the registry."""
    parts = request.app.state.parts
    made = parts.model_lists.get(versions)
    if made is None or made.generation != parts.view.generation:
        made = ModelList(parts.view.generation, _list_body(parts, versions))
        parts.model_lists[versions] = made
    return Response(made.body, media_type="application/json")


def _list_body(parts: Any, versions: bool) -> bytes:
    bases = parts.backend.bases()
    cards = [_base_card(base) for base in bases.values()]
    for entry in sorted(parts.view.adapters(), key=lambda entry: (entry.base, entry.name)):
        if entry.base in bases:
            cards.extend(_adapter_cards(entry, versions))
    return msgspec.json.encode({"object": "list", "data": cards})


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(request: Request, model_id: str) -> Response:
    """One model; slashes in its id may come plain or as %2F. Raises ModelNotFound and InvalidModelName."""
    parts = request.app.state.parts
    model = parse_model_name(unquote(model_id))
    bases = parts.backend.bases()
    if model.base not in bases:
        raise ModelNotFound(f"there is no base `{model.base}`", param="model")
    if model.adapter is None:
        return _json(_base_card(bases[model.base]))
    ref = parts.view.resolve(model).ref
    entry = parts.view.entry(ref.base, ref.name)
    return _json(_card(str(model), entry.base, entry.versions[ref.version]))


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _adapter_cards(entry: AdapterEntry, versions: bool) -> list[dict[str, Any]]:
    name = f"{entry.base}:{entry.name}"
    cards = []
    if entry.production in entry.versions:
        cards.append(_card(name, entry.base, entry.versions[entry.production]))
    if versions:
        cards.extend(_card(f"{name}@{n}", entry.base, v) for n, v in sorted(entry.versions.items()) if not v.retired)
    return cards


def _base_card(base: BaseInfo) -> dict[str, Any]:
    card = {"id": base.id, "object": "model", "created": base.created, "owned_by": "loramux", "parent": None}
    return card | ({"max_model_len": base.max_model_len} if base.max_model_len else {})


def _card(model_id: str, base: str, version: VersionEntry) -> dict[str, Any]:
    created = int(datetime.fromisoformat(version.created_at).timestamp())
    return {"id": model_id, "object": "model", "created": created, "owned_by": "loramux", "parent": base}
