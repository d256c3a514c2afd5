"""The seam between the door and the engines: a resolved request goes in, a reply comes out as a head and a stream of bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from adapters.names import AdapterRef
from adapters.types import ResolvedAdapter

Tier = Literal["engine", "disk", "remote", "base"]
Load = Literal["leader", "follower", "none"]
LowerTier = Literal["disk", "remote"]


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request whose every question is answered but "where". `body` is JSON with the ref (or the base) as its model.

    `route` is the OpenAI path (`/v1/chat/completions`), `wait_cold` says whether the caller waits for a cold adapter.
    """

    route: str
    base: str
    adapter: ResolvedAdapter | None
    body: bytes
    stream: bool
    request_id: str
    wait_cold: bool = True

    @property
    def ref(self) -> str | None:
        return str(self.adapter.ref) if self.adapter else None


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What is known when the first bytes are there. `timings_ms` holds the stages that the replica measured."""

    status: int
    content_type: str
    tier: Tier
    load: Load
    timings_ms: dict[str, float] = field(default_factory=dict)


class Reply(Protocol):
    """A running answer. Iterating `chunks` may raise any LoraMuxError; `aclose` frees the engine, also in mid-stream."""

    head: ReplyHead
    chunks: AsyncIterator[bytes]

    async def aclose(self) -> None:
        """Ends the answer and frees everything behind it; harmless when it has ended."""
        ...


@dataclass(frozen=True, slots=True)
class BaseInfo:
    """A served base as clients see it. `created` is a Unix time in seconds."""

    id: str
    created: int
    max_model_len: int | None = None


class Backend(Protocol):
    """Where requests go. Cancelling `dispatch` frees the engine at once."""

    def bases(self) -> dict[str, BaseInfo]:
        """The bases that are configured, by id."""
        ...

    async def dispatch(self, request: ResolvedRequest) -> Reply:
        """Returns when the first bytes of the answer are there.

        Raises any LoraMuxError: EngineUnavailable, Overloaded, AdapterLoading, the adapter's own errors, store errors.
        """
        ...

    async def is_ready(self) -> bool:
        """Whether every base has a replica that answers."""
        ...

    async def residency(self, audit: bool = False) -> dict[str, Any]:
        """By base: answers under way, refs in the engine with their users, and under `replicas` what each live one says of itself
        (gateway/README.md, Residency); `audit` asks the engines too. Raises EngineUnavailable if that can't be found out: no
        replica at all is an empty list."""
        ...

    async def evict(self, base: str, ref: AdapterRef, tier: LowerTier) -> list[dict[str, Any]]:
        """Lets every replica of the base give a version up, down to `tier`; one that is in use or pinned stays.

        A row for each live replica: `{"replica": id, "tier": where it is now, "reason": null | "in_use" | "pinned"}`.
        """
        ...

    async def metrics(self) -> bytes:
        """What all processes of this node measured, in Prometheus' text format. Raises EngineUnavailable."""
        ...
