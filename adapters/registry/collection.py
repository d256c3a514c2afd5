"""Retention and collection: which versions may go, which files nobody needs, and how they go without harming anybody.

`survey` reads, `plan` decides (pure), `run` does. A manifest is never deleted, so that no number is ever used twice: a version
that goes is first marked in its head, and its files follow when the mark is `grace_s` old and no other version names them.

Files are deleted under a notice, an object beside them. Whoever deletes writes the notice first and looks at manifests and ages
then; whoever publishes uploads first and looks for notices then (`adapters.registry.uploads`). One of the two sees the other.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from adapters.errors import InvalidRequest
from adapters.names import AdapterRef
from adapters.registry import aliases, codec, layout
from adapters.registry.at_once import each
from adapters.registry.index import SweepReport
from adapters.registry.layout import AdapterName
from adapters.registry.moments import now, unix_s
from adapters.registry.registry import Registry
from adapters.registry.uploads import GRACE_S, NOTICE_LIFE_S, is_notice, notice_key
from adapters.store import Listed
from adapters.types import ADAPTER_FILES, By, Head, HistoryRow, Manifest

BATCH = 200  # digests deleted under one look at the manifests
CALLS_AT_ONCE = 16
HELD_KEYS = ("pins", "prewarm", "pending")  # what holds versions in a head beside aliases
LEFTOVER_NOTICE_S = 3600.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Which versions stay. One that no rule keeps is collected; without `keep_last` and `keep_younger_s` all stay.

    `keep_last` counts the newest versions of each adapter that are not retired; `keep_younger_s` is the age in seconds since a
    version was published or retired; `keep_tagged` are tag keys. Whatever the policy, these stay: what an alias, its weights or
    a rollback would go to, what `pins`, `prewarm` or `pending` of the head name, the newest version, and what is in use.

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
    """A version that stays, and why: `alias:production`, `rollback:production`, `newest`, `in_use`, `pinned`, `keep_last`,
    `younger`, `tagged:<key>`, `no_policy`."""

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


@dataclass(frozen=True, slots=True)
class CollectionReport:
    """What a run did. `spared` are versions and files of the plan that were needed after all, with the reason."""

    collected: tuple[AdapterRef, ...]
    deleted: tuple[Blob, ...]
    spared: tuple[tuple[str, str], ...]
    index: SweepReport
    plan: CollectionPlan

    @property
    def bytes_freed(self) -> int:
        return sum(blob.size_bytes for blob in self.deleted)


async def survey(registry: Registry) -> Survey:
    """Reads every manifest and head and lists the store. Changes nothing. Raises the store's errors."""
    blobs: list[Listed] = []
    unknown: list[str] = []
    # the files are listed before the manifests: what was published in between is not taken for an orphan
    async for row in registry.store.list(""):
        if _is_blob(row.key) or is_notice(row.key):
            blobs.append(row)
        elif not layout.is_ours(row.key):
            unknown.append(row.key)
    return Survey(await _states(registry), tuple(blobs), tuple(unknown))


async def _states(registry: Registry) -> tuple[AdapterState, ...]:
    listed = await registry.truth.adapters()
    gate = asyncio.Semaphore(CALLS_AT_ONCE)

    async def read(adapter: AdapterName) -> AdapterState:
        async with gate:
            manifests = await registry.truth.manifests(*adapter, sorted(listed[adapter].versions))
            head, _ = await registry.truth.head(*adapter)
            return AdapterState(head, tuple(manifests))

    return tuple(await asyncio.gather(*map(read, sorted(listed))))


# Deciding


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
    keep(_held(head), "pinned")
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


def _held(head: Head) -> set[int]:
    """Every number that the head's directives mention: too many kept is a small harm, one too few is not."""
    return {version for key in HELD_KEYS for version in _numbers(head.extra.get(key))}


def _numbers(value: Any) -> Iterator[int]:
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
    due = _due_times(found.adapters, collect, grace_s, now_s)
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


def _due_times(
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


# Doing


async def plan_for(
    registry: Registry, policy: RetentionPolicy | None = None, *, in_use: Collection[AdapterRef] = ()
) -> CollectionPlan:
    """`plan` over a survey of now: the dry run."""
    return plan(await survey(registry), policy, in_use=in_use, now_s=time.time())


async def run(
    registry: Registry,
    decided: CollectionPlan,
    by: By | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> CollectionReport:
    """Does what was planned, looks again before each step, and repairs the index. Safe to repeat and to interrupt.

    `progress` is told files done and files in all. Raises the store's errors.
    """
    return await _Run(registry, decided, by or By(), progress or (lambda done, total: None)).run()


class _Run:
    """One run of a plan. `_read` are the manifests that were read already: they never change."""

    def __init__(self, registry: Registry, decided: CollectionPlan, by: By, progress: Callable[[int, int], None]) -> None:
        self._registry = registry
        self._store = registry.store
        self._plan = decided
        self._by = by
        self._progress = progress
        self._id = uuid.uuid4().hex
        self._read: dict[AdapterRef, Manifest] = {}
        self._collected: list[AdapterRef] = []
        self._deleted: list[Blob] = []
        self._spared: list[tuple[str, str]] = []

    async def run(self) -> CollectionReport:
        await each(self._to_collect().items(), lambda marked: self._mark(*marked), CALLS_AT_ONCE)
        index = await self._registry.sweep()  # gateways see the marks long before a file goes
        for key in self._plan.leftovers:
            await self._store.delete(key)
        by_digest: dict[str, list[Blob]] = {}
        for blob in self._plan.blobs:
            by_digest.setdefault(blob.digest, []).append(blob)
        digests = sorted(by_digest)
        await self._manifests()  # before the first notice, which has little time
        for start in range(0, len(digests), BATCH):
            await self._delete({digest: by_digest[digest] for digest in digests[start : start + BATCH]})
        return CollectionReport(
            collected=tuple(sorted(self._collected)),
            deleted=tuple(sorted(self._deleted, key=lambda blob: blob.key)),
            spared=tuple(sorted(self._spared)),
            index=index,
            plan=self._plan,
        )

    def _to_collect(self) -> dict[AdapterName, set[int]]:
        found: dict[AdapterName, set[int]] = {}
        for ref in self._plan.collect:
            found.setdefault(AdapterName(ref.base, ref.name), set()).add(ref.version)
        return found

    async def _mark(self, adapter: AdapterName, versions: set[int]) -> None:
        """Gives versions up, in one write, unless the head by now says otherwise."""
        manifests = tuple(await self._registry.truth.manifests(*adapter, await self._registry.versions(*adapter)))
        self._read |= {manifest.ref: manifest for manifest in manifests}
        kept: dict[int, tuple[str, ...]] = {}

        def change(head: Head) -> Head | None:
            kept.clear()
            kept.update(why_kept(AdapterState(head, manifests), self._plan.policy, self._plan.in_use, time.time()))
            new = head
            for version in sorted(versions - kept.keys()):
                row = HistoryRow(None, None, None, now(), self._by.who, self._by.message)
                new = aliases.collected(new, version, row) or new
            return None if new is head else new

        head = await self._registry.heads.change(*adapter, change)
        for version in sorted(versions):
            ref = AdapterRef(*adapter, version)
            if version in head.collected:
                self._collected.append(ref)
            else:
                self._spared.append((str(ref), ", ".join(kept.get(version, ("in_use",)))))

    async def _delete(self, batch: dict[str, list[Blob]]) -> None:
        """Deletes the files of a few digests. Whoever publishes them shows in this look, or sees the notice and waits."""
        started_s = time.monotonic()
        note = codec.encode_note({"at": now()})
        await each(batch, lambda digest: self._store.put(notice_key(digest, self._id), note), CALLS_AT_ONCE)
        due = await self._due_now(batch)
        await each(batch.items(), lambda found: self._delete_one(*found, due.get(found[0], 0.0), started_s), CALLS_AT_ONCE)
        # not after an error: a deletion without an answer may still be on its way
        await each(batch, lambda digest: self._store.delete(notice_key(digest, self._id)), CALLS_AT_ONCE)

    async def _delete_one(self, digest: str, blobs: list[Blob], due_s: float | None, started_s: float) -> None:
        rows = {row.key: row async for row in self._store.list(layout.blob_folder(digest))}
        store_now_s = rows[notice_key(digest, self._id)].modified_s  # the clock that the files' times are of
        for blob in blobs:
            row = rows.get(blob.key)
            if row is None:
                continue
            if due_s is None:
                self._spare(blob, "named")
            elif due_s > time.time() or row.modified_s + self._plan.policy.grace_s > store_now_s:
                self._spare(blob, "young")
            elif time.monotonic() - started_s > NOTICE_LIFE_S / 3:
                self._spare(blob, "slow")  # the notice must outlive the last deletion by far
            else:
                await self._store.delete(blob.key)
                self._deleted.append(blob)
            self._progress(len(self._deleted) + len(self._spared), len(self._plan.blobs))

    def _spare(self, blob: Blob, why: str) -> None:
        self._spared.append((blob.key, why))

    async def _due_now(self, digests: Collection[str]) -> dict[str, float | None]:
        """When the files of `digests` may go, by the manifests and heads of now."""
        named: dict[AdapterName, list[Manifest]] = {}
        for manifest in await self._manifests():
            if manifest.digest in digests:
                named.setdefault(AdapterName(manifest.ref.base, manifest.ref.name), []).append(manifest)
        states = [AdapterState((await self._registry.truth.head(*adapter))[0], tuple(found)) for adapter, found in named.items()]
        return _due_times(states, (), self._plan.policy.grace_s, time.time())

    async def _manifests(self) -> list[Manifest]:
        """All of now; only new ones are read."""
        gate = asyncio.Semaphore(CALLS_AT_ONCE)

        async def read(ref: AdapterRef) -> Manifest:
            if ref not in self._read:
                async with gate:
                    self._read[ref] = await self._registry.truth.manifest(ref)
            return self._read[ref]

        listed = await self._registry.truth.adapters()
        refs = [AdapterRef(*adapter, version) for adapter, found in listed.items() for version in found.versions]
        return list(await asyncio.gather(*map(read, refs)))


def _is_blob(key: str) -> bool:
    parts = key.split("/")
    return len(parts) == 3 and key == layout.blob_key(parts[1], parts[2]) and parts[2] in ADAPTER_FILES
