"""What is there: adapters, versions, history. Lists come from this gateway's picture, one adapter from the store itself."""

from __future__ import annotations

import bisect
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from adapters.errors import InvalidRequest, ModelNotFound, StoreUnreachable
from adapters.names import PRODUCTION, AdapterRef
from adapters.registry import aliases
from adapters.types import AdapterEntry, Head, VersionEntry
from gateway.documents import REVISION_HEADER, FreeAnswer, answers, errors
from gateway.registry_routes.answers import (
    AdapterAnswer,
    AdapterPage,
    AdapterRow,
    Generation,
    HistoryAnswer,
    LiveAnswer,
    ManifestAnswer,
    adapter_row,
    alias_rows,
    answer,
    directive_rows,
    etag_of,
    history_row,
    manifest_answer,
    pending_rows,
    version_row,
)
from gateway.registry_routes.asked import MAX_ROWS, Alias, BaseId, Filters, Name, QueryVersion, checked

router = APIRouter()

SHOWN_HISTORY = 20
MAX_MANIFESTS = 100

Rows = Annotated[int, Query(ge=1, le=MAX_ROWS, description="Most rows in the answer.")]


@router.get("/adapters", responses=answers(AdapterPage) | errors())
async def list_adapters(request: Request, asked: Annotated[Filters, Query()]) -> Response:
    """The adapters that this gateway knows, by base and name."""
    parts = request.app.state.parts
    entries = parts.catalogue.entries()
    start = _start(entries, asked.after) if asked.after is not None else 0
    rows, more = [], False
    for entry in entries[start:]:
        if not _wanted(entry, asked):
            continue
        versions = _versions(entry, asked)
        if not versions and (asked.tag or asked.retired is not None):
            continue
        if len(rows) == asked.limit:
            more = True
            break
        rows.append(adapter_row(entry, versions))
    last = f"{rows[-1].base}:{rows[-1].name}" if more else None
    return answer(AdapterPage(parts.view.generation, parts.view.age_s, rows, more, last))


def _start(entries: list[AdapterEntry], after: str) -> int:
    base, colon, name = after.partition(":")
    if not colon or not base or not name:
        raise InvalidRequest("`after` is `base:name`, as `last` gave it", param="after", value=after[:80])
    return bisect.bisect_right(entries, (base, name), key=lambda entry: (entry.base, entry.name))


def _wanted(entry: AdapterEntry, asked: Filters) -> bool:
    return (
        asked.base in (None, entry.base)
        and (asked.name is None or asked.name in entry.name)
        and (asked.prefix is None or entry.name.startswith(asked.prefix))
        and (asked.alias is None or asked.alias in entry.aliases)
    )


def _versions(entry: AdapterEntry, asked: Filters) -> list[VersionEntry]:
    found = [version for version in entry.versions.values() if asked.retired in (None, version.retired)]
    for tag in asked.tag:
        key, colon, value = tag.partition(":")
        found = [version for version in found if key in version.tags and (not colon or version.tags[key] == value)]
    return sorted(found, key=lambda version: version.version)


@router.get("/adapter", responses=answers(AdapterAnswer, headers=REVISION_HEADER) | errors(404))
async def show_adapter(
    request: Request,
    base: BaseId,
    name: Name,
    manifests: Annotated[int, Query(ge=0, le=MAX_MANIFESTS, description="Of how many versions to give all, newest first.")] = 10,
) -> Response:
    """One adapter: aliases since when and by what weights, versions, manifests with metrics, the newest history."""
    parts = request.app.state.parts
    entry, head = await known(request, base, name)
    newest = sorted(entry.versions, reverse=True)[:manifests]
    read = await parts.registry.truth.manifests(base, name, newest)
    value = AdapterAnswer(
        base=base,
        name=name,
        revision=head.revision,
        aliases=head.aliases,
        weights=head.weights,
        protected=sorted(head.protected),
        alias_rows=alias_rows(head),
        versions=[version_row(version) for _, version in sorted(entry.versions.items())],
        manifests=[manifest_answer(manifest, head) for manifest in read],
        history=[history_row(row) for row in reversed(head.history[-SHOWN_HISTORY:])],
        directives=directive_rows(head),
        pending=pending_rows(head),
        generation=parts.view.generation,
    )
    return answer(value, headers=etag_of(head.revision))


@router.get("/versions", responses=answers(AdapterRow, headers=REVISION_HEADER) | errors(404))
async def list_versions(request: Request, base: BaseId, name: Name) -> Response:
    """The versions of one adapter as this gateway knows them, without a call to the store."""
    entry = seen(request, base, name)
    return answer(adapter_row(entry), headers=etag_of(entry.revision))


@router.get("/version", responses=answers(ManifestAnswer, headers=REVISION_HEADER) | errors(404))
async def show_version(
    request: Request, base: BaseId, name: Name, version: QueryVersion | None = None, alias: Alias | None = None
) -> Response:
    """The manifest of one version: by number, by alias, or the one that `production` names."""
    entry, head = await known(request, base, name)
    number = version if version is not None else head.aliases.get(alias or PRODUCTION)
    number = pick(entry, None, alias).version if number is None else number
    manifest = await request.app.state.parts.registry.manifest(AdapterRef(base, name, number))
    return answer(manifest_answer(manifest, head), headers=etag_of(head.revision))


@router.get("/history", responses=answers(HistoryAnswer, headers=REVISION_HEADER) | errors(404))
async def history(
    request: Request,
    base: BaseId,
    name: Name,
    alias: Annotated[Alias | None, Query(description="Only this alias.")] = None,
    at: Annotated[
        str | None, Query(description="Only what had happened by then.", json_schema_extra={"format": "date-time"})
    ] = None,
    limit: Rows = 100,
    before: Annotated[int, Query(ge=0, description="How many of the newest rows to leave out.")] = 0,
) -> Response:
    """What happened to an adapter, newest first: who, when, from, to, why."""
    checked(base, name, alias)
    moment = _moment(at) if at is not None else None
    _, head = await known(request, base, name)
    told = [row for row in reversed(head.history) if alias in (None, row.alias) and (moment is None or row.at <= moment)]
    rows = told[before:]
    value = HistoryAnswer(base, name, head.revision, [history_row(row) for row in rows[:limit]], len(rows) > limit)
    return answer(value, headers=etag_of(head.revision))


@router.get("/live", responses=answers(LiveAnswer, headers=REVISION_HEADER) | errors(404))
async def live(
    request: Request,
    base: BaseId,
    name: Name,
    at: Annotated[str, Query(description="ISO 8601; UTC where no zone is given.", json_schema_extra={"format": "date-time"})],
    alias: Alias = PRODUCTION,
) -> Response:
    """What an alias named at a time."""
    checked(base, name, alias)
    moment = _moment(at)
    _, head = await known(request, base, name)
    row = aliases.live_at(head, alias, moment)
    value = LiveAnswer(
        base,
        name,
        alias,
        moment,
        row.to_version if row else None,
        row.weights if row else None,
        history_row(row) if row else None,
    )
    return answer(value, headers=etag_of(head.revision))


def _moment(text: str) -> str:
    """The time as the history writes it. Raises InvalidRequest."""
    try:
        # a `+` in a query arrives as a blank unless it was escaped
        moment = datetime.fromisoformat(text.upper().replace(" ", "+") if "T" in text.upper() else text)
    except ValueError:
        raise InvalidRequest("`at` is a time like 2026-11-29T12:00:00Z", param="at", value=text[:40]) from None
    try:
        moment = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except OverflowError:  # the first or last day there is, in a zone where that is another day
        moment = moment.replace(tzinfo=UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


@router.get("/residency", responses=answers(FreeAnswer) | errors())
async def residency(
    request: Request, audit: Annotated[bool, Query(description="Ask each engine what it lists itself.")] = False
) -> Response:
    """Where adapters are now, on which replicas, and who uses them; with `?audit=true` also what each engine itself lists."""
    return JSONResponse(await request.app.state.parts.backend.residency(audit))


@router.post("/refresh", responses=answers(Generation) | errors())
async def refresh(request: Request) -> Response:
    """Makes this gateway look at the registry now."""
    view = request.app.state.parts.view
    await view.refresh()
    return answer(Generation(view.generation))


async def known(request: Request, base: str, name: str) -> tuple[AdapterEntry, Head]:
    """The adapter as this gateway sees it, and its head from the store; a name that nobody knows costs no call to the store.

    Raises InvalidRequest, ModelNotFound, StoreUnreachable while this gateway can't say what there is.
    """
    entry = seen(request, base, name)
    head, _ = await request.app.state.parts.registry.truth.head(base, name)
    return entry, head


def seen(request: Request, base: str, name: str) -> AdapterEntry:
    """The adapter as this gateway sees it. Raises InvalidRequest, ModelNotFound, StoreUnreachable."""
    checked(base, name)
    view = request.app.state.parts.view
    entry = view.entry(base, name)
    if entry is not None:
        return entry
    if not view.loaded or view.last_error is not None:
        raise StoreUnreachable("the registry can't be read now; try again", retry_after_s=1)
    near = ", ".join(f"`{known}`" for known in view.near(base, name))
    raise ModelNotFound(f"there is no adapter `{name}` of `{base}`", param="name", hint=f"did you mean {near}?" if near else None)


def pick(entry: AdapterEntry, version: int | None, alias: str | None) -> VersionEntry:
    """One version of the adapter, retired ones too. Raises ModelNotFound."""
    number = version if version is not None else entry.version_of(alias or PRODUCTION)
    if number is None or number not in entry.versions:
        wanted = f"version {version}" if version is not None else f"alias `{(alias or PRODUCTION)[:40]}`"
        raise ModelNotFound(f"`{entry.base}:{entry.name}` has no {wanted}", param="version" if version is not None else "alias")
    return entry.versions[number]
