"""What came back beside what was planned: records, and whether a text is the adapter's own sentence. Values only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loadtests.records import Event, Record, Tier

if TYPE_CHECKING:
    from loadtests.material import Adapter
    from loadtests.sending import Sent
    from loadtests.workload import Planned

# A change that is made has to be seen by every process within this time (DESIGN, aims); old answers count as wrong from then on.
SEEN_WITHIN_S = 1.5


@dataclass(frozen=True, slots=True)
class Mark:
    """What all lines of one phase on one server have in common."""

    peer: str
    round: int
    phase: str

    def event(self, at_s: float, kind: str, adapter: str | None = None, took_s: float | None = None, **details: Any) -> Event:
        return Event(self.peer, self.round, self.phase, round(at_s, 4), kind, adapter, took_s and round(took_s, 4), details)


@dataclass(frozen=True, slots=True)
class Turn:
    """An alias that moved to other content: asked for at `began_s`, done at `done_s`, None where it failed."""

    began_s: float
    done_s: float | None
    sentence: str | None


@dataclass(frozen=True, slots=True)
class Saying:
    """A sentence that an adapter may answer with from `from_s` to `until_s` of the phase."""

    sentence: str | None
    from_s: float
    until_s: float


def sayings(first: str | None, turns: Iterable[Turn]) -> tuple[Saying, ...]:
    """What may be heard from an adapter that said `first` when the phase began, and when. A turn that failed may have been made
    all the same: both are allowed after it."""
    said = [Saying(first, -math.inf, math.inf)]
    for turn in sorted(turns, key=lambda turn: turn.began_s):
        if turn.done_s is not None:
            until_s = turn.done_s + SEEN_WITHIN_S
            said = [Saying(one.sentence, one.from_s, min(one.until_s, until_s)) for one in said]
        said.append(Saying(turn.sentence, turn.began_s, math.inf))
    return tuple(said)


def is_right(planned: Planned, sent: Sent, may_say: Sequence[Saying]) -> bool | None:
    """Whether the text is what the adapter may have said while the request ran; None where nobody knows."""
    if sent.sent_s is None or sent.status != 200 or sent.error:
        return None
    ended_s = sent.sent_s + (sent.total_ms or 0) / 1e3
    allowed = {saying.sentence for saying in may_say if saying.from_s <= ended_s and sent.sent_s <= saying.until_s}
    if not allowed or None in allowed:
        return None
    text = sent.text.strip()
    if sent.tokens >= planned.max_tokens:  # cut off by its limit
        return bool(text) and any(sentence.startswith(text) for sentence in allowed if sentence)
    return text in allowed


def record_of(
    mark: Mark, planned: Planned, sent: Sent, adapter: Adapter | None, put: Tier | None, may_say: Sequence[Saying]
) -> Record:
    """`may_say` is empty where the answer tells nothing of who gave it."""
    return Record(
        peer=mark.peer,
        round=mark.round,
        phase=mark.phase,
        load=planned.load,
        number=planned.number,
        adapter=adapter.name if adapter else None,
        pool=planned.pool,
        rank=adapter.rank if adapter else None,
        size_bytes=adapter.size_bytes if adapter else None,
        put=put,
        planned_s=planned.at_s,
        sent_s=sent.sent_s,
        status=sent.status,
        error=sent.error,
        ttft_ms=sent.ttft_ms,
        total_ms=sent.total_ms,
        gaps_ms=tuple(sent.gaps_ms),
        tokens=sent.tokens,
        text=sent.text,
        right=is_right(planned, sent, may_say),
        answered_by=sent.answered_by,
        tier=sent.tier,
        role=sent.role,
        stages_ms=dict(sent.stages_ms),
    )
