"""Where things lie in the store: every key is built and read here, and nowhere else.

blobs/<digest>/adapter_model.safetensors, adapter_config.json
adapters/<base-key>/<name>/versions/<n>/manifest.json
adapters/<base-key>/<name>/head.json
bases/<base-key>.json
index/<shard>.json
adopted/<id>.json
registry.json
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from adapters.errors import InvalidRequest
from adapters.names import AdapterRef, base_key, base_of_key

BLOBS = "blobs/"
ADAPTERS = "adapters/"
BASES = "bases/"
INDEX = "index/"
ADOPTED = "adopted/"
MARKER = "registry.json"
PROBES = "doctor/"  # what a store is asked with; left behind where nobody may delete
NUM_SHARDS = 256

MAX_KEY_BYTES = 900  # S3 takes 1,024 with the prefix

_MANIFEST = re.compile(r"adapters/([^/]+)/(.+)/versions/([1-9][0-9]{0,8})/manifest\.json")
_HEAD = re.compile(r"adapters/([^/]+)/(.+)/head\.json")
_VERSION = re.compile(r"([1-9][0-9]{0,8})/manifest\.json")
_BASE = re.compile(r"bases/([^/]+)\.json")
_SHARD = re.compile(r"index/([0-9]{3})\.json")


class AdapterName(NamedTuple):
    """An adapter without a version."""

    base: str
    name: str

    def __str__(self) -> str:
        return f"{self.base}:{self.name}"


def check_key(key: str) -> str:
    """Returns `key` if it is a relative path that stays inside the store. Raises InvalidRequest."""
    parts = key.split("/")
    if not key or any(part in ("", ".", "..") for part in parts) or "\x00" in key or "\\" in key:
        raise InvalidRequest("a key is a relative path without empty, `.` or `..` segments")
    if len(key.encode()) > MAX_KEY_BYTES:
        raise InvalidRequest(f"a key has at most {MAX_KEY_BYTES} bytes", limit=MAX_KEY_BYTES, value=len(key.encode()))
    return key


def blob_folder(digest: str) -> str:
    return f"{BLOBS}{digest}/"


def blob_key(digest: str, file_name: str) -> str:
    return f"{BLOBS}{digest}/{file_name}"


def adapter_folder(base: str, name: str) -> str:
    return f"{ADAPTERS}{base_key(base)}/{name}/"


def versions_folder(base: str, name: str) -> str:
    return f"{adapter_folder(base, name)}versions/"


def manifest_key(ref: AdapterRef) -> str:
    return f"{versions_folder(ref.base, ref.name)}{ref.version}/manifest.json"


def head_key(base: str, name: str) -> str:
    return f"{adapter_folder(base, name)}head.json"


def contract_key(base: str) -> str:
    return f"{BASES}{base_key(base)}.json"


def adopted_key(folder_id: str) -> str:
    """Where it stands what became of a folder that was adopted or refused."""
    return f"{ADOPTED}{folder_id}.json"


def shard_key(shard: int) -> str:
    return f"{INDEX}{shard:03d}.json"


def shard_of(base: str, name: str) -> int:
    """The index shard of an adapter: the same in every process and release."""
    return hashlib.sha256(f"{base}:{name}".encode()).digest()[0] % NUM_SHARDS


def version_of_key(base: str, name: str, key: str) -> int | None:
    """The version whose manifest `key` is, or None. Strict, since an adapter `team/versions` lies under `team/`."""
    match = _VERSION.fullmatch(key.removeprefix(versions_folder(base, name)))
    return int(match[1]) if match else None


def ref_of_key(key: str) -> AdapterRef | None:
    """The ref whose manifest `key` is, or None."""
    match = _MANIFEST.fullmatch(key)
    return AdapterRef(base_of_key(match[1]), match[2], int(match[3])) if match else None


def adapter_of_head_key(key: str) -> AdapterName | None:
    """The adapter whose head `key` is, or None."""
    match = _HEAD.fullmatch(key)
    return AdapterName(base_of_key(match[1]), match[2]) if match else None


def base_of_contract_key(key: str) -> str | None:
    match = _BASE.fullmatch(key)
    return base_of_key(match[1]) if match else None


def shard_of_key(key: str) -> int | None:
    match = _SHARD.fullmatch(key)
    return int(match[1]) if match else None


def is_ours(key: str) -> bool:
    """Whether a release of ours writes such a key, files of versions aside."""
    if key == MARKER or key.startswith((INDEX, ADOPTED, PROBES)):
        return True
    return any(found is not None for found in (ref_of_key(key), adapter_of_head_key(key), base_of_contract_key(key)))
