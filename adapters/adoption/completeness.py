"""Whether a folder in a store holds a whole adapter, from a listing, the small files and the headers of the weights."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from adapters.adoption.layouts import Folder, are_all_there, shards_of
from adapters.contract.adapter_folder import INDEX_FILE, MAX_CONFIG_BYTES, MAX_INDEX_BYTES
from adapters.contract.safetensors_file import MAX_HEADER_BYTES
from adapters.store import Listed, Store
from adapters.types import CONFIG_FILE, WEIGHTS_FILE

FIRST_READ_BYTES = 64 * 1024
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


async def missing_part(source: Store, folder: Folder) -> str | None:
    """Why the folder is no whole adapter yet, or None: `no_config`, `no_weights`, `missing_shards`, `config_cut_off`,
    `weights_cut_off`, `not_downloaded`. What is whole but wrong is the publish contract's business. Raises the store's errors."""
    names = folder.names
    if CONFIG_FILE not in names:
        return "no_config"
    shards = shards_of(names)
    if WEIGHTS_FILE not in names and not shards:
        return "missing_shards" if INDEX_FILE in names else "no_weights"
    if WEIGHTS_FILE not in names and not await _all_shards(source, names, shards):
        return "missing_shards"
    if await _object(source, names[CONFIG_FILE], MAX_CONFIG_BYTES) is None:
        return "config_cut_off"
    for name in [WEIGHTS_FILE] if WEIGHTS_FILE in names else shards:
        if (reason := await _weights_fault(source, names[name])) is not None:
            return reason
    return None


async def _all_shards(source: Store, names: Mapping[str, Listed], shards: Collection[str]) -> bool:
    if not are_all_there(shards):
        return False
    if INDEX_FILE not in names:
        return True
    index = await _object(source, names[INDEX_FILE], MAX_INDEX_BYTES)
    named = index.get("weight_map", {}) if index is not None else None
    if not isinstance(named, dict):
        return False
    # trainers rename the shards and leave the model's names in the index
    return {_plain(str(name)) for name in named.values()} <= {_plain(name) for name in shards}


def _plain(shard: str) -> str:
    return shard.removeprefix("adapter_")


async def _object(source: Store, row: Listed, max_bytes: int) -> dict[str, Any] | None:
    """The JSON object in a small file, empty for one that is too large to be looked at; None if it breaks off."""
    if row.size_bytes > max_bytes:
        return {}
    return _parsed((await source.get(row.key)).data)


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


async def _weights_fault(source: Store, row: Listed) -> str | None:
    """What the header says about the file's size, without its data."""
    start = bytes(await source.get_range(row.key, 0, min(FIRST_READ_BYTES, row.size_bytes)))
    if start.startswith(_LFS_POINTER):
        return "not_downloaded"
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or length > min(MAX_HEADER_BYTES, row.size_bytes - 8):
        return "weights_cut_off"
    if 8 + length > len(start):
        start += await source.get_range(row.key, len(start), 8 + length - len(start))
    header = _parsed(start[8 : 8 + length])
    if header is None or 8 + length + _data_bytes(header) != row.size_bytes:
        return "weights_cut_off"
    return None


def _data_bytes(header: Mapping[str, Any]) -> int:
    """Where the last tensor ends; -1 if that is not said."""
    try:
        return max((int(row["data_offsets"][1]) for name, row in header.items() if name != "__metadata__"), default=0)
    except (TypeError, KeyError, IndexError, ValueError):
        return -1
