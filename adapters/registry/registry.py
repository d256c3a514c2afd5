"""The registry: adapters, versions and aliases over any store.

Truth is the manifests (created once, never changed) and one head per adapter (compare-and-swap); the index is derived. Every
write is safe to repeat, by anyone, after a crash at any step.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from adapters.registry import aliases, codec, directives, layout, promotion
from adapters.registry.heads import MAX_ATTEMPTS, MAX_REPEATS, Change, Heads, jitter
from adapters.registry.index import Index, SweepReport, Truth
from adapters.registry.marker import Marker
from adapters.registry.moments import now, unix_s
from adapters.registry.uploads import Progress, Upload
from adapters.registry.weights import check_weights
from adapters.store import Store
from adapters.types import AdapterEntry, BaseContract, By, Directive, Head, HistoryRow, Manifest, PreparedAdapter

MAX_CLAIMS = 10_000
NOBODY = By()

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


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
        self.heads = Heads(store, self.truth)
        self.marker = Marker(store)

    # Versions

    async def publish(
        self,
        base: str,
        name: str,
        prepared: PreparedAdapter,
        by: By = NOBODY,
        *,
        source: dict[str, Any] | None = None,
        metrics: dict[str, float] | None = None,
        progress: Progress | None = None,
    ) -> Published:
        """Makes the content a version, or finds the version that it already is; a collected one is back then. Moves no alias.

        Raises InvalidRequest for a bad name or a metric that is no finite number, AdapterCorrupt if the files are not what
        `prepared` says, StoreMisconfigured if the store ignores conditional writes. May be repeated after any failure: it goes on
        where the last try stopped.
        """
        _check_by(by)
        manifest = _manifest(AdapterRef(check_base_id(base), _check_name(name), 1), prepared)
        manifest = replace(manifest, who=by.who, message=by.message, source=source or {}, metrics=_finite(metrics or {}))
        await self.marker.ensure()
        await Upload(self.store, prepared, progress).run(lambda: self._holds(base, name, prepared.digest))
        found, created = await self._claim(manifest)
        row = _row(by, aliases.RESTORE)
        head = await self.heads.ensure(base, name)
        if found.ref.version in head.collected:
            head = await self.heads.change(base, name, lambda head: aliases.republished(head, found.ref.version, row))
        await Upload(self.store, prepared).run(_yes)  # a publisher that was slow may have lost them again
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

    async def _holds(self, base: str, name: str, digest: str) -> bool:
        """Whether a version of this adapter that was not collected names the digest: its files stay."""
        found, _ = await self._find(base, name, digest)
        return found is not None and found.ref.version not in (await self.truth.head(base, name))[0].collected

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
                    if isinstance(error, StoreUnreachable) and attempt >= MAX_REPEATS:
                        raise error from None
                    await jitter(attempt)  # two creations met and neither is there yet, or ours did not take place
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

    # What happens to adapters

    async def head(self, base: str, name: str) -> Head:
        """Raises ModelNotFound if nothing was published under this name."""
        head, etag = await self.truth.head(base, name)
        if etag is None and not await self.truth.versions(base, name):
            raise ModelNotFound(f"there is no adapter `{name}` of `{base}`", param="model")
        return head

    async def promote(self, base: str, name: str, alias: str, version: int, by: By = NOBODY) -> Head:
        """Lets `alias` name `version` alone, at once; where it already does, nothing is written. A pending move of the alias
        ends: as done if it was to this version.

        Raises ModelNotFound, VersionRetired, Forbidden for a protected alias, and VersionConflict if the head is not at
        `by.expected_revision` or, without one, if the race was lost too often.
        """
        check_alias(alias)
        await self.manifest(AdapterRef(base, name, version))
        row = _row(by, aliases.PROMOTE)
        return await self._change(base, name, lambda head: aliases.moved(head, alias, version, row, by), by)

    async def set_weights(self, base: str, name: str, alias: str, weights: Mapping[int, int], by: By = NOBODY) -> Head:
        """Lets `alias` share its traffic: `{7: 90, 8: 10}`. One share alone is a promotion.

        Raises InvalidRequest for weights that make no sense, and what `promote` raises.
        """
        check_alias(alias)
        shares = check_weights(weights)
        for version in shares:
            await self.manifest(AdapterRef(base, name, version))
        row = _row(by, aliases.PROMOTE)
        return await self._change(base, name, lambda head: aliases.shared(head, alias, shares, row, by), by)

    async def rollback(self, base: str, name: str, alias: str, *, to: int | None = None, by: By = NOBODY) -> Head:
        """Lets `alias` name the version that it named before, or `to`, which must have been live; never a retired one.

        A second rollback goes further back; while traffic is shared, the first one ends that. Raises InvalidRequest if there is
        nothing to go back to, what `promote` raises, and VersionConflict if somebody else moved the alias meanwhile.
        """
        check_alias(alias)
        before = await self.head(base, name)
        seen, row = _named(before, alias), _row(by, aliases.ROLLBACK)

        def change(head: Head) -> Head | None:
            if _named(head, alias) != seen:  # "back" would be back from a version that the caller never saw
                raise VersionConflict(f"`{alias}` of `{name}` was moved by somebody else", value=head.revision)
            return aliases.moved(head, alias, aliases.rollback_target(head, alias, to), row, by)

        return await self._change(base, name, change, by)

    async def unset(self, base: str, name: str, alias: str, by: By = NOBODY) -> Head:
        """Takes the alias away. Raises ModelNotFound, Forbidden, VersionConflict."""
        check_alias(alias)
        await self.head(base, name)
        return await self._change(base, name, lambda head: aliases.unset(head, alias, _row(by, aliases.UNSET), by), by)

    async def protect(self, base: str, name: str, alias: str, on: bool = True, by: By = NOBODY) -> Head:
        """Lets the alias move only for callers that say so (`by.unlock`), or like any other again. Raises ModelNotFound."""
        check_alias(alias)
        await self.head(base, name)
        return await self._change(base, name, lambda head: aliases.protected(head, alias, on, _row(by, aliases.PROTECT)), by)

    async def retire(self, ref: AdapterRef, by: By = NOBODY) -> Head:
        """Takes a version out of service; it can come back. Raises ModelNotFound, and InvalidRequest while an alias names it, a
        pin holds it or a pending move wants it."""
        await self.manifest(ref)
        row = _row(by, aliases.RETIRE)
        return await self._change(ref.base, ref.name, lambda head: aliases.retired(head, ref.version, row), by)

    async def restore(self, ref: AdapterRef, by: By = NOBODY) -> Head:
        """Puts a retired version back. Raises ModelNotFound, VersionRetired if its files were collected."""
        await self.manifest(ref)
        row = _row(by, aliases.RESTORE)
        return await self._change(ref.base, ref.name, lambda head: aliases.restored(head, ref.version, row), by)

    async def collect(self, ref: AdapterRef, by: By = NOBODY) -> Head:
        """Gives a version up for good: it answers no more, and `gc` may delete its files. Only publishing the same content brings
        it back. Raises ModelNotFound, and InvalidRequest where `retire` does."""
        await self.manifest(ref)
        row = _row(by, aliases.COLLECT)
        return await self._change(ref.base, ref.name, lambda head: aliases.collected(head, ref.version, row), by)

    async def tag(self, ref: AdapterRef, tags: Mapping[str, str | None], by: By = NOBODY) -> Head:
        """Writes words on a version; None takes one away. Raises ModelNotFound, InvalidRequest."""
        checked = _checked_tags(tags)
        await self.manifest(ref)
        return await self._change(ref.base, ref.name, lambda head: aliases.tagged(head, ref.version, checked), by)

    # Where versions should be

    async def direct(self, base: str, name: str, directive: Directive, by: By = NOBODY) -> Head:
        """Asks the replicas for a version, in the place of the directive with the same target, tier and `pin`.

        `at`, `who` and `message` come from this call. A prewarm of a version number without an end gets one
        (`directives.PREWARM_LIFE_S`); one of an alias stays, since it follows the alias. Expired directives go with any write.
        Raises ModelNotFound, VersionRetired, VersionConflict, and InvalidRequest for a directive without sense, an alias that is
        not there and for more than `directives.MAX_DIRECTIVES`.
        """
        at = now()
        wanted = directives.checked(directive, by, at)
        number = directives.number_of(wanted.target)
        await (self.head(base, name) if number is None else self.manifest(AdapterRef(base, name, number)))

        def change(head: Head) -> Head | None:
            if number is not None:
                aliases.check_live(head, number)
            return directives.directed(head, wanted, unix_s(at))

        return await self._change(base, name, change, by)

    async def undirect(self, base: str, name: str, target: str, by: By = NOBODY, *, pin: bool | None = None) -> Head:
        """Takes back the directives on `target` (a number or an alias); with `pin` only the pins, or only the others.

        Where there are none, nothing is written. Raises ModelNotFound, VersionConflict.
        """
        await self.head(base, name)
        return await self._change(base, name, lambda head: directives.undirected(head, target, pin), by)

    # Moves that wait

    async def begin_move(
        self, base: str, name: str, alias: str, version: int, by: By = NOBODY, *, min_ready: int | None, timeout_s: float
    ) -> Head:
        """Wants `alias` to name `version` once that is warm: `pending[alias]` of the head is the move, until a gateway ends it.

        A move to the same version that is pending is joined as it is; one to another version is ended. Where the alias names the
        version alone nothing is pending afterwards. Raises what `promote` raises, InvalidRequest for
        `min_ready` and `timeout_s` that make no sense, and VersionConflict with reason `promote_failed` if it failed meanwhile.
        """
        check_alias(alias)
        move = promotion.new_move(alias, version, by, now(), min_ready=min_ready, timeout_s=timeout_s)
        await self.manifest(AdapterRef(base, name, version))
        head = await self._change(base, name, lambda head: promotion.begun(head, move, by), by)
        promotion.check_moved(head, move)  # an answer that was lost may be looked up only after the move has ended
        return head

    async def take_move(self, base: str, name: str, alias: str, move_id: str, who: str) -> Head:
        """Says who looks after a pending move; the first stays. A move that ended meanwhile is left alone."""
        return await self._change(base, name, lambda head: promotion.taken(head, alias, move_id, who), By(who))

    async def finish_move(self, base: str, name: str, alias: str, move_id: str, *, note: str | None = None) -> Head:
        """Moves the alias, in the name of who began; `note` is added to that message. Exactly once, whoever calls: one that finds
        it done has succeeded.

        Raises VersionConflict with reason `move_failed` if the move ended otherwise, `no_such_move` if nobody remembers it, and
        VersionRetired if the version went after the deadline.
        """
        row = _row(NOBODY, aliases.PROMOTE)
        return await self._change(base, name, lambda head: promotion.finished(head, alias, move_id, row, note), NOBODY)

    async def fail_move(self, base: str, name: str, alias: str, move_id: str, reason: str) -> Head:
        """Ends a pending move; the alias stays where it is, and a row of kind `promote_failed` says why.

        Raises VersionConflict with reason `move_done` if the alias moved, `no_such_move` if nobody remembers the move.
        """
        row = _row(NOBODY, aliases.PROMOTE_FAILED)
        return await self._change(base, name, lambda head: promotion.failed(head, alias, move_id, reason, row), NOBODY)

    # Bases

    async def put_base(self, contract: BaseContract) -> None:
        """Says what a base takes; the last writer wins. Writes nothing if the registry already says so."""
        key, data = layout.contract_key(check_base_id(contract.base)), codec.encode_contract(contract)
        lost = False
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
                await jitter(attempt)
            except StoreUnreachable:  # written or not: read it again, once
                if lost:
                    raise
                lost = True
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

    async def sweep(self, *, full: bool = False) -> SweepReport:
        """Brings the index up to the truth: by one listing, or with `full` by reading every manifest and head."""
        return await self.index.sweep(full=full)

    async def entry(self, base: str, name: str) -> AdapterEntry:
        """The adapter's row by the truth, whatever the index says. Raises ModelNotFound."""
        entry = await self.truth.entry(base, name)
        if entry is None:
            raise ModelNotFound(f"there is no adapter `{name}` of `{base}`", param="model")
        return entry

    async def _change(self, base: str, name: str, change: Change, by: By) -> Head:
        """Changes the head and brings the index up to it, also when the head needs no change: a writer may have died here."""
        _check_by(by)
        head = await self.heads.change(base, name, change, by.expected_revision)
        await self.index.update(base, name, revision=head.revision)
        return head


async def _yes() -> bool:
    return True


def _row(by: By, kind: str) -> HistoryRow:
    """A row of the history that is still to be filled with what happened."""
    return HistoryRow(None, None, None, at=now(), who=by.who, message=by.message, kind=kind)


def _named(head: Head, alias: str) -> tuple[int | None, dict[int, int] | None]:
    return head.aliases.get(alias), head.weights.get(alias)


def _check_by(by: By) -> None:
    for what, text in (("who", by.who), ("message", by.message)):
        if text is not None and len(text) > aliases.MAX_MESSAGE_CHARS:
            raise InvalidRequest(
                f"`{what}` has {len(text)} characters; at most {aliases.MAX_MESSAGE_CHARS} are kept",
                limit=aliases.MAX_MESSAGE_CHARS,
                value=len(text),
                param=what,
            )


def _checked_tags(tags: Mapping[str, str | None]) -> dict[str, str | None]:
    for key, value in tags.items():
        if not _TAG.fullmatch(key):
            raise InvalidRequest(
                f"`{key[:80]}` is no tag: a letter or digit, then letters, digits, `.`, `_`, `-`, at most 64", param="tags"
            )
        if value is not None and len(value) > aliases.MAX_TAG_CHARS:
            raise InvalidRequest(
                f"the tag `{key}` has {len(value)} characters; at most {aliases.MAX_TAG_CHARS} are kept",
                limit=aliases.MAX_TAG_CHARS,
                value=len(value),
                param="tags",
            )
    return dict(tags)


def _manifest(ref: AdapterRef, prepared: PreparedAdapter) -> Manifest:
    return Manifest(
        ref=ref,
        digest=prepared.digest,
        files=prepared.files,
        rank=prepared.rank,
        alpha=prepared.alpha,
        modules=prepared.modules,
        created_at=now(),
        base_fingerprint=prepared.base_fingerprint,
        num_modules=prepared.num_modules,
        rules=prepared.rules,
        warnings=prepared.warnings,
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
