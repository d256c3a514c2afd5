"""Reading and writing safetensors: a header that is checked to the byte, raw access to each tensor, deterministic output.

Layout: 8 bytes little-endian header length, a JSON header, then the data; `data_offsets` count from the start of the data.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from adapters.contract.refusals import refusal, shown
from adapters.contract.strict_json import parse_object
from adapters.errors import AdapterRefused

MAX_HEADER_BYTES = 16 * 2**20
MAX_NAME_CHARS = 256
MAX_DIMENSIONS = 8
MAX_NUMBER = 2**63
DTYPE_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a file: where it lies, not its values. `start` is the absolute offset in bytes."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def read(self) -> bytes:
        """The raw bytes. Raises the refusal `adapter_corrupt` if the file is gone or shorter since its header was read."""
        try:
            with self.file.open("rb") as file:
                file.seek(self.start)
                data = file.read(self.size_bytes)
        except OSError:
            raise _corrupt("the weights file went away while it was read", limit=self.size_bytes, value=0) from None
        if len(data) != self.size_bytes:
            raise _corrupt("the weights file ends early", limit=self.size_bytes, value=len(data))
        return data


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, in the order of their data; no values are read.

    Raises the refusal `adapter_corrupt` unless header, offsets, shapes and file size agree to the byte.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = _header_length(file, size)
        header = parse_object(file.read(length), what="the header of the weights file", code="adapter_corrupt")
    data_start = 8 + length
    tensors = [_tensor(path, name, row, data_start) for name, row in header.items() if name != "__metadata__"]
    tensors.sort(key=lambda pair: (pair[0].start, pair[1]))
    _check_coverage(tensors, data_start, size)
    return {tensor.name: tensor for tensor, _ in tensors}


def header_bytes(specs: Iterable[TensorSpec]) -> bytes:
    """The length and header of a file that holds `specs` in the given order; the same specs give the same bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.size_bytes],
        }
        offset += spec.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers that map the file want the data aligned
    return struct.pack("<Q", len(text)) + text


def _header_length(file: BinaryIO, size: int) -> int:
    first = file.read(8)
    if len(first) < 8:
        raise _corrupt("the weights file is too short for a safetensors header", limit=8, value=len(first))
    (length,) = struct.unpack("<Q", first)
    most = min(MAX_HEADER_BYTES, size - 8)
    if length > most:
        raise _corrupt("the weights file announces a header longer than it can hold", limit=most, value=length)
    return length


def _tensor(path: Path, name: str, row: Any, data_start: int) -> tuple[Tensor, int]:
    """The tensor that one row of the header describes, and the absolute offset of its end."""
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise _corrupt("a tensor's name is too long or not printable", limit=MAX_NAME_CHARS, value=shown(name))
    if not isinstance(row, dict):
        raise _corrupt(f"the header row of `{shown(name)}` is not an object", limit="object", value=shown(name))
    dtype, shape, offsets = row.get("dtype"), row.get("shape"), row.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _corrupt(f"`{shown(name)}` has an unknown dtype", limit=sorted(DTYPE_BYTES), value=shown(dtype))
    if not _naturals(shape) or len(shape) > MAX_DIMENSIONS:
        raise _corrupt(f"`{shown(name)}` has no valid shape", limit=f"up to {MAX_DIMENSIONS} dimensions", value=shown(shape))
    if not _naturals(offsets) or len(offsets) != 2:
        raise _corrupt(f"`{shown(name)}` has no valid data offsets", limit="two offsets", value=shown(offsets))
    tensor = Tensor(path, name, dtype, tuple(shape), data_start + offsets[0])
    if offsets[1] - offsets[0] != tensor.size_bytes:
        raise _corrupt(
            f"`{shown(name)}` takes other bytes than its shape and dtype need",
            limit=tensor.size_bytes,
            value=offsets[1] - offsets[0],
        )
    return tensor, data_start + offsets[1]


def _check_coverage(tensors: list[tuple[Tensor, int]], data_start: int, size: int) -> None:
    """Tensors must lie side by side from the start of the data to the end of the file."""
    at = data_start
    for tensor, end in tensors:
        if tensor.start != at:
            text = f"the data of `{shown(tensor.name)}` overlaps another tensor or leaves a hole"
            raise _corrupt(text, limit=at, value=tensor.start)
        at = end
    if at != size:
        raise _corrupt("the weights file is truncated or longer than its header says", limit=at, value=size)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < MAX_NUMBER for number in value)


def _corrupt(message: str, *, limit: Any = None, value: Any = None) -> AdapterRefused:
    return refusal("adapter_corrupt", message, limit=limit, value=value)
