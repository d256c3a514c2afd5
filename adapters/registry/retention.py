"""Retention: which versions stay, which may go, and which files nobody needs then. Pure: `collection` looks and does."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from adapters.errors import InvalidRequest
from adapters.names import AdapterRef
from adapters.registry import aliases, directives
from adapters.registry.moments import at_unix, unix_s
from adapters.registry.uploads import GRACE_S, is_notice
from adapters.store import Listed
from adapters.types import Head, Manifest

LEFTOVER_NOTICE_S = 3600.0


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Which versions stay. One that no rule keeps is collected; without `keep_last` and `keep_younger_s` all stay.

    `keep_last` counts the newest versions of each adapter that are not retired; `keep_younger_s` is the age in seconds since a
    version was published or retired; `keep_tagged` are tag keys. Whatever the policy, these stay: what an alias, its weights or
    a rollback would go to, what directives pin or prewarm, what a pending move wants, the newest version, and what is in use.

    `grace_s` is how long files outlive the mark of their version, and how old files without a version must be. Less than
    `GRACE_S` is safe only while nobody publishes.
    """

    keep_last: int | None = None
    keep_younger_s: float | None = None
    keep_tagged: tuple[str, ...] = ()
    grace_s: float = GRACE_S


@dataclass(frozen=True, slots=True)
class AdapterState:
    """An adapter as a survey found it."""

    head: Head
    manifests: tuple[Manifest, ...]


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything that decides, as one look found it: adapters, all rows under `blobs/`, and keys that are none of ours."""

    adapters: tuple[AdapterState, ...]
    blobs: tuple[Listed, ...]
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kept:
    """A version that stays, and why: `alias:production`, `rollback:production`, `newest`, `in_use`, `pinned`, `prewarm`,
    `pending:production`, `newer_release`, `keep_last`, `younger`, `tagged:<key>`, `no_policy`."""

    ref: AdapterRef
    why: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Blob:
    """A file in the store that goes. `why` is `collected` (its versions were) or `orphan` (no version names it)."""

    key: str
    size_bytes: int
    why: str

    @property
    def digest(self) -> str:
        return self.key.split("/")[1]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A file that will go when its grace is over; `due_s` is the Unix time of that."""

    key: str
    size_bytes: int
    why: str
    due_s: float


@dataclass(frozen=True, slots=True)
class CollectionPlan:
    """What a run would do, for a reader to agree to. `collect` are versions to be given up, `blobs` files to be deleted now,
    `waiting` files that a later run deletes, those of `collect` among them; `unknown` keys are reported and never touched;
    `leftovers` are notices of runs that died."""

    policy: RetentionPolicy
    collect: tuple[AdapterRef, ...]
    kept: tuple[Kept, ...]
    blobs: tuple[Blob, ...]
    waiting: tuple[Waiting, ...] = ()
    unknown: tuple[str, ...] = ()
    in_use: frozenset[AdapterRef] = frozenset()
    leftovers: tuple[str, ...] = ()

    @property
    def bytes_now(self) -> int:
        """Bytes that the run deletes."""
        return sum(blob.size_bytes for blob in self.blobs)

    @property
    def bytes_later(self) -> int:
        """Bytes that become free when the grace of `waiting` is over."""
        return sum(blob.size_bytes for blob in self.waiting)

    @property
    def is_empty(self) -> bool:
        return not (self.collect or self.blobs or self.leftovers)


def plan(
    found: Survey, policy: RetentionPolicy | None = None, *, in_use: Collection[AdapterRef] = (), now_s: float
) -> CollectionPlan:
    """What `policy` means for what was found at the Unix time `now_s`; pure. Raises InvalidRequest for a policy without sense."""
    policy = policy or RetentionPolicy()
    _check_policy(policy)
    used = frozenset(in_use)
    collect: list[AdapterRef] = []
    kept: list[Kept] = []
    for adapter in found.adapters:
        reasons = why_kept(adapter, policy, used, now_s)
        for manifest in adapter.manifests:
            if (why := reasons.get(manifest.ref.version)) is not None:
                kept.append(Kept(manifest.ref, why, manifest.size_bytes))
            elif manifest.ref.version not in adapter.head.collected:
                collect.append(manifest.ref)
    blobs, waiting = _sorted_out(found, frozenset(collect), policy.grace_s, now_s)
    leftovers = (row.key for row in found.blobs if is_notice(row.key) and now_s - row.modified_s > LEFTOVER_NOTICE_S)
    return CollectionPlan(policy, tuple(collect), tuple(kept), blobs, waiting, found.unknown, used, tuple(leftovers))


def why_kept(
    adapter: AdapterState, policy: RetentionPolicy, in_use: Collection[AdapterRef], now_s: float
) -> dict[int, tuple[str, ...]]:
    """The versions of an adapter that stay, each with its reasons. Collected ones are not among them."""
    head = adapter.head
    manifests = {m.ref.version: m for m in adapter.manifests if m.ref.version not in head.collected}
    why: dict[int, list[str]] = {version: [] for version in manifests}

    def keep(versions: Iterable[int], reason: str) -> None:
        for version in versions:
            if version in why and reason not in why[version]:
                why[version].append(reason)

    for alias in sorted(head.aliases):
        keep({head.aliases[alias], *head.weights.get(alias, {})}, f"alias:{alias}")
        keep(_rollback_target(head, alias), f"rollback:{alias}")
    live = [version for version in sorted(manifests) if version not in head.retired]
    keep([max(manifests, default=0), *live[-1:]], "newest")
    keep(directives.versions_held(head, now_s, pin=True), "pinned")
    keep(directives.versions_held(head, now_s, pin=False), "prewarm")
    for alias, move in sorted(head.pending.items()):
        keep([move.version] if at_unix(now_s) <= move.deadline else (), f"pending:{alias}")
    keep(_numbers(head.extra), "newer_release")
    keep((ref.version for ref in in_use if (ref.base, ref.name) == (head.base, head.name)), "in_use")
    for key in policy.keep_tagged:
        keep((version for version in manifests if key in head.tags.get(version, {})), f"tagged:{key}")
    if policy.keep_last is None and policy.keep_younger_s is None:
        keep(manifests, "no_policy")
    keep(live[-policy.keep_last :] if policy.keep_last else (), "keep_last")
    if policy.keep_younger_s is not None:
        keep((v for v, m in manifests.items() if now_s - _touched_s(head, m) < policy.keep_younger_s), "younger")
    return {version: tuple(reasons) for version, reasons in why.items() if reasons}


def _check_policy(policy: RetentionPolicy) -> None:
    for name, least in (("keep_last", 1), ("keep_younger_s", 0), ("grace_s", 0)):
        value = getattr(policy, name)
        if value is not None and not value >= least:
            raise InvalidRequest(f"`{name}` is {value}; at least {least} is needed", limit=least, value=value, param=name)


def _rollback_target(head: Head, alias: str) -> list[int]:
    try:
        return [aliases.rollback_target(head, alias)]
    except InvalidRequest:
        return []


def _numbers(value: Any) -> Iterator[int]:
    """Every number in what a newer release wrote: too many kept is a small harm, one too few is not."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, str):
        text = value.rpartition("@")[2]
        if text.isascii() and text.isdigit():
            yield int(text)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(key)
            yield from _numbers(inner)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for inner in value:
            yield from _numbers(inner)


def _touched_s(head: Head, manifest: Manifest) -> float:
    """When the version was published, or retired since."""
    version = manifest.ref.version
    retired = [row.at for row in head.history if row.kind == aliases.RETIRE and row.to_version == version]
    return max(unix_s(at) for at in (manifest.created_at, *retired[-1:]))


def _sorted_out(
    found: Survey, collect: Collection[AdapterRef], grace_s: float, now_s: float
) -> tuple[tuple[Blob, ...], tuple[Waiting, ...]]:
    """The files that go now, and those that go later."""
    due = due_times(found.adapters, collect, grace_s, now_s)
    blobs: list[Blob] = []
    waiting: list[Waiting] = []
    for row in found.blobs:
        digest = row.key.split("/")[1]
        if is_notice(row.key) or due.get(digest, 0.0) is None:
            continue
        why = "collected" if digest in due else "orphan"
        due_s = max(due.get(digest) or 0.0, row.modified_s + grace_s)
        if due_s <= now_s:
            blobs.append(Blob(row.key, row.size_bytes, why))
        else:
            waiting.append(Waiting(row.key, row.size_bytes, why, due_s))
    return tuple(blobs), tuple(waiting)


def due_times(
    adapters: Iterable[AdapterState], collect: Collection[AdapterRef], grace_s: float, now_s: float
) -> dict[str, float | None]:
    """When the files of each digest that a manifest names may go: None while a version holds them."""
    due: dict[str, float | None] = {}
    for adapter in adapters:
        for manifest in adapter.manifests:
            marked = adapter.head.collected.get(manifest.ref.version)
            if marked is None and manifest.ref not in collect:
                due[manifest.digest] = None
                continue
            at_s = (now_s if marked is None else unix_s(marked)) + grace_s
            before = due.get(manifest.digest, 0.0)
            due[manifest.digest] = None if before is None else max(before, at_s)
    return due
