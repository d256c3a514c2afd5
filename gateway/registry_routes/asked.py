"""What callers of the registry routes send: bodies, who they say they are, and the revision that they saw."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from fastapi import Depends, Header, Query, Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from adapters.errors import InvalidRequest, VersionConflict
from adapters.names import PRODUCTION, check_adapter_name, check_alias, check_base_id
from adapters.registry.aliases import MAX_MESSAGE_CHARS
from adapters.registry.directives import MAX_REPLICAS, MIN_EVERY_S
from adapters.registry.promotion import MAX_MIN_READY, MAX_TIMEOUT_S
from adapters.types import By, Directive, WarmTier
from gateway.documents import ALIAS_PATTERN

MAX_REVISION = 2**53
MAX_ROWS = 1000
_VERSION = "[1-9][0-9]{0,8}"
_ETAG = re.compile(r'(?:W/)?"([0-9]{1,16})"|([0-9]{1,16})')


def _whole(value: object) -> object:
    """JSON does not tell 7.0 from 7; true is no number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Patterns stand in the document only: what breaks them is refused by the parsers of names, with a better message.
BaseId = Annotated[
    str,
    Field(description="Id of the base.", json_schema_extra={"pattern": r"^[A-Za-z0-9][A-Za-z0-9/._-]{0,199}$"}),
]
Name = Annotated[
    str,
    Field(
        description="Name of the adapter, `name` or `team/name`.",
        json_schema_extra={"pattern": r"^([a-z0-9][a-z0-9._-]{0,62}/)?[a-z0-9][a-z0-9._-]{0,62}$"},
    ),
]
Alias = Annotated[
    str,
    Field(description="Name of the alias.", json_schema_extra={"pattern": f"^{ALIAS_PATTERN}$"}),
]
Version = Annotated[int, Field(strict=True, ge=1, le=999_999_999, description="Number of the version."), BeforeValidator(_whole)]
QueryVersion = Annotated[int, Query(ge=1, le=999_999_999, description="Number of the version.")]
Revision = Annotated[int, Field(strict=True, ge=0, le=MAX_REVISION), BeforeValidator(_whole)]
Text = Annotated[str, Field(max_length=MAX_MESSAGE_CHARS)]
Flag = Annotated[bool, Field(strict=True)]
ETag = Annotated[str, Field(json_schema_extra={"pattern": r'^(\*|(W/)?"[0-9]{1,16}"|[0-9]{1,16})$'})]
IfMatch = Annotated[ETag | None, Header(description='The revision that the caller saw, as `etag` gave it: `"7"`.')]
User = Annotated[str | None, Header(alias="x-loramux-user", description="Who asks, where the body does not say so.")]


class Change(BaseModel):
    """A change of one adapter. With `expected_revision` (or If-Match) it is made only if nobody else was faster."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: BaseId
    name: Name
    expected_revision: Revision | None = None
    message: Text | None = Field(default=None, description="Why; stands in the history.")
    who: Text | None = Field(default=None, description="Who; stands in the history. Goes before `x-loramux-user`.")


class AliasChange(Change):
    """A change of one alias. `unlock` lets a protected one move."""

    alias: Alias = PRODUCTION
    unlock: Flag = False


class Promotion(AliasChange):
    """Lets the alias name this version alone, as soon as replicas hold it in their engines."""

    version: Version
    now: Flag = Field(default=False, description="Move it at once, warm or not.")
    min_ready: Annotated[int, Field(strict=True, ge=1, le=MAX_MIN_READY), BeforeValidator(_whole)] | None = Field(
        default=None, description="Replicas that must hold it first; as many as hold the version before without it."
    )
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = Field(
        default=None, description="The move fails after so long; `gateway.ready_timeout_s` without it."
    )
    wait: Flag = Field(default=True, description="Answer when the move has ended; else at once, with a 202.")


class Weights(AliasChange):
    """Lets the alias share its traffic: version to weight. A weight of 0 takes a version out."""

    weights: dict[
        Annotated[str, Field(pattern=f"^{_VERSION}$")],
        Annotated[int, Field(strict=True, ge=0, le=1_000_000), BeforeValidator(_whole)],
    ] = Field(min_length=1, max_length=64, json_schema_extra={"additionalProperties": False})


class Rollback(AliasChange):
    """Lets the alias name what it named before, or `version`, which must have been live."""

    version: Version | None = None


class Protection(AliasChange):
    """Protects an alias, or with `on: false` ends that."""

    on: Flag = True


class VersionChange(Change):
    """A change of one version."""

    version: Version


class Tags(VersionChange):
    """Words on a version; null takes one away."""

    tags: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")], Annotated[str, Field(max_length=256)] | None
    ] = Field(min_length=1, max_length=64, json_schema_extra={"additionalProperties": False})


Target = Annotated[
    str,
    Field(
        description="The version: its number or an alias, as text. What is said of an alias follows it.",
        json_schema_extra={"pattern": f"^({_VERSION}|{ALIAS_PATTERN})$"},
    ),
]
Moment = Annotated[str, Field(max_length=40, json_schema_extra={"format": "date-time"})]


class Direction(Change):
    """Where a version should be before anybody asks for it, on how many replicas, and when."""

    target: Target
    tier: WarmTier = "engine"
    replicas: Annotated[int, Field(strict=True, ge=1, le=MAX_REPLICAS), BeforeValidator(_whole)] | None = Field(
        default=None, description="On so many replicas; on all without it."
    )
    start: Moment | None = Field(default=None, description="From then on; at once without it.")
    until: Moment | None = Field(default=None, description="Only until then.")
    every_s: Annotated[int, Field(strict=True, ge=MIN_EVERY_S), BeforeValidator(_whole)] | None = Field(
        default=None, description="The window from `start` to `until` comes back so many seconds later, again and again."
    )

    def directive(self, pin: bool) -> Directive:
        return Directive(self.target, self.tier, pin, self.replicas, self.start, self.until, self.every_s)


class SourcePublication(Change):
    """Publishes what lies under an address that `gateway.allowed_sources` allows."""

    source: Annotated[
        str,
        Field(
            max_length=1024,
            json_schema_extra={"pattern": r"^(s3://[a-z0-9][a-z0-9.-]{1,62}(/[A-Za-z0-9_-]+)*|file://(/[A-Za-z0-9_-]+)+)$"},
        ),
    ]
    promote: Alias | None = None
    now: Flag = False
    unlock: Flag = False
    strict: Flag = False
    keep_dtype: Flag = False
    allow_zero: Flag = False
    alpha: Annotated[float, Field(gt=0, le=1e9)] | None = None
    drop: Literal["vision"] | None = None
    wait_ready: Flag = False


AdapterId = Annotated[
    str,
    Field(
        json_schema_extra={
            "pattern": r"^[A-Za-z0-9][A-Za-z0-9/._-]{0,199}:([a-z0-9][a-z0-9._-]{0,62}/)?[a-z0-9][a-z0-9._-]{0,62}$"
        }
    ),
]


class Asked(BaseModel):
    """Query values of a route; an unknown one is refused, since a filter that is not there would show too much."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Filters(Asked):
    """Which adapters to list. `tag` and `retired` choose versions; an adapter without any is left out."""

    base: str | None = Field(default=None, description="Only adapters of this base.")
    name: str | None = Field(default=None, description="Part of the name.")
    prefix: str | None = Field(default=None, description="Beginning of the name.")
    tag: list[str] = Field(default_factory=list, description="`key:value`, or `key` for any value; all given ones must hold.")
    alias: str | None = Field(default=None, description="Only adapters with this alias.")
    retired: bool | None = Field(default=None, description="Only versions that are retired, or only those that are not.")
    limit: int = Field(default=MAX_ROWS, ge=1, le=MAX_ROWS, description="Most adapters in the answer.")
    after: AdapterId | None = Field(default=None, description="`last` of the page before, as `base:name`.")


_KEY = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
Metric = Annotated[str, Field(pattern=rf"^{_KEY}=-?[0-9]{{1,15}}(\.[0-9]{{1,15}})?([eE][-+]?[0-9]{{1,2}})?$")]
Tag = Annotated[str, Field(pattern=rf"^{_KEY}=[^\n]{{0,256}}$")]


class Undirection(Asked):
    """What not to ask of the replicas any more."""

    base: BaseId
    name: Name
    target: Target
    message: Text | None = Field(default=None, description="Why.")
    who: Text | None = Field(default=None, description="Who; goes before `x-loramux-user`.")


class Eviction(BaseModel):
    """A version that replicas are to give up, down to a tier."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: BaseId
    name: Name
    version: Version
    tier: Literal["disk", "remote"] = Field(default="disk", description="`disk` keeps the files, `remote` gives them up too.")


class UploadOptions(Asked):
    """What to make of an upload."""

    base: BaseId
    name: Name
    promote: Alias | None = Field(default=None, description="Alias that moves to the version.")
    now: bool = Field(default=False, description="Move it at once; else an alias that has users moves when replicas have it.")
    message: Text | None = Field(default=None, description="Why; stands in manifest and history.")
    who: Text | None = Field(default=None, description="Who; goes before `x-loramux-user`.")
    unlock: bool = Field(default=False, description="Let a protected alias move.")
    strict: bool = Field(default=False, description="Refuse what needs rewriting.")
    alpha: float | None = Field(default=None, gt=0, le=1e9, description="Replaces `lora_alpha`.")
    keep_dtype: bool = Field(default=False, description="Keep float32.")
    allow_zero: bool = Field(default=False, description="Let an adapter without effect pass.")
    drop: Literal["vision"] | None = Field(default=None, description="Leave the vision tower's factors out; lossy.")
    metric: list[Metric] = Field(default_factory=list, max_length=64, description="`key=number`: how good it is.")
    tag: list[Tag] = Field(default_factory=list, max_length=32, description="`key=value`: a tag of the version.")
    source_run: Text | None = Field(default=None, description="Training run that it comes from.")
    source_step: int | None = Field(default=None, ge=0, le=MAX_REVISION, description="Step of that run.")
    wait_ready: bool = Field(default=False, description="Answer when a replica has loaded the version and said a token.")
    dry_run: bool = Field(default=False, description="Say what would happen, and do nothing.")


def pairs(words: list[str]) -> dict[str, str]:
    """`key=value` words as a mapping."""
    return dict(word.partition("=")[::2] for word in words)


def checked(base: str, name: str, alias: str | None = None) -> None:
    """Raises InvalidRequest for a name that breaks the grammar."""
    check_base_id(base)
    check_adapter_name(name)
    if alias is not None:
        check_alias(alias)


class Caller:
    """What the headers say of the caller."""

    def __init__(self, user: str | None, revision: int | None) -> None:
        self.user = user
        self.revision = revision

    def by(self, change: Change) -> By:
        """Raises VersionConflict if body and header expect different revisions: the adapter can't be at both."""
        return self.by_of(change.who, change.message, change.expected_revision, getattr(change, "unlock", False))

    def by_of(self, who: str | None, message: str | None, expected: int | None, unlock: bool) -> By:
        """The same from single values."""
        if None not in (expected, self.revision) and expected != self.revision:
            raise VersionConflict(
                f"`expected_revision` is {expected}, If-Match says {self.revision}",
                limit=self.revision,
                value=expected,
                param="expected_revision",
            )
        return By(who or self.user, message, self.revision if expected is None else expected, unlock)


def caller(request: Request, if_match: IfMatch = None, user: User = None) -> Caller:
    """Raises InvalidRequest for an If-Match that is no revision."""
    return Caller(user or None, _revision(if_match))


FromCaller = Annotated[Caller, Depends(caller)]


def _revision(text: str | None) -> int | None:
    """The revision in an If-Match: quoted, as `etag` gives it, weakened by a proxy, or bare; `*` is any."""
    if text is None or text.strip() == "*":
        return None
    match = _ETAG.fullmatch(text.strip())
    if not match:
        raise InvalidRequest(
            'If-Match is one revision, as `etag` gave it: `"7"`', param="if-match", value=text[:40], reason="bad_if_match"
        )
    return int(match[1] or match[2])
