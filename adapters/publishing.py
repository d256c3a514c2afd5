"""Publishing as one call: validate a folder, upload it, move an alias. The CLI, the demo and a trainer all come through here."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.contract import PublishOptions, prepare
from adapters.errors import AdapterRefused, ModelNotFound
from adapters.names import check_adapter_name, check_alias, check_base_id
from adapters.registry import Published, Registry
from adapters.types import BaseContract, By, PreparedAdapter


@dataclass(frozen=True, slots=True)
class Publication:
    """What to publish, and what to say about it. `folder` may also be an archive: `.tar`, `.tar.gz`, `.tgz` or `.zip`."""

    base: str
    name: str
    folder: Path
    promote: str | None = None
    message: str | None = None
    who: str | None = None
    source: dict[str, Any] | None = None
    metrics: dict[str, float] | None = None
    unlock: bool = False


async def publish_folder(
    registry: Registry,
    publication: Publication,
    options: PublishOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Published:
    """Publishes a folder as the next version, or finds the version that already holds this content; then moves the alias.

    `progress` is told bytes sent and bytes in all. Raises InvalidRequest, AdapterRefused and store errors; a refused folder
    leaves nothing in the store.
    """
    check_base_id(publication.base)
    check_adapter_name(publication.name)
    if publication.promote:
        check_alias(publication.promote)
    by = By(publication.who, publication.message, unlock=publication.unlock)
    contract = await base_contract(registry, publication.base)
    with tempfile.TemporaryDirectory(prefix="loramux-publish-") as workdir:
        work = (publication, contract, options or PublishOptions(), Path(workdir))
        try:
            prepared = await asyncio.to_thread(_prepare, *work)
        except AdapterRefused as refused:
            if refused.reason != "shape_mismatch":
                raise
            # Only now it is worth asking for the other bases: the refusal names one that would fit.
            prepared = await asyncio.to_thread(_prepare, *work, await other_contracts(registry, publication.base))
        published = await registry.publish(
            publication.base,
            publication.name,
            prepared,
            by,
            source=publication.source,
            metrics=publication.metrics,
            progress=progress,
        )
    if publication.promote:
        ref = published.ref
        await registry.promote(ref.base, ref.name, publication.promote, ref.version, by)
    return published


def _prepare(
    publication: Publication,
    contract: BaseContract | None,
    options: PublishOptions,
    workdir: Path,
    others: tuple[BaseContract, ...] = (),
) -> PreparedAdapter:
    return prepare(publication.folder, contract, options, base=publication.base, workdir=workdir, others=others)


async def other_contracts(registry: Registry, base: str) -> tuple[BaseContract, ...]:
    """The contracts of all bases but `base`."""
    found = [await base_contract(registry, other) for other in await registry.bases() if other != base]
    return tuple(contract for contract in found if contract is not None)


async def base_contract(registry: Registry, base: str) -> BaseContract | None:
    """The base's contract as its replica wrote it; None when it was never served, and only the structure can be checked."""
    try:
        return await registry.base(base)
    except ModelNotFound:
        return None
