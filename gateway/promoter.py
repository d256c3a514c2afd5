"""Ends pending moves: looks where their versions are warm, then moves the alias or says why not.

Every gateway has a promoter and any of them may end any move: the registry lets it end once. The one that took a move comes
first, the others stand back for a moment, in case it died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Mapping
from typing import Any

from adapters.errors import DeadlineExceeded, LoraMuxError, StoreError, VersionConflict
from adapters.registry import Registry
from adapters.registry.layout import AdapterName
from adapters.registry.moments import unix_s
from adapters.registry.promotion import Fail, Move, Wait, check_moved, decide
from adapters.registry.standing import standing
from adapters.registry.view import RegistryView
from adapters.types import AdapterEntry, Head, PendingMove
from gateway.backend import Backend
from gateway.telling import Telling

logger = logging.getLogger("loramux.gateway")

LOOK_EVERY_S = 0.5
TAKEN_WITHIN_S = 5.0  # a move of a base that no gateway serves waits for nobody
STAND_BACK_S = 2.0
OVERDUE_S = 10.0
ASKED_WITHIN_S = 5.0
MOVES_AT_ONCE = 16
WAIT_STEP_S = 0.05

Residency = Mapping[str, Mapping[str, Any]]


class Promoter:
    """`run` looks for ever at the moves that `notice` was told of; `wake` makes it look now; `ended` waits for one move."""

    def __init__(
        self,
        registry: Registry,
        view: RegistryView,
        backend: Backend,
        telling: Telling,
        *,
        look_every_s: float = LOOK_EVERY_S,
        taken_within_s: float = TAKEN_WITHIN_S,
        stand_back_s: float = STAND_BACK_S,
    ) -> None:
        self.id = f"gateway-{uuid.uuid4().hex[:12]}"
        self._registry = registry
        self._view = view
        self._backend = backend
        self._telling = telling
        self._look_every_s = look_every_s
        self._taken_within_s = taken_within_s
        self._stand_back_s = stand_back_s
        self._woken = asyncio.Event()
        self._seen_at: dict[str, float] = {}
        self._ripe_at: dict[str, float] = {}
        self._moving: dict[AdapterName, AdapterEntry] = {}

    async def run(self) -> None:
        """Until it is cancelled. Trouble of any kind is logged and survived: a move that could not end now ends later."""
        while True:
            try:
                await self.look()
            except Exception:
                logger.exception("a look at pending moves failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_every_s):
                    await self._woken.wait()
            self._woken.clear()

    def notice(self, entry: AdapterEntry) -> None:
        """Takes note of a row that is new in the view."""
        adapter = AdapterName(entry.base, entry.name)
        if entry.pending:
            self._moving[adapter] = entry
            self.wake()
        else:
            self._moving.pop(adapter, None)

    def wake(self) -> None:
        self._woken.set()

    async def look(self) -> None:
        """Does what can be done now about every pending move that this gateway's picture shows."""
        moves = [(entry, move) for entry in self._moving.values() for move in entry.pending.values()]
        self._remember({move.id for _, move in moves})
        if not moves:
            return
        residency, gate = await self._residency(), asyncio.Semaphore(MOVES_AT_ONCE)

        async def attend(entry: AdapterEntry, move: PendingMove) -> None:
            async with gate:
                await self._attend(entry, move, residency)

        await asyncio.gather(*(attend(entry, move) for entry, move in moves))

    async def ended(self, head: Head, move: PendingMove) -> Head:
        """The head after the move that `head` has pending has ended, seen by this gateway. Makes it look at once.

        Raises VersionConflict with reason `promote_failed` if the alias stayed, DeadlineExceeded if nobody could end the move.
        """
        await self._view.wait_seen(head.base, head.name, head.revision)
        self.wake()
        while self._is_pending(head, move):
            if time.time() > unix_s(move.deadline) + OVERDUE_S:
                raise DeadlineExceeded(
                    f"the move of `{move.alias}` is still pending, long after its deadline", value=move.version
                )
            await asyncio.sleep(WAIT_STEP_S)
        now, _ = await self._registry.truth.head(head.base, head.name)
        check_moved(now, move)
        return now

    def _is_pending(self, head: Head, move: PendingMove) -> bool:
        entry = self._view.entry(head.base, head.name)
        if entry is None or entry.revision < head.revision:
            return True
        now = entry.pending.get(move.alias)
        return now is not None and now.id == move.id

    # What is there

    def _remember(self, ids: set[str]) -> None:
        now = time.monotonic()
        self._seen_at = {move_id: self._seen_at.get(move_id, now) for move_id in ids}
        self._ripe_at = {move_id: at for move_id, at in self._ripe_at.items() if move_id in ids}

    async def _residency(self) -> Residency | None:
        """None while replicas can't be asked, which is not the same as having none."""
        try:
            async with asyncio.timeout(ASKED_WITHIN_S):
                return await self._backend.residency()
        except (LoraMuxError, TimeoutError) as error:
            logger.warning("pending moves wait: the replicas can't be asked: %s", error or "no answer in time")
            return None

    # What to do

    async def _attend(self, entry: AdapterEntry, move: PendingMove, residency: Residency | None) -> None:
        try:
            head = await self._act(entry, move, self._verdict(entry, move, residency))
            if head is not None:
                await self._view.wait_seen(head.base, head.name, head.revision)
        except VersionConflict:  # somebody else ended it, or too many write: the next look tells
            with contextlib.suppress(LoraMuxError):
                await self._view.refresh()
        except LoraMuxError as error:
            logger.warning("the move of `%s` of %s:%s waits: %s", move.alias, entry.base, entry.name, error)

    def _verdict(self, entry: AdapterEntry, move: PendingMove, residency: Residency | None) -> Wait | Move | Fail:
        now_s = time.time()
        served = entry.base in self._backend.bases()
        if not served and move.taken_by is None and time.monotonic() - self._seen_at[move.id] >= self._taken_within_s:
            return Move(f"no gateway that serves `{entry.base}` took the move within {self._taken_within_s:g} s")
        if not served or residency is None:
            return Fail("no replica could be asked in time") if now_s >= unix_s(move.deadline) else Wait(0, 1)
        found = standing(residency.get(entry.base, {}).get("replicas", ()), entry, move)
        verdict = decide(move, found.ready, found.holders_of_old, found.live, found.failure, now_s)
        if isinstance(verdict, Move) and found.silent and now_s < unix_s(move.deadline):
            return Wait(found.ready, found.live)  # a silent one may hold the version before, and would be cold
        return verdict

    async def _act(self, entry: AdapterEntry, move: PendingMove, verdict: Wait | Move | Fail) -> Head | None:
        where = (entry.base, entry.name, move.alias, move.id)
        if isinstance(verdict, Wait):
            takes = move.taken_by is None and entry.base in self._backend.bases()
            return await self._registry.take_move(*where, self.id) if takes else None
        if not self._may_end(move):
            return None
        head = await self._end(where, verdict)
        self._telling.tell(head, entry.revision)
        return head

    async def _end(self, where: tuple[str, str, str, str], verdict: Move | Fail) -> Head:
        if isinstance(verdict, Fail):
            return await self._registry.fail_move(*where, verdict.reason)
        try:
            return await self._registry.finish_move(*where, note=verdict.note)
        except (StoreError, VersionConflict):
            raise
        except LoraMuxError as error:  # the version went meanwhile, say: nothing that waiting would mend
            return await self._registry.fail_move(*where, str(error))

    def _may_end(self, move: PendingMove) -> bool:
        if move.taken_by in (None, self.id):
            return True
        now = time.monotonic()
        return now - self._ripe_at.setdefault(move.id, now) >= self._stand_back_s
