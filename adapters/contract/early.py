"""What the publish contract can say of an adapter that is still arriving: configuration and weights header, no values yet."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Iterable
from pathlib import Path

from adapters.contract.contract import PublishOptions, refusal_by_headers
from adapters.contract.safetensors_file import MAX_HEADER_BYTES
from adapters.errors import AdapterRefused
from adapters.types import CONFIG_FILE, WEIGHTS_FILE, BaseContract

LENGTH_BYTES = 8
HEALED_BY_MORE_FILES = frozenset({"scale_zero"})  # a file that some trainers put beside the two may name the scale


def header_end(first: bytes) -> int | None:
    """Where the header of the weights ends, once their first 8 bytes are there; None for what is no header."""
    if len(first) < LENGTH_BYTES:
        return None
    (length,) = struct.unpack("<Q", first[:LENGTH_BYTES])
    return LENGTH_BYTES + length if length <= MAX_HEADER_BYTES else None


def early_refusal(
    config: Path,
    header: bytes,
    contract: BaseContract | None,
    options: PublishOptions,
    *,
    base: str,
    others: Iterable[BaseContract] = (),
) -> AdapterRefused | None:
    """The refusal that the whole folder would meet first, if configuration and header show it already.

    `header` is the beginning of the weights up to `header_end`. The contract sees a sparse file of the announced size, which
    lies in a folder beside that of `config` for a moment.
    """
    size = _announced_bytes(header)
    if size is None:
        return None  # the whole file shows better what is wrong
    with tempfile.TemporaryDirectory(dir=config.parent.parent, prefix="early-") as folder:
        os.link(config, Path(folder, CONFIG_FILE))
        if not _sparse(Path(folder, WEIGHTS_FILE), header, size):
            return None
        found = refusal_by_headers(Path(folder), contract, options, base=base, others=others)
    return found if found and found.reason not in HEALED_BY_MORE_FILES else None


def _announced_bytes(header: bytes) -> int | None:
    try:
        rows = json.loads(header[LENGTH_BYTES:])
        ends = [row["data_offsets"][1] for name, row in rows.items() if name != "__metadata__"]
        size = len(header) + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return None
    return size if type(size) is int and size >= len(header) else None


def _sparse(path: Path, header: bytes, size: int) -> bool:
    """Whether there can be a file of that size."""
    try:
        with path.open("wb") as file:
            file.write(header)
            file.truncate(size)
    except (OSError, OverflowError):
        return False
    return True
