"""How a command reaches the registry: settings, the store, whose name stands for whom, and errors as exit codes."""

from __future__ import annotations

import asyncio
import getpass
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from adapters.cli.output import fail
from adapters.errors import InvalidRequest, LoraMuxError
from adapters.names import PRODUCTION, ModelName, check_adapter_name, parse_model_name
from adapters.settings import read_registry_settings


def run(config: Path | None, work: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    """Opens the registry, runs the work, turns our errors into an exit code."""
    from adapters.registry import Registry
    from adapters.store import open_store

    async def opened() -> Any:
        return await work(Registry(open_store(read_registry_settings(config))))

    try:
        return asyncio.run(opened())
    except LoraMuxError as error:
        fail(error)


async def find_name(registry: Any, name: str, base: str | None) -> ModelName:
    """`name` or `base:name`; the base may be left out when the registry knows exactly one."""
    if ":" in name:
        return parse_model_name(name)
    check_adapter_name(name)
    if base is None:
        known = await registry.bases()
        if len(known) != 1:
            raise InvalidRequest(f"which base? {', '.join(sorted(known)) or 'none was served yet'}", hint="pass --base")
        base = known[0]
    return ModelName(base, name, alias=PRODUCTION)


async def read_view(registry: Any) -> Any:
    """The registry as it is now."""
    from adapters.registry.view import RegistryView

    view = RegistryView(registry, poll_interval_s=1)
    await view.refresh()
    return view


def who() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"
