"""What changes: aliases, shares, protection, retirement, tags. Each answer says what is true now."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Protocol

from fastapi import APIRouter, Request
from starlette.responses import Response

from adapters.errors import InvalidRequest, VersionConflict
from adapters.names import AdapterRef
from adapters.types import Head
from gateway.documents import REVISION_HEADER, answers, errors
from gateway.limited import LimitedRoute
from gateway.registry_routes.answers import Changed, answer, changed, etag_of
from gateway.registry_routes.asked import (
    AliasChange,
    FromCaller,
    Promotion,
    Protection,
    Rollback,
    Tags,
    VersionChange,
    Weights,
    checked,
)

SEEN_WITHIN_S = 5.0
_OF_THE_STATE = frozenset(
    {"in_use", "never_live", "nothing_to_roll_back", "pending", "pinned", "too_many_directives", "too_many_pins"}
)

router = APIRouter(route_class=LimitedRoute)


class Named(Protocol):
    """What names an adapter."""

    @property
    def base(self) -> str: ...

    @property
    def name(self) -> str: ...


_CHANGED = answers(Changed, headers=REVISION_HEADER)
_ALIAS = _CHANGED | errors(403, 404, 409, 410, 413)
_VERSION = _CHANGED | errors(404, 409, 410, 413)
_BEGUN = {202: _CHANGED[200] | {"description": "The move waits: it is under `pending`."}}


@router.post("/promote", responses=_ALIAS | _BEGUN | errors(403, 404, 409, 410, 413, 504))
async def promote(request: Request, asked: Promotion, caller: FromCaller) -> Response:
    """Lets an alias name one version alone, as soon as replicas hold it in their engines; with `now` at once."""
    parts, by = request.app.state.parts, caller.by(asked)
    registry, where = parts.registry, (asked.base, asked.name, asked.alias, asked.version, by)
    if asked.now:
        return await change_of(request, asked, lambda: registry.promote(*where))
    timeout_s = parts.settings.ready_timeout_s if asked.timeout_s is None else asked.timeout_s
    begin = functools.partial(registry.begin_move, *where, min_ready=asked.min_ready, timeout_s=timeout_s)
    head = await _changed(request, asked, begin, tells=False)
    move = head.pending.get(asked.alias)
    if move is None:  # it names the version already
        return await _told(request, head)
    if not asked.wait:
        return await _told(request, head, status=202)
    return await _told(request, await parts.promoter.ended(head, move))


@router.post("/weights", responses=_ALIAS)
async def weights(request: Request, asked: Weights, caller: FromCaller) -> Response:
    """Lets an alias share its traffic among versions; a caller keeps its version as long as shares only grow."""
    registry, by = request.app.state.parts.registry, caller.by(asked)
    shares = {int(version): weight for version, weight in asked.weights.items()}
    return await change_of(request, asked, lambda: registry.set_weights(asked.base, asked.name, asked.alias, shares, by))


@router.post("/rollback", responses=_ALIAS)
async def rollback(request: Request, asked: Rollback, caller: FromCaller) -> Response:
    """Lets an alias name what it named before; while it shares its traffic, ends that."""
    registry, by = request.app.state.parts.registry, caller.by(asked)
    return await change_of(
        request, asked, lambda: registry.rollback(asked.base, asked.name, asked.alias, to=asked.version, by=by)
    )


@router.post("/unset", responses=_ALIAS)
async def unset(request: Request, asked: AliasChange, caller: FromCaller) -> Response:
    """Takes an alias away."""
    registry, by = request.app.state.parts.registry, caller.by(asked)
    return await change_of(request, asked, lambda: registry.unset(asked.base, asked.name, asked.alias, by))


@router.post("/protect", responses=_ALIAS)
async def protect(request: Request, asked: Protection, caller: FromCaller) -> Response:
    """Lets an alias move only for callers that send `unlock`, or ends that."""
    registry, by = request.app.state.parts.registry, caller.by(asked)
    return await change_of(request, asked, lambda: registry.protect(asked.base, asked.name, asked.alias, asked.on, by))


@router.post("/retire", responses=_VERSION)
async def retire(request: Request, asked: VersionChange, caller: FromCaller) -> Response:
    """Takes a version out of service: it answers 410, and can come back."""
    registry, by = request.app.state.parts.registry, caller.by(asked)
    return await change_of(request, asked, lambda: registry.retire(_ref(asked), by))


@router.post("/restore", responses=_VERSION)
async def restore(request: Request, asked: VersionChange, caller: FromCaller) -> Response:
    """Puts a retired version back."""
    registry, by = request.app.state.parts.registry, caller.by(asked)
    return await change_of(request, asked, lambda: registry.restore(_ref(asked), by))


@router.post("/tag", responses=_VERSION)
async def tag(request: Request, asked: Tags, caller: FromCaller) -> Response:
    """Writes words on a version; null takes one away."""
    registry, by = request.app.state.parts.registry, caller.by(asked)
    return await change_of(request, asked, lambda: registry.tag(_ref(asked), asked.tags, by), tells=False)


def _ref(asked: VersionChange) -> AdapterRef:
    return AdapterRef(asked.base, asked.name, asked.version)


async def change_of(request: Request, asked: Named, change: Callable[[], Awaitable[Head]], *, tells: bool = True) -> Response:
    """Makes the change and answers when this gateway sees it."""
    return await _told(request, await _changed(request, asked, change, tells=tells))


async def _changed(request: Request, asked: Named, change: Callable[[], Awaitable[Head]], *, tells: bool) -> Head:
    checked(asked.base, asked.name, getattr(asked, "alias", None))
    parts = request.app.state.parts
    before = await parts.telling.revision(asked.base, asked.name) if tells else 0
    head = await _made(change)
    if tells:
        parts.telling.tell(head, before)
    return head


async def _told(request: Request, head: Head, *, status: int = 200) -> Response:
    view = request.app.state.parts.view
    seen = await view.wait_seen(head.base, head.name, head.revision, timeout_s=SEEN_WITHIN_S)
    return answer(changed(head, view.generation, seen), status=status, headers=etag_of(head.revision))


async def _made(change: Callable[[], Awaitable[Head]]) -> Head:
    """What was well asked for and does not fit the adapter as it is now is a conflict, not a malformed request."""
    try:
        return await change()
    except InvalidRequest as error:
        if error.reason not in _OF_THE_STATE:
            raise
        raise VersionConflict(error.message, **error.details()) from None
