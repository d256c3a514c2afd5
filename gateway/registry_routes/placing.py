"""Where versions should be: pin, prewarm, and giving them up."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from adapters.errors import EngineUnavailable, ModelNotFound, StoreError, VersionConflict
from adapters.names import AdapterRef
from adapters.registry.directives import active, check_pins, checked, versions_of
from adapters.registry.moments import now
from adapters.types import AdapterEntry, Directive, Head
from gateway.backend import LowerTier
from gateway.documents import REVISION_HEADER, answers, errors
from gateway.limited import LimitedRoute
from gateway.registry_routes.answers import Changed, Evicted, EvictedRow, answer
from gateway.registry_routes.asked import Direction, Eviction, FromCaller, Undirection
from gateway.registry_routes.changing import change_of
from gateway.registry_routes.reading import pick, seen

router = APIRouter(route_class=LimitedRoute)

_CHANGED = answers(Changed, headers=REVISION_HEADER)
_DIRECTED = _CHANGED | errors(404, 409, 410, 413)
_UNDIRECTED = _CHANGED | errors(404, 409)


@router.post("/pin", responses=_DIRECTED)
async def pin(request: Request, asked: Direction, caller: FromCaller) -> Response:
    """Keeps a version on replicas. More pins than their engines have room for, one slot of each left free, are refused."""
    registry, by = request.app.state.parts.registry, caller.by(asked)

    async def directed() -> Head:
        wanted = checked(asked.directive(pin=True), by, now())
        await _check_pins(request, asked, wanted)
        return await registry.direct(asked.base, asked.name, wanted, by)

    return await change_of(request, asked, directed, tells=False)


@router.delete("/pin", responses=_UNDIRECTED)
async def unpin(request: Request, asked: Annotated[Undirection, Query()], caller: FromCaller) -> Response:
    """Ends the pins on a target; what they kept may stay until its place is needed."""
    return await _undirected(request, asked, caller, pin=True)


@router.post("/prewarm", responses=_DIRECTED)
async def prewarm(request: Request, asked: Direction, caller: FromCaller) -> Response:
    """Brings a version to replicas once; it competes like any other then. One on an alias does so after each move."""
    registry, by = request.app.state.parts.registry, caller.by(asked)
    wanted = asked.directive(pin=False)
    return await change_of(request, asked, lambda: registry.direct(asked.base, asked.name, wanted, by), tells=False)


@router.delete("/prewarm", responses=_UNDIRECTED)
async def end_prewarm(request: Request, asked: Annotated[Undirection, Query()], caller: FromCaller) -> Response:
    """Takes prewarms of a target back."""
    return await _undirected(request, asked, caller, pin=False)


@router.post("/evict", responses=answers(Evicted) | errors(404, 409, 413))
async def evict(request: Request, asked: Eviction) -> Response:
    """Makes replicas give a version up, down to a tier. Where a request uses it, it stays."""
    parts = request.app.state.parts
    backend = parts.backend
    with contextlib.suppress(StoreError):  # a pin may have begun or ended since the last poll
        await parts.view.refresh()
    entry = seen(request, asked.base, asked.name)
    version = pick(entry, asked.version, None)
    if asked.base not in backend.bases():
        raise ModelNotFound(f"there is no base `{asked.base}` here", param="base")
    _check_unpinned(entry, version.version, asked.tier)
    ref = AdapterRef(asked.base, asked.name, version.version)
    rows = await backend.evict(asked.base, ref, asked.tier)
    return answer(Evicted(str(ref), asked.tier, [EvictedRow(row["replica"], row["tier"], row.get("reason")) for row in rows]))


async def _undirected(request: Request, asked: Undirection, caller: FromCaller, *, pin: bool) -> Response:
    registry = request.app.state.parts.registry
    by = caller.by_of(asked.who, asked.message, None, unlock=False)
    return await change_of(
        request, asked, lambda: registry.undirect(asked.base, asked.name, asked.target, by, pin=pin), tells=False
    )


async def _check_pins(request: Request, asked: Direction, wanted: Directive) -> None:
    """Raises InvalidRequest. While the replicas can't be asked nobody is refused: none pins more than it has room for."""
    parts = request.app.state.parts
    with contextlib.suppress(EngineUnavailable):
        replicas = (await parts.backend.residency()).get(asked.base, {}).get("replicas", ())
        slots = [row["slots"] for row in replicas if row.get("slots")]  # one that is late says nothing of its slots
        if slots:
            rows, where = parts.view.adapters(), (asked.base, asked.name)
            check_pins(rows, *where, wanted, slots=min(slots), replicas=len(replicas), now_s=time.time())


def _check_unpinned(entry: AdapterEntry, version: int, tier: LowerTier) -> None:
    """A replica would bring back what is pinned. Raises VersionConflict."""
    now_s = time.time()
    for directive in entry.directives:
        if directive.tier == "disk" and tier == "disk":
            continue
        if directive.pin and active(directive, now_s) and version in versions_of(directive.target, entry):
            raise VersionConflict(
                f"version {version} of `{entry.name}` is pinned through `{directive.target}`",
                reason="pinned",
                value=version,
                hint="end the pin first",
            )
