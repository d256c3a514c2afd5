"""The registry's JSON, both ways. Every document carries `schema_version`; unknown keys are let pass, newer schemas refused.

A document of an older schema is upgraded when it is read and stays as it is in the store; what is written has the newest. A new
field with a default needs no new schema; a change that an older release would misread does, with a function in `UPGRADES`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from adapters.errors import AdapterCorrupt, StoreError
from adapters.types import AdapterEntry, BaseContract, Head, Manifest

SCHEMA_VERSION = 1
CORRUPT = "metadata_corrupt"
TOO_NEW = "schema_too_new"

Document = dict[str, Any]

# by kind of document and version: what makes the next version of it; kinds that did not change are left out
UPGRADES: dict[tuple[str, int], Callable[[Document], Document]] = {}


def encode_manifest(manifest: Manifest, *, change_id: str = "") -> bytes:
    """`change_id` marks the writer, so that one whose answer was lost knows its own document."""
    return _encode({**_plain(Manifest, manifest), "change_id": change_id})


def decode_manifest(data: bytes) -> Manifest:
    """Raises AdapterCorrupt for garbage, StoreError for a newer schema."""
    try:
        return _decode(Manifest, _document(data, "manifest"), "manifest")
    except StoreError as error:
        if error.reason != CORRUPT:
            raise
        raise AdapterCorrupt(error.message, reason=CORRUPT) from error


def encode_head(head: Head) -> bytes:
    document = _plain(Head, head)
    return _encode({**document.pop("extra"), **document, "retired": sorted(head.retired), "protected": sorted(head.protected)})


def decode_head(data: bytes) -> Head:
    """Raises StoreError for garbage and for a newer schema."""
    document = _document(data, "head")
    known = {field.name for field in fields(Head)} - {"extra"}
    extra = {key: value for key, value in document.items() if key not in known}
    return _decode(Head, {**{key: document[key] for key in known & document.keys()}, "extra": extra}, "head")


def encode_contract(contract: BaseContract) -> bytes:
    return _encode(_plain(BaseContract, contract))


def decode_contract(data: bytes) -> BaseContract:
    """Raises StoreError for garbage and for a newer schema."""
    return _decode(BaseContract, _document(data, "base contract"), "base contract")


def encode_entries(entries: Iterable[AdapterEntry]) -> bytes:
    """One index shard, in a stable order: equal entries, equal bytes."""
    rows = sorted(entries, key=lambda entry: (entry.base, entry.name))
    return _encode({"entries": _plain(tuple[AdapterEntry, ...], tuple(rows))})


def decode_entries(data: bytes) -> tuple[AdapterEntry, ...]:
    """The entries of one index shard. Raises StoreError for garbage and for a newer schema."""
    return _decode(tuple[AdapterEntry, ...], _document(data, "index shard").get("entries"), "index shard")


def encode_note(fields: dict[str, Any]) -> bytes:
    """A small document of plain values."""
    return _encode(fields)


def decode_note(data: bytes, what: str) -> dict[str, Any]:
    """Raises StoreError for garbage and for a newer schema."""
    return _document(data, what)


def encode_marker(*, checked_at: str) -> bytes:
    """`registry.json`: `checked_at` is when the store was seen to honour conditional writes."""
    return _encode({"conditional_writes": {"checked_at": checked_at}})


def check_marker(data: bytes) -> str:
    """When the store was asked, in ISO 8601. Raises StoreError for garbage and for a newer schema."""
    writes = _document(data, "marker").get("conditional_writes")
    return str(writes.get("checked_at", "")) if isinstance(writes, dict) else ""


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _plain(kind: Any, value: object) -> Any:
    return _adapter(kind).dump_python(value, mode="json")


def _encode(document: dict[str, Any]) -> bytes:
    return json.dumps({**document, "schema_version": SCHEMA_VERSION}, sort_keys=True, allow_nan=False).encode()


def _document(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `data` in the newest schema, without its version. Raises StoreError."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _corrupt(what, "it is not JSON") from error
    if not isinstance(document, dict):
        raise _corrupt(what, "it is not a JSON object")
    version = document.pop("schema_version", None)
    if not isinstance(version, int) or version < 1:
        raise _corrupt(what, "it has no schema version")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"the {what} in the registry has schema version {version}; this release reads up to {SCHEMA_VERSION}",
            reason=TOO_NEW,
            limit=SCHEMA_VERSION,
            value=version,
            hint="upgrade LoraMux",
        )
    return _upgraded(document, what, version)


def _upgraded(document: Document, what: str, version: int) -> Document:
    for old in range(version, SCHEMA_VERSION):
        upgrade = UPGRADES.get((what, old))
        try:
            document = upgrade(document) if upgrade else document
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _corrupt(what, f"it is no document of schema version {old}") from error
    return document


def schema_version_of(data: bytes) -> int | None:
    """The version that a document says it has; None for garbage."""
    try:
        version = json.loads(data)["schema_version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return version if isinstance(version, int) else None


def _decode(kind: Any, document: Any, what: str) -> Any:
    try:
        return _adapter(kind).validate_python(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the document"
        raise _corrupt(what, f"{place}: {first['msg']}") from error


def _corrupt(what: str, why: str) -> StoreError:
    return StoreError(f"the {what} in the registry can't be read: {why}", reason=CORRUPT)
