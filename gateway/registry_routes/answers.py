"""What the registry routes answer with: frozen values, encoded as they are, and the same in the OpenAPI document."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

from adapters.registry.aliases import UNMOVED
from adapters.types import AdapterEntry, AppliedRule, Head, HistoryRow, Manifest, VersionEntry


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A version as lists show it. `created_at` is ISO 8601 in UTC."""

    version: int
    digest: str
    rank: int
    size_bytes: int
    created_at: str
    num_modules: int
    retired: bool
    collected: bool
    tags: dict[str, str]


@dataclass(frozen=True, slots=True)
class AdapterRow:
    """An adapter as lists show it. `aliases` names one version each; `weights` says by what an alias shares its traffic."""

    base: str
    name: str
    revision: int
    aliases: dict[str, int]
    weights: dict[str, dict[int, int]]
    versions: list[VersionRow]


@dataclass(frozen=True, slots=True)
class AdapterPage:
    """A part of the list. `last` is the `after` of the next page, where there is one; `age_s` says how old this picture is."""

    generation: int
    age_s: float | None
    adapters: list[AdapterRow]
    has_more: bool
    last: str | None


@dataclass(frozen=True, slots=True)
class HistoryAnswerRow:
    """One change: who, when, from, to, why. `alias` is null for what happens to a version as such."""

    alias: str | None
    kind: str
    from_version: int | None
    to_version: int | None
    at: str
    who: str | None
    message: str | None
    weights: dict[int, int] | None


@dataclass(frozen=True, slots=True)
class HistoryAnswer:
    """The newest rows, newest first."""

    base: str
    name: str
    revision: int
    history: list[HistoryAnswerRow]
    has_more: bool


@dataclass(frozen=True, slots=True)
class LiveAnswer:
    """What an alias named at a time, and the row that decided it; nulls if it named nothing yet."""

    base: str
    name: str
    alias: str
    at: str
    version: int | None
    weights: dict[int, int] | None
    row: HistoryAnswerRow | None


@dataclass(frozen=True, slots=True)
class AliasRow:
    """An alias now. `since` is the time of its last move, null if the history no longer holds it."""

    version: int
    since: str | None
    protected: bool
    weights: dict[int, int] | None


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file of a version."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class RuleRow:
    """A rewrite that publishing applied, and how many tensors or fields it touched."""

    name: str
    count: int
    lossy: bool


@dataclass(frozen=True, slots=True)
class ManifestAnswer:
    """All that is known of one version."""

    ref: str
    base: str
    name: str
    version: int
    digest: str
    size_bytes: int
    files: list[FileRow]
    rank: int
    alpha: float
    modules: list[str]
    num_modules: int
    base_fingerprint: str | None
    rules: list[RuleRow]
    warnings: list[str]
    metrics: dict[str, float]
    source: dict[str, Any]
    who: str | None
    message: str | None
    created_at: str
    aliases: list[str]
    tags: dict[str, str]
    retired: bool
    collected: bool


@dataclass(frozen=True, slots=True)
class DirectiveRow:
    """Where a version should be: `pin` keeps it there, without it it is only brought there."""

    target: str
    tier: str
    pin: bool
    replicas: int | None
    start: str | None
    until: str | None
    every_s: int | None
    at: str
    who: str | None
    message: str | None


@dataclass(frozen=True, slots=True)
class PendingRow:
    """A move that waits until its version is warm; `taken` says whether a gateway looks after it already."""

    id: str
    version: int
    min_ready: int | None
    deadline: str
    at: str
    who: str | None
    message: str | None
    taken: bool


@dataclass(frozen=True, slots=True)
class EvictedRow:
    """One replica: where the version is now, and why it is still there: `in_use`, `pinned`."""

    replica: str
    tier: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class Evicted:
    """What the live replicas did."""

    ref: str
    tier: str
    replicas: list[EvictedRow]


@dataclass(frozen=True, slots=True)
class AdapterAnswer:
    """An adapter by the truth in the store. `manifests` holds the newest versions, newest first; `versions` holds all."""

    base: str
    name: str
    revision: int
    aliases: dict[str, int]
    weights: dict[str, dict[int, int]]
    protected: list[str]
    alias_rows: dict[str, AliasRow]
    versions: list[VersionRow]
    manifests: list[ManifestAnswer]
    history: list[HistoryAnswerRow]
    directives: list[DirectiveRow]
    pending: dict[str, PendingRow]
    generation: int


@dataclass(frozen=True, slots=True)
class Changed:
    """What is true after a write. `seen` says whether this gateway answers by it already; `generation` is its picture's."""

    base: str
    name: str
    revision: int
    aliases: dict[str, int]
    weights: dict[str, dict[int, int]]
    protected: list[str]
    retired: list[int]
    collected: list[int]
    tags: dict[int, dict[str, str]]
    directives: list[DirectiveRow]
    pending: dict[str, PendingRow]
    generation: int
    seen: bool


@dataclass(frozen=True, slots=True)
class Generation:
    """How often this gateway's picture of the registry has changed."""

    generation: int


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a replica has loaded the version and answered from it; `reason` and `message` say why not."""

    ready: bool
    reason: str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class PublishedAnswer:
    """What a publication came to. `created` is false if the content was a version already; `promoted` is the alias that
    names it now; `readiness` is there if it was asked for."""

    ref: str
    base: str
    name: str
    version: int
    created: bool
    retired: bool
    digest: str
    size_bytes: int
    rank: int
    alpha: float
    modules: list[str]
    num_modules: int
    rules: list[RuleRow]
    warnings: list[str]
    promoted: str | None
    revision: int
    aliases: dict[str, int]
    weights: dict[str, dict[int, int]]
    generation: int
    seen: bool
    readiness: Readiness | None = None


@dataclass(frozen=True, slots=True)
class DryRunAnswer:
    """What publishing would do. `version` is the one that already holds this content."""

    dry_run: bool
    base: str
    name: str
    version: int | None
    digest: str | None
    source_bytes: int
    published_bytes: int | None
    rank: int | None
    alpha: float | None
    modules: list[str]
    num_modules: int
    rules: list[RuleRow]
    warnings: list[str]
    tool: str | None = field(default=None)


def answer(value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """The value as JSON."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def etag_of(revision: int) -> dict[str, str]:
    return {"etag": f'"{revision}"'}


def version_row(version: VersionEntry) -> VersionRow:
    return VersionRow(
        version=version.version,
        digest=version.digest,
        rank=version.rank,
        size_bytes=version.size_bytes,
        created_at=version.created_at,
        num_modules=version.num_modules,
        retired=version.retired,
        collected=version.collected,
        tags=version.tags,
    )


def adapter_row(entry: AdapterEntry, versions: list[VersionEntry] | None = None) -> AdapterRow:
    """The adapter with these versions, or with all."""
    shown = sorted(entry.versions.values(), key=lambda version: version.version) if versions is None else versions
    return AdapterRow(
        entry.base, entry.name, entry.revision, entry.aliases, entry.weights, [version_row(version) for version in shown]
    )


def history_row(row: HistoryRow) -> HistoryAnswerRow:
    return HistoryAnswerRow(row.alias, row.kind, row.from_version, row.to_version, row.at, row.who, row.message, row.weights)


def directive_rows(head: Head) -> list[DirectiveRow]:
    return [DirectiveRow(**asdict(directive)) for directive in head.directives]


def pending_rows(head: Head) -> dict[str, PendingRow]:
    return {
        alias: PendingRow(
            move.id, move.version, move.min_ready, move.deadline, move.at, move.who, move.message, move.taken_by is not None
        )
        for alias, move in sorted(head.pending.items())
    }


def rule_rows(rules: tuple[AppliedRule, ...]) -> list[RuleRow]:
    return [RuleRow(rule.name, rule.count, rule.lossy) for rule in rules]


def manifest_answer(manifest: Manifest, head: Head) -> ManifestAnswer:
    """The manifest with what the head says of its version."""
    version = manifest.ref.version
    return ManifestAnswer(
        ref=str(manifest.ref),
        base=manifest.ref.base,
        name=manifest.ref.name,
        version=version,
        digest=manifest.digest,
        size_bytes=manifest.size_bytes,
        files=[FileRow(file.name, file.size_bytes, file.sha256) for file in manifest.files],
        rank=manifest.rank,
        alpha=manifest.alpha,
        modules=list(manifest.modules),
        num_modules=manifest.num_modules,
        base_fingerprint=manifest.base_fingerprint,
        rules=rule_rows(manifest.rules),
        warnings=list(manifest.warnings),
        metrics=manifest.metrics,
        source=manifest.source,
        who=manifest.who,
        message=manifest.message,
        created_at=manifest.created_at,
        aliases=head.aliases_of(version),
        tags=head.tags.get(version, {}),
        retired=version in head.retired,
        collected=version in head.collected,
    )


def alias_rows(head: Head) -> dict[str, AliasRow]:
    moves = {row.alias: row.at for row in head.history if row.alias is not None and row.kind not in UNMOVED}
    return {
        alias: AliasRow(version, moves.get(alias), alias in head.protected, head.weights.get(alias))
        for alias, version in sorted(head.aliases.items())
    }


def changed(head: Head, generation: int, seen: bool) -> Changed:
    return Changed(
        base=head.base,
        name=head.name,
        revision=head.revision,
        aliases=head.aliases,
        weights=head.weights,
        protected=sorted(head.protected),
        retired=sorted(head.retired),
        collected=sorted(head.collected),
        tags=head.tags,
        directives=directive_rows(head),
        pending=pending_rows(head),
        generation=generation,
        seen=seen,
    )
