"""The first answers of a server: they pay for what is compiled at first use, and nobody counts them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from loadtests.client import client, closed_loop

ALONE, AT_ONCE = 4, 8


def warm_up(url: str, models: Sequence[str]) -> None:
    """Some answers of each model, one at a time, then some at once, for batches are compiled too."""
    asyncio.run(_ask(url, models))


async def _ask(url: str, models: Sequence[str]) -> None:
    async with client() as http:
        await closed_loop(http, url, list(models) * ALONE, clients=1)
        await closed_loop(http, url, list(models) * ALONE, clients=AT_ONCE)
