"""`/v1/models`: the bases, and `base:name` for each adapter with a production version. Whole, or in pages."""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import unquote

import msgspec
from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from adapters.errors import ModelNotFound
from adapters.names import PRODUCTION, parse_model_name
from adapters.types import AdapterEntry, VersionEntry
from gateway.backend import Backend, BaseInfo
from gateway.catalogue import Catalogue
from gateway.documents import MODEL_PATTERN, ModelId, answers, errors

router = APIRouter()

MAX_PAGE = 10_000

Key = tuple[int, str, str, int]  # bases first; then adapters by base and name, production before the versions


class ModelCard(BaseModel):
    """A model as OpenAI's client sees it. `parent` is the base of an adapter."""

    id: str
    object: str
    created: int
    owned_by: str
    parent: str | None = None
    max_model_len: int | None = None


class ModelPage(BaseModel):
    """The models. `last_id` is the `after` of the next page."""

    object: str
    data: list[ModelCard]
    has_more: bool
    first_id: str | None
    last_id: str | None


@dataclass(frozen=True, slots=True)
class Cards:
    """The encoded cards of one base or adapter, with their places in the order and their ids."""

    of: object
    keys: tuple[Key, ...]
    ids: tuple[str, ...]
    cards: tuple[bytes, ...]


class ModelList:
    """All cards in order, good for one generation of the registry view."""

    def __init__(self, generation: int, groups: list[Cards]) -> None:
        self.generation = generation
        self._groups = groups
        self.cards = [card for group in groups for card in group.cards]

    @functools.cached_property
    def keys(self) -> list[Key]:
        return [key for group in self._groups for key in group.keys]

    @functools.cached_property
    def ids(self) -> list[str]:
        return [model_id for group in self._groups for model_id in group.ids]

    @functools.cached_property
    def whole(self) -> bytes:
        """The body of the whole list."""
        ids = [group.ids for group in self._groups if group.ids]
        return _body(self.cards, False, ids[0][0] if ids else None, ids[-1][-1] if ids else None)

    def page(self, start: int, limit: int | None) -> bytes:
        """The body of a page."""
        end = len(self.cards) if limit is None else min(len(self.cards), start + limit)
        ids = self.ids[start:end]
        return _body(self.cards[start:end], end < len(self.cards), ids[0] if ids else None, ids[-1] if ids else None)


class ModelLists:
    """Cards are encoded once and kept while their adapter stays as it is: after a change only what changed is made again."""

    def __init__(self, catalogue: Catalogue, backend: Backend) -> None:
        self._catalogue = catalogue
        self._backend = backend
        self._made: dict[bool, ModelList] = {}
        self._cards: dict[bool, dict[tuple[str, str], Cards]] = {False: {}, True: {}}

    def get(self, versions: bool) -> ModelList:
        """The list as it is now; with `versions` every version's ref too."""
        made = self._made.get(versions)
        if made is None or made.generation != self._catalogue.generation:
            made = self._made[versions] = self._make(versions)
        return made

    def _make(self, versions: bool) -> ModelList:
        generation, bases = self._catalogue.generation, self._backend.bases()
        groups = [_base_cards(base) for _, base in sorted(bases.items())]
        known = self._cards[versions]
        for entry in self._catalogue.entries():
            if entry.base in bases:
                group = known.get((entry.base, entry.name))
                if group is None or group.of is not entry:
                    group = known[entry.base, entry.name] = _adapter_cards(entry, versions)
                groups.append(group)
        return ModelList(generation, groups)


@router.get("/v1/models", responses=answers(ModelPage) | errors(404))
async def list_models(
    request: Request,
    versions: Annotated[bool, Query(description="Every version's ref too.")] = False,
    limit: Annotated[int | None, Query(ge=1, le=MAX_PAGE, description="Most models in the answer; all without it.")] = None,
    after: Annotated[ModelId | None, Query(description="Id of the last model of the page before.")] = None,
) -> Response:
    """The models, in an order that stays: bases by id, then adapters by base and name."""
    made = request.app.state.parts.models.get(versions)
    if limit is None and after is None:
        return Response(made.whole, media_type="application/json")
    start = _start(request, made, after) if after is not None else 0
    return Response(made.page(start, limit), media_type="application/json")


def _start(request: Request, made: ModelList, after: str) -> int:
    """Where the page begins; a model that left the list since still has its place. Raises InvalidModelName, ModelNotFound."""
    model = parse_model_name(after)
    key: Key = (0, model.base, "", 0) if model.adapter is None else (1, model.base, model.adapter, model.version or 0)
    at = bisect.bisect_left(made.keys, key)
    if at < len(made.keys) and made.keys[at] == key and made.ids[at] == after:
        return at + 1
    if model.alias not in (None, PRODUCTION) or not _was_there(request, key):
        raise ModelNotFound("`after` is no model of this list", param="after", value=after[:80])
    return at


def _was_there(request: Request, key: Key) -> bool:
    entry = request.app.state.parts.view.entry(key[1], key[2])
    return entry is not None and (key[3] == 0 or key[3] in entry.versions)


def _body(cards: list[bytes], has_more: bool, first_id: str | None, last_id: str | None) -> bytes:
    ends = {"has_more": has_more, "first_id": first_id, "last_id": last_id}
    return b'{"object":"list","data":[' + b",".join(cards) + b"]," + msgspec.json.encode(ends)[1:]


@router.get("/v1/models/{model_id:path}", responses=answers(ModelCard) | errors(404, 410))
async def retrieve_model(
    request: Request,
    model_id: Annotated[
        str, Path(description="`base`, `base:name`, `base:name@7`.", json_schema_extra={"pattern": MODEL_PATTERN})
    ],
) -> Response:
    """One model; slashes in its id may come plain or as %2F. Raises ModelNotFound and InvalidModelName."""
    parts = request.app.state.parts
    model = parse_model_name(unquote(model_id))
    bases = parts.backend.bases()
    if model.base not in bases:
        raise ModelNotFound(f"there is no base `{model.base}`", param="model")
    if model.adapter is None:
        return _json(_base_card(bases[model.base]))
    ref = parts.view.resolve(model, "any").ref  # a fixed caller, so that the card stays the same while traffic is shared
    entry = parts.view.entry(ref.base, ref.name)
    return _json(_card(str(model), entry.base, entry.versions[ref.version]))


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _base_cards(base: BaseInfo) -> Cards:
    return Cards(base, ((0, base.id, "", 0),), (base.id,), (msgspec.json.encode(_base_card(base)),))


def _adapter_cards(entry: AdapterEntry, versions: bool) -> Cards:
    if not versions and entry.production not in entry.versions:
        return Cards(entry, (), (), ())
    name = f"{entry.base}:{entry.name}"
    shown = []
    if entry.production in entry.versions:
        shown.append((0, name, entry.versions[entry.production]))
    if versions:
        shown.extend((n, f"{name}@{n}", v) for n, v in sorted(entry.versions.items()) if not v.retired)
    return Cards(
        entry,
        tuple((1, entry.base, entry.name, number) for number, _, _ in shown),
        tuple(model_id for _, model_id, _ in shown),
        tuple(msgspec.json.encode(_card(model_id, entry.base, version)) for _, model_id, version in shown),
    )


def _base_card(base: BaseInfo) -> dict[str, Any]:
    card = {"id": base.id, "object": "model", "created": base.created, "owned_by": "loramux", "parent": None}
    return card | ({"max_model_len": base.max_model_len} if base.max_model_len else {})


def _card(model_id: str, base: str, version: VersionEntry) -> dict[str, Any]:
    created = int(datetime.fromisoformat(version.created_at).timestamp())
    return {"id": model_id, "object": "model", "created": created, "owned_by": "loramux", "parent": base}
