"""The registry: adapters, versions and aliases over any store.

Truth is the manifests (created once, never changed) and one head per adapter (compare-and-swap); the index is derived. Every
write is safe to repeat, by anyone, after a crash at any step.
"""

from __future__ import annotations

import asyncio
import math
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from adapters.errors import (
    InvalidRequest,
    ModelNotFound,
    StoreConflict,
    StoreMissing,
    StoreUnreachable,
    VersionConflict,
)
from adapters.names import AdapterRef, check_adapter_name, check_alias, check_base_id
from adapters.registry import aliases, codec, layout
from adapters.registry.index import Index, SweepReport, Truth
from adapters.registry.uploads import Progress, Upload
from adapters.store import Store
from adapters.types import AdapterEntry, AliasMove, BaseContract, Head, Manifest, PreparedAdapter

MAX_ATTEMPTS = 32
MAX_RECENT_CHANGES = 64
MAX_CLAIMS = 10_000

Change = Callable[[Head], Head | None]


@dataclass(frozen=True, slots=True)
class Published:
    """What a publication came to. `created` is False if the content was already a version, which may be retired."""

    ref: AdapterRef
    created: bool
    manifest: Manifest
    retired: bool = False


class Registry:
    """Every method may raise the errors of the store: unreachable, denied, throttled, misconfigured."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.truth = Truth(store)
        self.index = Index(store, self.truth)

    # Versions

    async def publish(
        self,
        base: str,
        name: str,
        prepared: PreparedAdapter,
        *,
        who: str | None = None,
        message: str | None = None,
        source: dict[str, Any] | None = None,
        metrics: dict[str, float] | None = None,
        progress: Progress | None = None,
    ) -> Published:
        """Makes the content a version, or finds the version that it already is. Moves no alias.

        Raises InvalidRequest for a bad name or a metric that is no finite number, AdapterCorrupt if the files are not what
        `prepared` says. May be repeated after any failure: it goes on where the last try stopped.
        """
        manifest = _manifest(AdapterRef(check_base_id(base), _check_name(name), 1), prepared)
        manifest = replace(manifest, who=who, message=message, source=source or {}, metrics=_finite(metrics or {}))
        await Upload(self.store, prepared, progress).run()
        found, created = await self._claim(manifest)
        head = await self._ensure_head(base, name)
        await self.index.update(base, name, revision=head.revision, version=found.ref.version)
        return Published(found.ref, created, found, retired=found.ref.version in head.retired)

    async def _claim(self, manifest: Manifest) -> tuple[Manifest, bool]:
        """The manifest of this content: the one that is there, or ours under the next free number."""
        base, name = manifest.ref.base, manifest.ref.name
        known, first_free = await self._find(base, name, manifest.digest)
        if known is not None:
            return known, False
        for number in range(first_free, first_free + MAX_CLAIMS):
            ours = replace(manifest, ref=AdapterRef(base, name, number))
            there, is_ours = await self._create_or_read(ours)
            if there.digest == ours.digest:
                return there, is_ours
        raise VersionConflict(f"no free version after {MAX_CLAIMS} tries", retry_after_s=1)

    async def _find(self, base: str, name: str, digest: str) -> tuple[Manifest | None, int]:
        """The version with this digest, if any, and the number after the newest. The index saves reading old manifests."""
        numbers = await self.truth.versions(base, name)
        row = await self.index.entry(base, name) if numbers else None
        shown = {number: entry.digest for number, entry in row.versions.items()} if row else {}
        doubtful = [number for number in numbers if shown.get(number, digest) == digest]
        manifests = await self.truth.manifests(base, name, doubtful)
        found = next((manifest for manifest in manifests if manifest.digest == digest), None)
        return found, max(numbers, default=0) + 1

    async def _create_or_read(self, manifest: Manifest) -> tuple[Manifest, bool]:
        """Creates the manifest, or reads what has its number. After a conflict or a lost answer, ours is known by its bytes."""
        key, data = layout.manifest_key(manifest.ref), codec.encode_manifest(manifest, change_id=uuid.uuid4().hex)
        for attempt in range(MAX_ATTEMPTS):
            try:
                await self.store.create(key, data)
                return manifest, True
            except (StoreConflict, StoreUnreachable) as error:
                try:
                    found = await self.store.get(key)
                except StoreMissing:
                    if isinstance(error, StoreUnreachable):
                        raise error from None
                    await _jitter(attempt)  # two creations met and neither is there yet
                    continue
                return codec.decode_manifest(found.data), found.data == data
        raise VersionConflict("too many publish this adapter at once; try again", retry_after_s=1)

    async def manifest(self, ref: AdapterRef) -> Manifest:
        """Raises ModelNotFound."""
        try:
            return await self.truth.manifest(ref)
        except StoreMissing as error:
            raise ModelNotFound(f"there is no `{ref}`", param="model") from error

    async def versions(self, base: str, name: str) -> list[int]:
        """The published versions, retired ones too, ascending; empty for an unknown adapter."""
        return await self.truth.versions(base, name)

    # Aliases

    async def head(self, base: str, name: str) -> Head:
        """Raises ModelNotFound if nothing was published under this name."""
        head, etag = await self.truth.head(base, name)
        if etag is None and not await self.truth.versions(base, name):
            raise ModelNotFound(f"there is no adapter `{name}` of `{base}`", param="model")
        return head

    async def promote(
        self,
        base: str,
        name: str,
        alias: str,
        version: int,
        *,
        expected_revision: int | None = None,
        who: str | None = None,
        message: str | None = None,
    ) -> Head:
        """Lets `alias` name `version`; where it already does, nothing is written.

        Raises ModelNotFound, VersionRetired, and VersionConflict if the head is not at `expected_revision` or, without one,
        if the race was lost too often.
        """
        check_alias(alias)
        await self.manifest(AdapterRef(base, name, version))
        move = AliasMove(alias, None, version, at=_now(), who=who, message=message, kind=aliases.PROMOTE)
        return await self._change(base, name, lambda head: aliases.moved(head, move), expected_revision)

    async def rollback(
        self,
        base: str,
        name: str,
        alias: str,
        *,
        to: int | None = None,
        expected_revision: int | None = None,
        who: str | None = None,
        message: str | None = None,
    ) -> Head:
        """Lets `alias` name the version that it named before, or `to`, which must have been live; never a retired one.

        A second rollback goes further back. Raises InvalidRequest if there is nothing to go back to, ModelNotFound,
        VersionRetired (for `to`), and VersionConflict as `promote` does and if somebody else moved the alias meanwhile.
        """
        check_alias(alias)
        seen = (await self.head(base, name)).aliases.get(alias)

        def change(head: Head) -> Head | None:
            if head.aliases.get(alias) != seen:  # "back" would be back from a version that the caller never saw
                raise VersionConflict(f"`{alias}` of `{name}` was moved by somebody else", value=head.revision)
            target = aliases.rollback_target(head, alias, to)
            move = AliasMove(alias, seen, target, at=_now(), who=who, message=message, kind=aliases.ROLLBACK)
            return aliases.moved(head, move)

        return await self._change(base, name, change, expected_revision)

    async def retire(self, ref: AdapterRef) -> Head:
        """Takes a version out of service; it can come back. Raises ModelNotFound, InvalidRequest while an alias names it."""
        await self.manifest(ref)
        return await self._change(ref.base, ref.name, lambda head: aliases.retired(head, ref.version))

    async def restore(self, ref: AdapterRef) -> Head:
        """Puts a retired version back. Raises ModelNotFound."""
        await self.manifest(ref)
        return await self._change(ref.base, ref.name, lambda head: aliases.restored(head, ref.version))

    # Bases

    async def put_base(self, contract: BaseContract) -> None:
        """Says what a base takes; the last writer wins. Writes nothing if the registry already says so."""
        key, data = layout.contract_key(check_base_id(contract.base)), codec.encode_contract(contract)
        for attempt in range(MAX_ATTEMPTS):
            try:
                found = await self.store.get(key)
            except StoreMissing:
                found = None
            if found is not None and found.data == data:
                return
            try:
                await (self.store.create(key, data) if found is None else self.store.replace(key, data, found.etag))
                return
            except StoreConflict:
                await _jitter(attempt)
        raise VersionConflict("too many replicas describe this base at once; try again", retry_after_s=1)

    async def base(self, base_id: str) -> BaseContract:
        """Raises ModelNotFound if no replica of this base has reported yet."""
        try:
            return codec.decode_contract((await self.store.get(layout.contract_key(base_id))).data)
        except StoreMissing as error:
            raise ModelNotFound(f"no base `{base_id}` is known here", param="base") from error

    async def bases(self) -> list[str]:
        """The ids of all bases that replicas have reported, in order."""
        rows = self.store.list(layout.BASES)
        return sorted([base async for row in rows if (base := layout.base_of_contract_key(row.key)) is not None])

    # Index

    async def sweep(self) -> SweepReport:
        """Compares the index with the truth and repairs it."""
        return await self.index.sweep()

    async def entry(self, base: str, name: str) -> AdapterEntry:
        """The adapter's row by the truth, whatever the index says. Raises ModelNotFound."""
        entry = await self.truth.entry(base, name)
        if entry is None:
            raise ModelNotFound(f"there is no adapter `{name}` of `{base}`", param="model")
        return entry

    # How a head changes

    async def _ensure_head(self, base: str, name: str) -> Head:
        """The head, made with revision 1 if this is the adapter's first version."""
        return await self._write_head(base, name, lambda head: head if head.revision == 0 else None, None)

    async def _change(self, base: str, name: str, change: Change, expected_revision: int | None = None) -> Head:
        """Changes the head and brings the index up to it, also when the head needs no change: a writer may have died here."""
        head = await self._write_head(base, name, change, expected_revision)
        await self.index.update(base, name, revision=head.revision)
        return head

    async def _write_head(self, base: str, name: str, change: Change, expected_revision: int | None) -> Head:
        change_id = uuid.uuid4().hex
        for attempt in range(MAX_ATTEMPTS):
            head, etag = await self.truth.head(base, name)
            if change_id in head.recent_changes:  # the answer to our write was lost
                return head
            _check_revision(head, expected_revision)
            new = change(head)
            if new is None:
                return head
            new = _next(new, change_id)
            if await self._swap_head(new, etag):
                return new
            await _jitter(attempt)
        raise VersionConflict(f"`{name}` is being changed by too many at once; try again", value=head.revision, retry_after_s=1)

    async def _swap_head(self, head: Head, etag: str | None) -> bool:
        """Whether the head was written. Unsure after a lost answer, so that is read again; raises StoreUnreachable if it
        was not written and the store can't say why."""
        key, data = layout.head_key(head.base, head.name), codec.encode_head(head)
        try:
            await (self.store.create(key, data) if etag is None else self.store.replace(key, data, etag))
            return True
        except StoreConflict:
            return False
        except StoreUnreachable:
            now, _ = await self.truth.head(head.base, head.name)
            if head.change_id not in now.recent_changes:
                raise
            return False  # the caller reads again and finds its own change


def _manifest(ref: AdapterRef, prepared: PreparedAdapter) -> Manifest:
    return Manifest(
        ref=ref,
        digest=prepared.digest,
        files=prepared.files,
        rank=prepared.rank,
        alpha=prepared.alpha,
        modules=prepared.modules,
        created_at=_now(),
        base_fingerprint=prepared.base_fingerprint,
        num_modules=prepared.num_modules,
        rules=prepared.rules,
        warnings=prepared.warnings,
    )


def _next(head: Head, change_id: str) -> Head:
    recent = (*head.recent_changes, change_id)[-MAX_RECENT_CHANGES:]
    return replace(head, revision=head.revision + 1, change_id=change_id, recent_changes=recent)


def _check_revision(head: Head, expected: int | None) -> None:
    if expected is not None and head.revision != expected:
        raise VersionConflict(
            f"`{head.name}` is at revision {head.revision}, not {expected}",
            limit=expected,
            value=head.revision,
            hint="look again, then repeat with the current revision",
        )


def _check_name(name: str) -> str:
    if check_adapter_name(name).endswith("/head.json"):
        raise InvalidRequest("`head.json` is a reserved name", param="name")
    return name


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    for key, value in metrics.items():
        if not math.isfinite(value):
            raise InvalidRequest(f"the metric `{key}` is {value}; a finite number is needed", param="metrics")
    return {key: float(value) for key, value in metrics.items()}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


async def _jitter(attempt: int) -> None:
    await asyncio.sleep(random.random() * min(0.005 * 2**attempt, 0.25))
