"""The bytes that are published: folded, padded and cast with numpy, one tensor in memory at a time.

The same plan gives the same bytes: sorted names, fixed metadata, round to nearest even.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from adapters.contract.refusals import refusal, shown
from adapters.contract.rewrite import ModulePlan
from adapters.contract.safetensors_file import DTYPE_BYTES, Tensor, TensorSpec, header_bytes

_STORED = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "F64": np.dtype("<f8")}
_BF16_EXPONENT = 0x7F80
_BF16_SIGN_OFF = 0x7FFF

Sink = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class CanonicalFile:
    """What was emitted: size in bytes, SHA-256 (hex), whether any B differs from zero, and values that a cast made zero."""

    size_bytes: int
    sha256: str
    changes_something: bool
    flushed: int


@dataclass(frozen=True, slots=True)
class _Job:
    spec: TensorSpec
    tensor: Tensor
    scale: float
    is_b: bool


def emit(plans: Sequence[ModulePlan], rank: int, sink: Sink, *, keep_dtype: bool) -> CanonicalFile:
    """Sends the canonical weights file to `sink`, piece by piece.

    Raises the refusal `adapter_corrupt` at the first tensor with NaN or Inf, `overflow` if folding or casting makes one.
    """
    jobs = _jobs(plans, rank, keep_dtype)
    hasher = hashlib.sha256()
    size = flushed = 0
    changes = False

    def send(piece: bytes) -> None:
        nonlocal size
        hasher.update(piece)
        size += len(piece)
        sink(piece)

    send(header_bytes(job.spec for job in jobs))
    for job in jobs:
        values, zeroed = _published(job)
        flushed += zeroed
        changes = changes or (job.is_b and _has_nonzero(values))
        send(values.tobytes())
    return CanonicalFile(size, hasher.hexdigest(), changes, flushed)


def load(tensor: Tensor) -> np.ndarray:
    """The values as float32, in the tensor's shape. Raises `adapter_corrupt` if any is NaN or Inf."""
    return _as_float32(_checked(tensor), tensor.dtype)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16, rounded to nearest even. NaN must have been refused before."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))
    return (rounded >> 16).astype("<u2")


def _jobs(plans: Sequence[ModulePlan], rank: int, keep_dtype: bool) -> list[_Job]:
    """In file order: wider dtypes first so that each tensor is aligned, then by name."""
    jobs = []
    for plan in plans:
        jobs.append(_Job(plan.spec("A", rank, keep_dtype=keep_dtype), plan.a.tensor, 1.0, False))
        jobs.append(_Job(plan.spec("B", rank, keep_dtype=keep_dtype), plan.b.tensor, plan.scale, True))
    return sorted(jobs, key=lambda job: (-DTYPE_BYTES[job.spec.dtype], job.spec.name))


def _published(job: _Job) -> tuple[np.ndarray, int]:
    """The tensor as it is stored, and how many values became zero on the way."""
    stored = _checked(job.tensor)
    if job.scale == 1 and job.tensor.dtype == job.spec.dtype:
        return _padded(stored, job.spec.shape), 0
    with np.errstate(over="ignore", under="ignore"):
        source = _as_float32(stored, job.tensor.dtype)
        cast = _cast(source * np.float32(job.scale), job.spec.dtype)
    _refuse_overflow(job, cast)
    zeroed = int(np.count_nonzero(source)) - int(np.count_nonzero(_magnitude(cast)))
    return _padded(cast, job.spec.shape), zeroed


def _checked(tensor: Tensor) -> np.ndarray:
    stored = np.frombuffer(tensor.read(), _STORED[tensor.dtype]).reshape(tensor.shape)
    bad = _not_finite(stored)
    if bad:
        text = f"`{shown(tensor.name, 200)}` holds {bad} values that are NaN or infinite"
        raise refusal("adapter_corrupt", text, limit=0, value=bad, hint="the training run diverged; publish an earlier step")
    return stored


def _refuse_overflow(job: _Job, cast: np.ndarray) -> None:
    bad = _not_finite(cast)
    if bad:
        text = f"{bad} values of `{shown(job.spec.name, 200)}` become infinite when scaled by {job.scale:g} and cast"
        raise refusal("overflow", text, limit=0, value=bad)


def _not_finite(stored: np.ndarray) -> int:
    """The number of values that are NaN or infinite; unsigned 16-bit integers are the bits of bfloat16."""
    if stored.dtype == np.uint16:
        return int(np.count_nonzero((stored & _BF16_EXPONENT) == _BF16_EXPONENT))
    return stored.size - int(np.count_nonzero(np.isfinite(stored)))


def _as_float32(stored: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def _cast(values: np.ndarray, dtype: str) -> np.ndarray:
    return bfloat16_bits(values) if dtype == "BF16" else values.astype(_STORED[dtype])


def _magnitude(stored: np.ndarray) -> np.ndarray:
    """Something that is zero where the value is, for either sign of zero."""
    return stored & _BF16_SIGN_OFF if stored.dtype == np.uint16 else stored


def _has_nonzero(stored: np.ndarray) -> bool:
    return bool(np.any(_magnitude(stored)))


def _padded(stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Zeros up to `shape`: a smaller rank then adds nothing, and one `r` is true for the whole file."""
    if stored.shape == shape:
        return stored
    padded = np.zeros(shape, stored.dtype)
    padded[: stored.shape[0], : stored.shape[1]] = stored
    return padded
