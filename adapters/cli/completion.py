"""What the shell offers at the tab key: names out of the registry, within a second or not at all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from adapters.errors import LoraMuxError
from adapters.names import LATEST, PRODUCTION
from adapters.types import AdapterEntry

LIMIT_S = 1.0
MOST = 200

Candidates = Callable[[list[AdapterEntry]], Iterable[str]]


def complete_adapter(incomplete: str) -> list[str]:
    return _offered(incomplete, lambda entries: names(entries, ":" in incomplete))


def complete_ref(incomplete: str) -> list[str]:
    """Names first; behind an `@`, what may stand there."""
    name, at, _ = incomplete.partition("@")
    if not at:
        return complete_adapter(incomplete)
    return _offered(incomplete, lambda entries: refs(entries, name))


def complete_alias(incomplete: str) -> list[str]:
    return _offered(incomplete, lambda entries: {PRODUCTION, "canary"} | {alias for entry in entries for alias in entry.aliases})


def complete_base(incomplete: str) -> list[str]:
    return _offered(incomplete, lambda entries: {entry.base for entry in entries})


def names(entries: Iterable[AdapterEntry], with_base: bool) -> set[str]:
    return {f"{entry.base}:{entry.name}" if with_base else entry.name for entry in entries}


def refs(entries: Iterable[AdapterEntry], name: str) -> set[str]:
    """`name@7`, `name@canary`, ... for the adapters that `name` (`base:name` too) means."""
    meant = [entry for entry in entries if name in (entry.name, f"{entry.base}:{entry.name}")]
    selectors = {selector for entry in meant for selector in (*entry.aliases, LATEST, *map(str, entry.versions))}
    return {f"{name}@{selector}" for selector in selectors}


def _offered(incomplete: str, candidates: Candidates) -> list[str]:
    """Trouble offers nothing: a message in the middle of somebody's command line helps nobody."""
    with contextlib.suppress(LoraMuxError, OSError, TimeoutError, ValueError):
        entries = asyncio.run(asyncio.wait_for(_entries(), LIMIT_S))
        return [found for found in sorted(candidates(entries)) if found.startswith(incomplete)][:MOST]
    return []


async def _entries() -> list[AdapterEntry]:
    from adapters.cli.work import read_view
    from adapters.registry import Registry
    from adapters.settings import read_registry_settings
    from adapters.store import open_store

    settings = read_registry_settings().model_copy(update={"connect_timeout_s": LIMIT_S, "retry_timeout_s": 0.0})
    return list((await read_view(Registry(open_store(settings)))).adapters())
