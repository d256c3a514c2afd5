"""An export becomes a version, and the version perhaps what an alias names. Every step may be repeated after any failure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from adapters.contract import PublishOptions
from adapters.errors import Forbidden, VersionConflict, VersionRetired
from adapters.names import AdapterRef
from adapters.publishing import Publication, publish_folder
from adapters.registry import Registry
from adapters.registry.aliases import UNMOVED
from adapters.types import By, Head, Manifest
from training.publishing.exports import Export, export_digest, finite
from training.publishing.gate import NOT_EVALUATED, Incumbent, Reason, Score, Verdict, judge
from training.publishing.origin import KIND, WHO, Origin, Target, weights_digest
from training.publishing.told import Judged, Published

VERDICT_TAG = "gate"
SCORE_TAG = "gate-score"
PROMOTED = "promoted"
HELD = "held"
PROTECTED, RETIRED, NOT_SERVED = "protected", "retired", "not_served"

RACES = 8
WARM_WITHIN_S = 300.0


@dataclass(frozen=True, slots=True)
class Standing:
    """What the gate's decision stands on: the head as it was read, the candidate, and what the alias names."""

    head: Head
    candidate: Score
    incumbent: Incumbent | None


class Versions:
    """The versions of the target. Manifests never change, so each is read once."""

    def __init__(self, target: Target, origin: Origin) -> None:
        self.target = target
        self.origin = origin
        self._manifests: dict[int, Manifest] = {}
        self._told: set[tuple[int, AdapterRef]] = set()

    async def take(self, registry: Registry, export: Export, tell: Callable[[Any], None]) -> None:
        """Publishes the export unless a version holds it already, and judges the version unless that was done.

        Tells Published and Judged. Raises what `publish_folder` raises, store errors, VersionConflict after too many lost races,
        and OSError.
        """
        digest = await asyncio.to_thread(export_digest, export.folder)
        known, created = await self._known(registry, digest), False
        if known is None:
            await self._know_base()
            options = PublishOptions(keep_dtype=self.target.keep_dtype)
            published = await publish_folder(registry, self._publication(export, digest), options)
            known, created = published.manifest, published.created
        if (export.step, known.ref) not in self._told:  # it may be judged in a later try
            self._told.add((export.step, known.ref))
            tell(Published(export.step, str(known.ref), created))
        if self.target.alias is not None:
            judged = await self._promote(registry, self.target.alias, known, export)
            if judged is not None:
                tell(judged)

    async def _known(self, registry: Registry, digest: str) -> Manifest | None:
        """The version that this very export became. One that was collected since is known too, and is not brought back."""
        await self._read(registry)
        return next((one for one in self._manifests.values() if one.source.get("export_digest") == digest), None)

    async def _read(self, registry: Registry) -> None:
        numbers = await registry.versions(self.target.base, self.target.name)
        new = [number for number in numbers if number not in self._manifests]
        for manifest in await registry.truth.manifests(self.target.base, self.target.name, new):
            self._manifests[manifest.ref.version] = manifest

    async def _know_base(self) -> None:
        """Once, and here: a large base takes its time, of which the run sees nothing."""
        if self.origin.base_digest is None and self.origin.base_path is not None:
            digest = await asyncio.to_thread(weights_digest, self.origin.base_path)
            self.origin = replace(self.origin, base_digest=digest, base_path=None)

    def _publication(self, export: Export, digest: str) -> Publication:
        origin = self.origin
        run = export.run or origin.run
        told = {
            "kind": KIND,
            "run": run,
            "step": export.step,
            "spec_digest": export.spec_digest or origin.spec_digest,
            "base_digest": origin.base_digest,
            "code_revision": origin.code_revision,
            "evaluation": dict(origin.evaluation) or None,
            "export_digest": digest,
        }
        return Publication(
            self.target.base,
            self.target.name,
            export.folder,
            message=f"run {run}, step {export.step}",
            who=WHO,
            source={key: value for key, value in told.items() if value is not None},
            metrics=finite(export.metrics),
        )

    # Promoting

    async def _promote(self, registry: Registry, alias: str, manifest: Manifest, export: Export) -> Judged | None:
        """Judges, and moves the alias only if nobody changed the adapter since; a lost race is judged again. None where the
        version was judged before. The verdict stays with the version, as a tag: what somebody rolled back stays rolled back."""
        ref = manifest.ref
        for _ in range(RACES):
            standing = await self._standing(registry, alias, manifest, export)
            if _is_settled(standing, alias, ref.version):
                return None
            verdict = judge(self.target.gate, standing.candidate, standing.incumbent)
            note = None
            if verdict.promotes and not _has_named(standing.head, alias, ref.version):
                try:
                    note = await self._move(registry, alias, ref, standing)
                except (Forbidden, VersionRetired, VersionConflict) as error:
                    if isinstance(error, VersionConflict) and error.reason != "promote_failed":
                        continue
                    verdict = Verdict((Reason(_code(error), str(error)),))
            await registry.tag(ref, _tags(verdict, standing.candidate), By(WHO))
            return _judged(export.step, ref, alias, verdict, note)
        raise VersionConflict(f"`{ref.name}` was changed by others {RACES} times while it was judged", retry_after_s=1)

    async def _standing(self, registry: Registry, alias: str, manifest: Manifest, export: Export) -> Standing:
        head = await registry.head(self.target.base, self.target.name)
        await self._read(registry)
        ours = finite(export.metrics).get(self.target.gate.metric)
        candidate = Score(ours, self.origin.evaluation) if ours is not None else self._score(head, manifest)
        waiting = head.pending.get(alias)
        version = waiting.version if waiting is not None else head.aliases.get(alias)
        if version is None or version == manifest.ref.version or version not in self._manifests:
            return Standing(head, candidate, None)
        return Standing(head, candidate, Incumbent(version, self._score(head, self._manifests[version]), alias in head.weights))

    def _score(self, head: Head, manifest: Manifest) -> Score:
        """By its manifest; else by its tag, which the gate writes, and with which a person may vouch for a version."""
        rate = manifest.metrics.get(self.target.gate.metric)
        if rate is not None:
            return Score(rate, manifest.source.get("evaluation") or {})
        try:
            return Score(float(head.tags.get(manifest.ref.version, {})[SCORE_TAG]))
        except (KeyError, ValueError):
            return Score()

    async def _move(self, registry: Registry, alias: str, ref: AdapterRef, standing: Standing) -> str | None:
        """An alias that has users moves when replicas have the version in their engines, as `loramux promote` does it."""
        from adapters.cli.waiting import promoted

        rate = standing.candidate.rate
        by = By(WHO, f"{self.target.gate.metric} {rate:.4f}", expected_revision=standing.head.revision)
        if alias not in standing.head.aliases:
            await registry.promote(ref.base, ref.name, alias, ref.version, by)
            return None
        waited = await promoted(registry, ref, alias, by, lambda head, move: None, timeout_s=WARM_WITHIN_S)
        return waited.note


def _is_settled(standing: Standing, alias: str, version: int) -> bool:
    """Whether this version was judged for good: its tag says so, unless it waited for somebody to evaluate it."""
    tag = standing.head.tags.get(version, {}).get(VERDICT_TAG)
    return tag is not None and (tag != f"{HELD}:{NOT_EVALUATED}" or standing.candidate.rate is None)


def _has_named(head: Head, alias: str, version: int) -> bool:
    """Whether the alias named it once: a publisher may have died between the move and its note of it."""
    return any(row.alias == alias and row.to_version == version and row.kind not in UNMOVED for row in head.history)


def _judged(step: int, ref: AdapterRef, alias: str, verdict: Verdict, note: str | None) -> Judged:
    codes, messages = (tuple(getattr(one, name) for one in verdict.reasons) for name in ("code", "message"))
    return Judged(step, str(ref), alias, verdict.promotes, codes, messages, note)


def _code(error: Exception) -> str:
    if isinstance(error, Forbidden):
        return PROTECTED
    return RETIRED if isinstance(error, VersionRetired) else NOT_SERVED


def _tags(verdict: Verdict, candidate: Score) -> dict[str, str | None]:
    said = PROMOTED if verdict.promotes else f"{HELD}:{verdict.reasons[0].code}"
    return {VERDICT_TAG: said, SCORE_TAG: json.dumps(candidate.rate) if candidate.rate is not None else None}
