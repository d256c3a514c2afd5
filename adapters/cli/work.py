"""How a command reaches the registry: settings, the store, whose name stands for whom, and errors as exit codes."""

from __future__ import annotations

import asyncio
import getpass
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import typer
from pydantic import ValidationError

from adapters.cli.output import fail
from adapters.errors import InvalidRequest, LoraMuxError, ModelNotFound
from adapters.names import LATEST, PRODUCTION, AdapterRef, ModelName, check_adapter_name, check_base_id, parse_model_name
from adapters.settings import CacheSettings, read_config, read_registry_settings
from adapters.types import By, Head

WHO_VARIABLE = "LORAMUX_USER"


def run(config: Path | None, work: Callable[[Any], Coroutine[Any, Any, Any]], as_json: bool = False) -> Any:
    """Opens the registry, runs the work, turns our errors into exit code 1."""
    from adapters.registry import Registry
    from adapters.store import open_store

    async def opened() -> Any:
        return await work(Registry(open_store(read_registry_settings(config))))

    try:
        return asyncio.run(opened())
    except LoraMuxError as error:
        fail(error, as_json)


def read_cache_settings(config: Path | None) -> CacheSettings:
    """Only the node cache's section. Raises InvalidRequest."""
    try:
        return CacheSettings.model_validate(read_config(config).get("cache") or {})
    except ValidationError as error:
        raise InvalidRequest(f"`cache`: {error.errors()[0]['msg']}", hint="correct the settings file") from None


def usage(make: Callable[[], Any]) -> Any:
    """What `make` makes of the command line; what it refuses is wrong usage, exit code 2."""
    try:
        return make()
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from None


def by(message: str | None = None, if_revision: int | None = None, unlock: bool = False) -> By:
    return By(who(), message, if_revision, unlock)


def who() -> str:
    """LORAMUX_USER, or the account's name."""
    try:
        return os.environ.get(WHO_VARIABLE) or getpass.getuser()
    except (OSError, KeyError):
        return "unknown"


async def find_name(registry: Any, name: str, base: str | None) -> ModelName:
    """`name` or `base:name`, perhaps with `@version` or `@alias`; the base may be left out where only one has such an adapter,
    or where only one is known. Raises InvalidRequest."""
    if ":" in name:
        return _of_base(parse_model_name(name), base)
    adapter = check_adapter_name(name.partition("@")[0])
    base = base or await _base_of(registry, adapter)
    return parse_model_name(f"{base}:{name}")


async def find_ref(registry: Any, text: str, base: str | None) -> AdapterRef:
    """The version that `name`, `name@7`, `name@canary` or `name@latest` means now. Raises InvalidRequest, ModelNotFound."""
    model = await find_name(registry, text, base)
    if model.version is not None:
        return AdapterRef(model.base, model.adapter or "", model.version)
    head = await registry.head(model.base, model.adapter)
    if model.alias != LATEST:
        return AdapterRef(model.base, head.name, named(head, model.alias or PRODUCTION))
    live = [version for version in await registry.versions(model.base, head.name) if version not in head.retired]
    if not live:
        raise ModelNotFound(f"every version of `{head.name}` is retired", hint="restore one")
    return AdapterRef(model.base, head.name, max(live))


def named(head: Head, alias: str) -> int:
    """The version that `alias` names. Raises ModelNotFound with the aliases that there are."""
    if alias not in head.aliases:
        there = ", ".join(f"`@{known}`" for known in sorted(head.aliases))
        raise ModelNotFound(
            f"`{head.base}:{head.name}` has no alias `{alias}`",
            param="alias",
            hint=f"it has {there}" if there else f"none of its versions was promoted yet: loramux promote {head.name} VERSION",
        )
    return head.aliases[alias]


async def read_view(registry: Any) -> Any:
    """The registry as it is now."""
    from adapters.registry.view import RegistryView

    view = RegistryView(registry, poll_interval_s=1)
    await view.refresh()
    return view


def _of_base(model: ModelName, base: str | None) -> ModelName:
    if model.adapter is None:
        raise InvalidRequest(f"`{model}` names no adapter", hint="write `base:name`")
    if base not in (None, model.base):
        raise InvalidRequest(f"`{model}` is an adapter of `{model.base}`, not of `{base}`", param="base")
    return model


async def find_base(registry: Any, base: str | None) -> str:
    """The base that was named, or the only one that is known. Raises InvalidRequest."""
    if base is not None:
        return check_base_id(base)
    known = await registry.bases()
    if len(known) == 1:
        return known[0]
    raise InvalidRequest(f"which base? {', '.join(sorted(known)) or 'none was served yet'}", param="base", hint="pass --base")


async def _base_of(registry: Any, adapter: str) -> str:
    known = await registry.bases()
    if len(known) == 1:
        return known[0]
    view = await read_view(registry)
    having = sorted({entry.base for entry in view.adapters() if entry.name == adapter})
    if len(having) == 1:
        return having[0]
    raise InvalidRequest(
        f"which base? {', '.join(having or sorted(known)) or 'none was served yet'}", param="base", hint="pass --base"
    )
