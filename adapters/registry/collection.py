"""Collection: how versions that may go, and files that nobody needs, go without harming anybody.

`survey` reads, `retention.plan` decides, `run` does. A manifest is never deleted, so that no number is ever used twice: a version
that goes is first marked in its head, and its files follow when the mark is `grace_s` old and no other version names them.

Files are deleted under a notice, an object beside them. Whoever deletes writes the notice first and looks at manifests and ages
then; whoever publishes uploads first and looks for notices then (`adapters.registry.uploads`). One of the two sees the other.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass

from adapters.names import AdapterRef
from adapters.registry import aliases, codec, layout
from adapters.registry.at_once import each
from adapters.registry.index import SweepReport
from adapters.registry.layout import AdapterName
from adapters.registry.moments import now
from adapters.registry.registry import Registry
from adapters.registry.retention import AdapterState, Blob, CollectionPlan, RetentionPolicy, Survey, due_times, plan, why_kept
from adapters.registry.uploads import NOTICE_LIFE_S, is_notice, notice_key
from adapters.store import Listed
from adapters.types import ADAPTER_FILES, By, Head, HistoryRow, Manifest

BATCH = 200  # digests deleted under one look at the manifests
CALLS_AT_ONCE = 16


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
        return due_times(states, (), self._plan.policy.grace_s, time.time())

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
