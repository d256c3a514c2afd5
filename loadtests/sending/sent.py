"""What a client saw of one planned request, and that nothing could be sent."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sent:
    """`sent_s` counts from the moment at which the schedule began, None for a request that was planned and never seen.

    `status` is 0 without an answer; `error` is what was said of a failure, also of one in mid-stream, where `status` is 200.
    `ttft_ms` runs from the request's bytes leaving to the first data event, `gaps_ms` between data events that bring tokens,
    `total_ms` to the end. `answered_by`, `tier`, `role` and `stages_ms` are what the server said of itself.
    """

    number: int
    sent_s: float | None = None
    status: int = 0
    error: str = ""
    ttft_ms: float | None = None
    total_ms: float | None = None
    gaps_ms: tuple[float, ...] = ()
    tokens: int = 0
    text: str = ""
    answered_by: str = ""
    tier: str = ""
    role: str = ""
    stages_ms: dict[str, float] = field(default_factory=dict)


class SenderFailed(Exception):
    """aiperf could not be had, or ended before its requests did; holds the last lines that were written."""
