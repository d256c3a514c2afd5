"""After a move: the webhook is told, and trouble with it is a warning, never a failure."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from adapters.cli.output import warn
from adapters.cli.work import run
from adapters.errors import LoraMuxError
from adapters.types import Head

Change = Callable[[Any], Coroutine[Any, Any, tuple[Head, Head]]]


def changing(config: Path | None, change: Change, as_json: bool = False) -> tuple[Head, Head]:
    """Runs a change that gives the head before and after, and tells the webhook of it."""

    async def work(registry: Any) -> tuple[Head, Head]:
        before, head = await change(registry)
        await tell(config, before, head)
        return before, head

    return run(config, work, as_json)


async def tell(config: Path | None, before: Head, head: Head) -> None:
    """Tells of the newest row of the history, if it came since; a tag, say, makes a new revision but no row."""
    if head.history[-1:] == before.history[-1:]:
        return
    from adapters.settings import read_webhook_settings
    from adapters.webhook import notify

    try:
        delivery = await notify(read_webhook_settings(config), head, before.revision)
    except LoraMuxError as error:
        warn(f"the webhook was not told: {error}")
        return
    if delivery is not None and not delivery.delivered:
        status = f", status {delivery.status}" if delivery.status else ""
        warn(f"the webhook was not told ({delivery.reason}{status}) after {delivery.attempts} attempts; the move stands")
