"""A drop prefix that is watched: folders become versions when they are complete and have settled.

What became of a folder is written down in the registry, by the folder's state. So a refused one is told once and not tried again
until it changes, not even after a restart or by another gateway; a published one is not downloaded again, and does not bring back
a version that was collected since.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from adapters.adoption.adopting import Adoption, adopt, clean_address, promote_adopted
from adapters.adoption.candidates import Candidate, Looker
from adapters.errors import LoraMuxError, ModelNotFound, StoreConflict, StoreError, StoreMissing, VersionConflict
from adapters.names import check_alias, check_base_id
from adapters.registry import Published, Registry, codec, layout
from adapters.settings import DropSettings
from adapters.store import Store
from adapters.types import By

log = logging.getLogger("loramux.drop")

WHO = "drop"
PUBLISHED, KNOWN, REFUSED, WAITING, FAILED = "published", "known", "refused", "waiting", "failed"
EARLIER_FAILED = "earlier_step_failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one look of a watcher made of one folder: `published`, `known` (its content was a version), `refused`, `waiting`,
    `failed` (store trouble, or the folder changed while it was read; tried again)."""

    prefix: str
    name: str
    what: str
    ref: str | None = None
    reason: str | None = None


class DropWatcher:
    """Watches a drop prefix. Several at once do no harm: what they publish is the same by content."""

    def __init__(self, registry: Registry, source: Store, settings: DropSettings) -> None:
        """Raises InvalidRequest for a base or an alias that is none."""
        check_base_id(settings.base)
        if settings.promote:
            check_alias(settings.promote)
        self._registry = registry
        self._source = source
        self._settings = settings
        self._address = clean_address(settings.url)
        self._looker = Looker(source, default_name=_last_part(self._address), settle_s=settings.settle_s)
        self._done: dict[str, str] = {}
        self._told: dict[str, Outcome] = {}

    async def run(self) -> None:
        """Looks every `interval_s` until it is cancelled; trouble is logged and survived."""
        while True:
            try:
                await self.look()
            except LoraMuxError as error:
                log.warning("the drop prefix could not be looked at: %s", error)
            except Exception:
                log.exception("a look at the drop prefix failed")
            # spread, so that several gateways don't take the same folder at the same time
            await asyncio.sleep(self._settings.interval_s * random.uniform(0.9, 1.1))

    async def look(self) -> Sequence[Outcome]:
        """Looks once and takes what is ready, steps in ascending order; says what became of all folders that were not done
        before. Raises the stores' errors if nothing could be listed."""
        outcomes: list[Outcome] = []
        failed: set[str] = set()
        for candidate in await self._looker.look():
            if self._done.get(candidate.prefix) == candidate.state:
                continue
            outcome = await self._judge(candidate, waits=candidate.original in failed)
            if outcome.what == FAILED:
                failed.add(candidate.original)
            if outcome.what not in (FAILED, WAITING):
                self._done[candidate.prefix] = candidate.state
            self._tell(outcome)
            outcomes.append(outcome)
        return outcomes

    async def _judge(self, candidate: Candidate, *, waits: bool) -> Outcome:
        if not candidate.is_ready:
            return Outcome(candidate.prefix, candidate.name, WAITING, reason=candidate.reason)
        if waits:
            return Outcome(candidate.prefix, candidate.name, WAITING, reason=EARLIER_FAILED)
        try:
            before = await self._remembered(candidate)
            return before or await self._take(candidate)
        except (StoreError, VersionConflict, ModelNotFound) as error:
            return Outcome(candidate.prefix, candidate.name, FAILED, reason=error.reason or error.code)
        except LoraMuxError as error:
            return await self._refused(candidate, error)

    async def _take(self, candidate: Candidate) -> Outcome:
        adoption = Adoption(
            base=self._settings.base,
            name=candidate.name,
            prefix=candidate.prefix,
            step=candidate.step,
            original=candidate.original,
            address=self._address,
            promote_once=True,
            by=By(WHO),
        )
        published = await adopt(self._registry, self._source, adoption)
        reason = await self._promote(published, replace(adoption, promote=self._settings.promote))
        what = PUBLISHED if published.created else KNOWN
        outcome = Outcome(candidate.prefix, candidate.name, what, ref=str(published.ref), reason=reason)
        await self._remember(candidate, outcome)
        return outcome

    async def _promote(self, published: Published, adoption: Adoption) -> str | None:
        """Why the alias was not moved where it should have been: it is protected, or the version retired."""
        try:
            await promote_adopted(self._registry, published, adoption)
        except (StoreError, VersionConflict):
            raise
        except LoraMuxError as error:
            return error.reason or error.code
        return None

    async def _refused(self, candidate: Candidate, error: LoraMuxError) -> Outcome:
        outcome = Outcome(candidate.prefix, candidate.name, REFUSED, reason=error.reason or error.code)
        await self._remember(candidate, outcome, message=str(error))
        return outcome

    def _tell(self, outcome: Outcome) -> None:
        """News only."""
        if self._told.get(outcome.prefix) == outcome:
            return
        self._told[outcome.prefix] = outcome
        level = logging.INFO if outcome.what in (PUBLISHED, KNOWN, WAITING) else logging.WARNING
        details = [f"as {outcome.ref}"] * bool(outcome.ref) + [f"({outcome.reason})"] * bool(outcome.reason)
        log.log(level, "%s: %s", outcome.name, " ".join([outcome.what, *details]))

    # What the registry remembers

    def _key(self, candidate: Candidate) -> str:
        told = "\0".join((self._settings.base, self._address, candidate.prefix))
        return layout.adopted_key(hashlib.sha256(told.encode(errors="surrogatepass")).hexdigest()[:32])

    async def _remembered(self, candidate: Candidate) -> Outcome | None:
        """What became of this very content before, by whichever process."""
        note = await self._note(candidate)
        if note is None or note.get("state") != candidate.state:
            return None
        what = REFUSED if note.get("what") == REFUSED else KNOWN
        return Outcome(candidate.prefix, candidate.name, what, ref=note.get("ref"), reason=note.get("reason"))

    async def _note(self, candidate: Candidate) -> dict[str, Any] | None:
        try:
            found = await self._registry.store.get(self._key(candidate))
            return codec.decode_note(found.data, "adoption note")
        except StoreMissing:
            return None
        except StoreError as error:
            if error.reason == codec.CORRUPT:
                return None
            raise

    async def _remember(self, candidate: Candidate, outcome: Outcome, message: str | None = None) -> None:
        """A note that can't be written costs a download after the next restart, no more."""
        key, store = self._key(candidate), self._registry.store
        note = {
            "address": self._address,
            "prefix": candidate.prefix,
            "name": candidate.name,
            "state": candidate.state,
            "what": outcome.what,
            "ref": outcome.ref,
            "reason": outcome.reason,
            "message": message,
            "at": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        }
        data = codec.encode_note({name: value for name, value in note.items() if value is not None})
        try:
            try:
                await store.create(key, data)
            except StoreConflict:
                await store.replace(key, data, (await store.get(key)).etag)
        except StoreError as error:
            log.debug("what became of a folder could not be written down: %s", error)


def _last_part(address: str) -> str | None:
    return urlsplit(address).path.strip("/").rpartition("/")[2] or None
