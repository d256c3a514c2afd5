"""Tells the webhook of moves, behind the answers: a receiver that is slow or gone holds nobody up, and is logged."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from adapters.errors import LoraMuxError
from adapters.metrics import WEBHOOK_DELIVERIES, Meter
from adapters.registry import Registry
from adapters.settings import WebhookSettings
from adapters.types import Head
from adapters.webhook import notify

logger = logging.getLogger("loramux.gateway")

MAX_UNDER_WAY = 256
GOODBYE_S = 5.0


class Telling:
    """Deliveries under way; beyond MAX_UNDER_WAY of them new ones are dropped, which is logged and counted too."""

    def __init__(self, settings: WebhookSettings, registry: Registry, meter: Meter) -> None:
        self._settings = settings
        self._registry = registry
        self._meter = meter
        self._under_way: set[asyncio.Task[None]] = set()

    async def revision(self, base: str, name: str) -> int:
        """The adapter's revision before a change, where anybody is to be told; 0 for an unknown one."""
        if self._settings.url is None:
            return 0
        with contextlib.suppress(LoraMuxError):
            return (await self._registry.truth.head(base, name))[0].revision
        return 0

    def tell(self, head: Head, before_revision: int) -> None:
        """Begins to tell of the head's newest move; returns at once."""
        if self._settings.url is None:
            return
        if len(self._under_way) >= MAX_UNDER_WAY:
            self._failed(head, "too_many")
            return
        task = asyncio.ensure_future(self._deliver(head, before_revision))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def close(self) -> None:
        """Lets what is under way end, for a moment."""
        if self._under_way:
            _, late = await asyncio.wait(self._under_way, timeout=GOODBYE_S)
            for task in late:
                task.cancel()

    async def _deliver(self, head: Head, before_revision: int) -> None:
        delivery = await notify(self._settings, head, before_revision)
        if delivery is None:
            return
        if delivery.delivered:
            self._meter.count(WEBHOOK_DELIVERIES, result="delivered")
        else:
            self._failed(head, delivery.reason or "refused")

    def _failed(self, head: Head, reason: str) -> None:
        self._meter.count(WEBHOOK_DELIVERIES, result=reason)
        logger.warning("the webhook was not told of revision %d of %s:%s: %s", head.revision, head.base, head.name, reason)
