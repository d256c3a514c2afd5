"""One folder of a store becomes a version: downloaded, published, recorded where it came from."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from pydantic import ValidationError

from adapters.adoption.layouts import folders_of, shards_of
from adapters.contract import PublishOptions
from adapters.contract.adapter_folder import INDEX_FILE, MAX_INDEX_BYTES
from adapters.contract.refusals import refusal
from adapters.errors import InvalidRequest, ModelNotFound, StoreMissing, VersionConflict
from adapters.names import AdapterRef, check_adapter_name, check_alias, check_base_id
from adapters.publishing import Publication, publish_folder
from adapters.registry import Published, Registry
from adapters.settings import StoreSettings
from adapters.store import Listed, Store
from adapters.types import CONFIG_FILE, WEIGHTS_FILE, By, Head

READ_BYTES = 8 * 2**20
READS_AT_ONCE = 4
SMALL_BYTES = 2**20  # of other files: what is larger comes as an empty shape
MAX_FILES = 200
WARM_WITHIN_S = 300.0

_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")


@dataclass(frozen=True, slots=True)
class Adoption:
    """What to adopt and as what. `address` is what the manifest says about where it came from; credentials in it are removed.

    `options` are the publish contract's; `promote` is an alias that moves to the version afterwards. With `promote_once` it does
    not if it named that version before, or names a later step: for those who adopt by themselves, again and again.
    """

    base: str
    name: str
    prefix: str
    step: int | None = None
    original: str | None = None
    address: str | None = None
    promote: str | None = None
    promote_once: bool = False
    by: By = field(default_factory=By)
    options: PublishOptions = field(default_factory=PublishOptions)


async def adopt(
    registry: Registry, source: Store, adoption: Adoption, progress: Callable[[int, int], None] | None = None
) -> Published:
    """Publishes the folder under `adoption.prefix` as the next version, or finds the version that holds its content.

    Takes the folder as it is now; `find` says whether it is complete and settled. `progress` is told bytes sent and bytes in all.
    Raises ModelNotFound if no adapter lies there, VersionConflict if the folder changed meanwhile, AdapterRefused, InvalidRequest
    and the stores' errors.
    """
    check_base_id(adoption.base)
    check_adapter_name(adoption.name)
    if adoption.promote:
        check_alias(adoption.promote)
    prefix = f"{adoption.prefix.strip('/')}/" if adoption.prefix.strip("/") else ""
    files = await _files(source, prefix)
    _check_size(files, adoption.options.max_bytes)
    with tempfile.TemporaryDirectory(prefix="loramux-adopt-") as folder:
        await _download(source, files, Path(folder))
        if await _files(source, prefix) != files:
            raise _changed()
        published = await publish_folder(registry, _publication(adoption, prefix, Path(folder)), adoption.options, progress)
    await promote_adopted(registry, published, adoption)
    return published


async def promote_adopted(registry: Registry, published: Published, adoption: Adoption) -> None:
    """Moves the alias that the adoption asks for. Raises what `Registry.promote` raises.

    Those who adopt by themselves are gateways, so an alias that has users is left to them: it moves when the version is warm.
    """
    ref, alias = published.ref, adoption.promote
    if alias is None:
        return
    head = await registry.head(ref.base, ref.name)
    if adoption.promote_once and await _is_past(registry, head, ref, alias, adoption.step):
        return
    where = (ref.base, ref.name, alias, ref.version, adoption.by)
    if adoption.promote_once and alias in head.aliases:
        await registry.begin_move(*where, min_ready=None, timeout_s=WARM_WITHIN_S)
    else:
        await registry.promote(*where)


def source_settings(url: str, registry: StoreSettings) -> StoreSettings:
    """How to reach the folder `url`; where it says nothing else, with the registry's endpoint and credentials.

    Raises InvalidRequest for an address that is none.
    """
    address = urlsplit(url)
    if address.scheme not in ("s3", "file", "memory") or "@" in address.netloc or address.query or address.fragment:
        raise InvalidRequest("a source is `s3://bucket/prefix` or `file:///dir`, without credentials in it", param="source")
    try:
        values = {name: getattr(registry, name) for name in StoreSettings.model_fields}
        return StoreSettings.model_validate({**values, "url": url.rstrip("/") if address.path.strip("/") else url})
    except ValidationError as error:
        raise InvalidRequest(f"the source's address makes no sense: {error.errors()[0]['msg']}", param="source") from None


def clean_address(address: str) -> str:
    """The address without user, password, query and fragment."""
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))


def _publication(adoption: Adoption, prefix: str, folder: Path) -> Publication:
    told = {
        "kind": "adopted",
        "address": clean_address(adoption.address) if adoption.address else None,
        "prefix": prefix.rstrip("/") or None,
        "original": adoption.original if adoption.original != adoption.name else None,
        "step": adoption.step,
    }
    return Publication(
        base=adoption.base,
        name=adoption.name,
        folder=folder,
        message=adoption.by.message,
        who=adoption.by.who,
        source={key: value for key, value in told.items() if value is not None},
    )


async def _is_past(registry: Registry, head: Head, ref: AdapterRef, alias: str, step: int | None) -> bool:
    """Whether the alias left this version behind: it named it once, or names one of a later step, or waits for one."""
    if any(row.alias == alias and row.to_version == ref.version for row in head.history):
        return True
    waiting = head.pending.get(alias)
    meant = {head.aliases.get(alias), waiting.version if waiting else None} - {None}
    steps = [(await registry.manifest(AdapterRef(ref.base, ref.name, version))).source.get("step") for version in meant]
    return step is not None and any(isinstance(later, int) and later > step for later in steps)


# Downloading


async def _files(source: Store, prefix: str) -> tuple[Listed, ...]:
    """The rows directly in the folder. Raises ModelNotFound."""
    rows = [row async for row in source.list(prefix)]
    found = next((folder.files for folder in folders_of(rows, prefix) if folder.prefix == prefix), None)
    if found is None:
        raise ModelNotFound("no adapter lies there", param="source", hint=f"`{CONFIG_FILE}` and `{WEIGHTS_FILE}` are looked for")
    return found


def _name(row: Listed) -> str:
    return row.key.rpartition("/")[2]


def _weights(files: tuple[Listed, ...]) -> set[str]:
    names = {_name(row) for row in files}
    return {WEIGHTS_FILE} & names or set(shards_of(names))


def _check_size(files: tuple[Listed, ...], max_bytes: int) -> None:
    """Before the download what the contract says after it."""
    weights = _weights(files)
    size = sum(row.size_bytes for row in files if _name(row) in weights)
    if size > max_bytes:
        raise refusal("too_large", f"the weights have {size} bytes; at most {max_bytes} are taken", limit=max_bytes, value=size)


async def _download(source: Store, files: tuple[Listed, ...], folder: Path) -> None:
    """The adapter's files whole. Of others the beginning: the contract looks at their names, and at headers of safetensors."""
    weights = _weights(files)
    small = [row for row in files if _name(row) not in weights and _SAFE_NAME.fullmatch(_name(row))][:MAX_FILES]
    for row in (*(row for row in files if _name(row) in weights), *small):
        path = folder / _name(row)
        most = row.size_bytes if _name(row) in weights else MAX_INDEX_BYTES if _name(row) == INDEX_FILE else SMALL_BYTES
        await asyncio.to_thread(_make, path, row.size_bytes)
        if row.size_bytes <= most or path.suffix == ".safetensors":
            await _fill(source, row, path, min(most, row.size_bytes))


async def _fill(source: Store, row: Listed, path: Path, size_bytes: int) -> None:
    gate = asyncio.Semaphore(READS_AT_ONCE)

    async def part(start: int) -> None:
        length = min(READ_BYTES, size_bytes - start)
        async with gate:
            data = await source.get_range(row.key, start, length)
            if len(data) != length:
                raise _changed()
            await asyncio.to_thread(_write_at, path, data, start)

    try:
        await asyncio.gather(*(part(start) for start in range(0, size_bytes, READ_BYTES)))
    except StoreMissing:
        raise _changed() from None


def _make(path: Path, size_bytes: int) -> None:
    with path.open("wb") as file:
        file.truncate(size_bytes)


def _write_at(path: Path, data: bytes, start: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def _changed() -> VersionConflict:
    return VersionConflict("the folder changed while it was read", reason="source_changed", retry_after_s=10)
