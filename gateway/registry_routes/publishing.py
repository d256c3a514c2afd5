"""New versions over HTTP: an upload, or what lies under an address that policy allows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from adapters.adoption import Adoption, adopt, source_settings
from adapters.contract import Inspection, PublishOptions, inspect, opened
from adapters.contract.early import early_refusal
from adapters.errors import AdapterRefused, DeadlineExceeded, InvalidRequest, LoraMuxError, VersionConflict
from adapters.publishing import Publication, base_contract, other_contracts, publish_folder
from adapters.registry import Published
from adapters.registry.aliases import check_unlocked
from adapters.store import open_store
from adapters.types import BaseContract, By, Head
from gateway.documents import REVISION_HEADER, errors
from gateway.limited import LimitedRoute
from gateway.readiness import ready
from gateway.receiving import ARCHIVES, Arrival, EarlyAnswer, Look
from gateway.registry_routes.answers import DryRunAnswer, PublishedAnswer, Readiness, answer, etag_of, rule_rows
from gateway.registry_routes.asked import FromCaller, SourcePublication, UploadOptions, checked, pairs
from gateway.registry_routes.changing import SEEN_WITHIN_S
from gateway.sources import check_source

router = APIRouter(route_class=LimitedRoute)
upload_router = APIRouter()

_REFUSALS = errors(403, 404, 409, 410, 413, 422)
_FILES = {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}
_UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {"schema": {"type": "object", "properties": {"file": _FILES}, "required": ["file"]}},
            **{kind: {"schema": {"type": "string", "format": "binary"}} for kind in ARCHIVES},
        },
    }
}
_MADE = {
    200: {
        "model": PublishedAnswer | DryRunAnswer,
        "description": "The content was a version already; or what would happen.",
        "headers": REVISION_HEADER,
    },
    201: {"model": PublishedAnswer, "description": "A new version.", "headers": REVISION_HEADER},
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to make of an adapter that comes in, and for whom."""

    base: str
    name: str
    promote: str | None
    now: bool
    wait_ready: bool
    by: By
    options: PublishOptions
    tags: dict[str, str] = field(default_factory=dict)


def _wanted(request: Request, asked: UploadOptions | SourcePublication, by: By) -> Wanted:
    """Raises InvalidRequest for names that break the grammar."""
    checked(asked.base, asked.name, asked.promote)
    options = PublishOptions(
        strict=asked.strict,
        alpha=asked.alpha,
        keep_dtype=asked.keep_dtype,
        allow_zero=asked.allow_zero,
        max_bytes=request.app.state.parts.settings.max_upload_bytes,
        drop=frozenset({asked.drop} if asked.drop else ()),
    )
    tags = pairs(asked.tag) if isinstance(asked, UploadOptions) else {}
    return Wanted(asked.base, asked.name, asked.promote, asked.now, asked.wait_ready, by, options, tags)


@upload_router.post("/publish", status_code=201, responses=_MADE | _REFUSALS, openapi_extra=_UPLOAD)
async def publish(request: Request, options: Annotated[UploadOptions, Query()], caller: FromCaller) -> Response:
    """Publishes an upload: multipart/form-data with the folder's files, or an archive of it.

    It is checked while it arrives: what configuration and header show is refused before the rest is there.
    """
    parts = request.app.state.parts
    arrival = Arrival(request, parts.settings)
    try:
        asked = _wanted(request, options, caller.by_of(options.who, options.message, None, options.unlock))
        arrival.check_announced()
        before = await _before(request, asked)
        async with parts.uploads.place() as folder:
            contract = await base_contract(parts.registry, asked.base)
            source = await arrival.take(folder, _look(request, asked, contract))
            if options.dry_run:
                return await _dry_run(request, asked, source, contract)
            published = await publish_folder(parts.registry, _publication(options, asked, source), asked.options)
    except LoraMuxError as error:
        if arrival.complete:
            raise
        return EarlyAnswer(error)
    return await _concluded(request, asked, published, before)


def _publication(options: UploadOptions, asked: Wanted, folder: Path) -> Publication:
    told = {"kind": "upload", "run": options.source_run, "step": options.source_step}
    return Publication(
        base=asked.base,
        name=asked.name,
        folder=folder,
        message=asked.by.message,
        who=asked.by.who,
        source={key: value for key, value in told.items() if value is not None},
        metrics={key: float(value) for key, value in pairs(options.metric).items()},
    )


@router.post("/publish-source", status_code=201, responses=_MADE | _REFUSALS)
async def publish_source(request: Request, asked: SourcePublication, caller: FromCaller) -> Response:
    """Publishes the adapter that lies under an address, if `gateway.allowed_sources` allows it."""
    address = check_source(asked.source, request.app.state.parts.settings.allowed_sources)
    wanted = _wanted(request, asked, caller.by(asked))
    before = await _before(request, wanted)
    published = await _adopted(request, address, wanted)
    return await _concluded(request, wanted, published, before)


async def _adopted(request: Request, address: str, asked: Wanted) -> Published:
    parts = request.app.state.parts
    if parts.sources is None:
        raise InvalidRequest("this gateway has no credentials for sources", reason="no_sources", param="source")
    source = open_store(source_settings(address, parts.sources))
    by = By(asked.by.who, asked.by.message)
    return await adopt(
        parts.registry, source, Adoption(asked.base, asked.name, "", address=address, by=by, options=asked.options)
    )


def _look(request: Request, asked: Wanted, contract: BaseContract | None) -> Look:
    """The contract's structural part on what is there; refuses as the whole contract would."""

    async def look(config: Path, header: bytes) -> None:
        async def refusal(others: tuple[BaseContract, ...] = ()) -> AdapterRefused | None:
            return await asyncio.to_thread(early_refusal, config, header, contract, asked.options, base=asked.base, others=others)

        found = await refusal()
        if found is not None and found.reason == "shape_mismatch":  # the other bases are worth asking for only now
            found = await refusal(await other_contracts(request.app.state.parts.registry, asked.base))
        if found is not None:
            raise found

    return look


async def _before(request: Request, asked: Wanted) -> int:
    """The adapter's revision before, for the webhook. Refuses, before anything is uploaded, what the end would refuse."""
    parts = request.app.state.parts
    if asked.promote is None:
        return 0
    head, _ = await parts.registry.truth.head(asked.base, asked.name)
    check_unlocked(head, asked.promote, asked.by)
    expected = asked.by.expected_revision
    if expected not in (None, head.revision):
        text = f"`{asked.name}` is at revision {head.revision}, not {expected}"
        raise VersionConflict(text, limit=expected, value=head.revision)
    return head.revision


async def _dry_run(request: Request, asked: Wanted, source: Path, contract: BaseContract | None) -> Response:
    parts = request.app.state.parts
    others = await other_contracts(parts.registry, asked.base)
    found = await asyncio.to_thread(_inspected, source, asked, contract, others)
    if found.findings:
        raise found.findings[0]
    entry = parts.view.entry(asked.base, asked.name)
    versions = sorted(entry.versions.values(), key=lambda version: version.version) if entry else []
    return answer(
        DryRunAnswer(
            dry_run=True,
            base=asked.base,
            name=asked.name,
            version=next((version.version for version in versions if version.digest == found.digest), None),
            digest=found.digest,
            source_bytes=found.source_bytes,
            published_bytes=found.published_bytes,
            rank=found.rank,
            alpha=found.alpha,
            modules=list(found.modules),
            num_modules=found.num_modules,
            rules=rule_rows(found.rules),
            warnings=list(found.warnings),
            tool=found.tool,
        )
    )


def _inspected(source: Path, asked: Wanted, contract: BaseContract | None, others: tuple[BaseContract, ...]) -> Inspection:
    with opened(source, asked.options.max_bytes) as folder:
        return inspect(folder, contract, asked.options, base=asked.base, others=others)


async def _concluded(request: Request, asked: Wanted, published: Published, before: int) -> Response:
    """Waits for a replica if that was asked for, then moves the alias, so that it never names what can't be loaded."""
    parts, manifest = request.app.state.parts, published.manifest
    readiness = await ready(parts.backend, manifest, parts.settings.ready_timeout_s) if asked.wait_ready else None
    promoted = asked.promote if asked.promote and _may_move(readiness) else None
    if promoted:
        by = asked.by if before else replace(asked.by, expected_revision=None)  # the first version made the head
        refused = await _promoted(request, asked, promoted, manifest.ref.version, by, before)
        promoted, readiness = (None, refused) if refused else (promoted, readiness)
    if asked.tags:
        await parts.registry.tag(manifest.ref, asked.tags, By(asked.by.who, asked.by.message))
    head = await parts.registry.head(asked.base, asked.name)
    version = manifest.ref.version
    seen = await parts.view.wait_seen(asked.base, asked.name, head.revision, version=version, timeout_s=SEEN_WITHIN_S)
    value = _published_answer(published, head, promoted, readiness, parts.view.generation, seen)
    return answer(value, status=201 if published.created else 200, headers=etag_of(head.revision))


async def _promoted(request: Request, asked: Wanted, alias: str, version: int, by: By, before: int) -> Readiness | None:
    """Moves the alias: at once if that is asked for or it names nothing yet, so that nobody would wait; else when the version is
    warm. Returns why it stays where it was, if it does."""
    parts = request.app.state.parts
    named = (await parts.registry.head(asked.base, asked.name)).aliases
    if asked.now or alias not in named:
        parts.telling.tell(await parts.registry.promote(asked.base, asked.name, alias, version, by), before)
        return None
    timeout_s = parts.settings.ready_timeout_s
    head = await parts.registry.begin_move(asked.base, asked.name, alias, version, by, min_ready=None, timeout_s=timeout_s)
    move = head.pending.get(alias)
    if move is None:
        return None
    try:
        await parts.promoter.ended(head, move)
    except (VersionConflict, DeadlineExceeded) as error:
        return Readiness(False, error.reason or error.code, error.message)
    return None


def _may_move(readiness: Readiness | None) -> bool:
    """A base that is not served here can't say no."""
    return readiness is None or readiness.ready or readiness.reason == "base_not_served"


def _published_answer(
    published: Published, head: Head, promoted: str | None, readiness: Readiness | None, generation: int, seen: bool
) -> PublishedAnswer:
    manifest = published.manifest
    return PublishedAnswer(
        ref=str(manifest.ref),
        base=head.base,
        name=head.name,
        version=manifest.ref.version,
        created=published.created,
        retired=published.retired,
        digest=manifest.digest,
        size_bytes=manifest.size_bytes,
        rank=manifest.rank,
        alpha=manifest.alpha,
        modules=list(manifest.modules),
        num_modules=manifest.num_modules,
        rules=rule_rows(manifest.rules),
        warnings=list(manifest.warnings),
        promoted=promoted,
        revision=head.revision,
        aliases=head.aliases,
        weights=head.weights,
        generation=generation,
        seen=seen,
        readiness=readiness,
    )
