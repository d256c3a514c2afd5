"""The bytes that are published: folded, padded and cast with numpy, one tensor in memory at a time.

The same plan gives the same bytes: sorted names, fixed metadata, round to nearest even.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from adapters.contract.refusals import many, refusal, shown
from adapters.contract.rewrite import ModulePlan, Part
from adapters.contract.safetensors_file import DTYPE_BYTES, Tensor, TensorSpec, header_bytes
from adapters.tree_digest import TreeDigest

_STORED = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "F64": np.dtype("<f8")}
_BF16_EXPONENT = 0x7F80
_BF16_SIGN_OFF = 0x7FFF

Sink = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class CanonicalFile:
    """What was emitted: size in bytes, SHA-256 (hex), its tree's digest, whether any module's B @ A can differ from zero, and
    values that a cast made zero."""

    size_bytes: int
    sha256: str
    tree: str | None
    changes_something: bool
    flushed: int


@dataclass(frozen=True, slots=True)
class _Job:
    """One tensor of the published file: what it is called, whose side it is, and the rank of each expert in it."""

    spec: TensorSpec
    plan: ModulePlan
    side: str
    rank: int


def emit(plans: Sequence[ModulePlan], rank: int, sink: Sink, *, keep_dtype: bool) -> CanonicalFile:
    """Sends the canonical weights file to `sink`, piece by piece.

    Raises the refusal `adapter_corrupt` at the first tensor with NaN or Inf, `overflow` if folding or casting makes one.
    """
    jobs = _jobs(plans, rank, keep_dtype)
    recent = _Recent()
    hasher, tree = hashlib.sha256(), TreeDigest()
    size = flushed = 0
    nonzero: set[tuple[str, str]] = set()

    def send(piece: bytes) -> None:
        nonlocal size
        hasher.update(piece)
        tree.update(piece)
        size += len(piece)
        sink(piece)

    send(header_bytes(job.spec for job in jobs))
    for job in jobs:
        values, zeroed = _published(job, recent)
        flushed += zeroed
        if _has_nonzero(values):
            nonzero.add((job.plan.path, job.side))
        send(values.tobytes())
    changes = any({(plan.path, "A"), (plan.path, "B")} <= nonzero for plan in plans)
    return CanonicalFile(size, hasher.hexdigest(), tree.hexdigest(), changes, flushed)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16, rounded to nearest even. NaN must have been refused before."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))
    return (rounded >> 16).astype("<u2")


def _jobs(plans: Sequence[ModulePlan], rank: int, keep_dtype: bool) -> list[_Job]:
    """In file order: wider dtypes first so that each tensor is aligned, then by name."""
    jobs = [_Job(plan.spec(side, rank, keep_dtype=keep_dtype), plan, side, rank) for plan in plans for side in "AB"]
    return sorted(jobs, key=lambda job: (-DTYPE_BYTES[job.spec.dtype], job.spec.name))


class _Recent:
    """Stacks of experts that were read last: their experts follow each other, and each needs the whole."""

    KEPT = 4

    def __init__(self) -> None:
        self._values: dict[Tensor, np.ndarray] = {}

    def values(self, tensor: Tensor) -> np.ndarray:
        """The values as float32. Raises `adapter_corrupt` if any is NaN or Inf."""
        found = self._values.pop(tensor, None)
        if found is None:
            found = _as_float32(_checked(tensor), tensor.dtype)
        self._values[tensor] = found
        while len(self._values) > self.KEPT:
            del self._values[next(iter(self._values))]
        return found


def _published(job: _Job, recent: _Recent) -> tuple[np.ndarray, int]:
    """The tensor as it is stored, and how many values became zero on the way."""
    part = job.plan.parts[0]
    if len(job.plan.parts) == 1 and part.is_whole:
        return _published_whole(job, part)
    return _published_parts(job, recent)


def _published_whole(job: _Job, part: Part) -> tuple[np.ndarray, int]:
    tensor, scale = part.tensor(job.side), part.scale if job.side == "B" else 1.0
    stored = _checked(tensor)
    if scale == 1 and tensor.dtype == job.spec.dtype:
        return _padded(stored, job.spec.shape), 0
    with np.errstate(over="ignore", under="ignore"):
        source = _as_float32(stored, tensor.dtype)
        cast = _cast(source * np.float32(scale), job.spec.dtype)
    _refuse_overflow(job, cast, scale)
    zeroed = int(np.count_nonzero(source)) - int(np.count_nonzero(_magnitude(cast)))
    return _padded(cast, job.spec.shape), zeroed


def _published_parts(job: _Job, recent: _Recent) -> tuple[np.ndarray, int]:
    """A module that is put together: A as [expert, rank, in], B as [out, rank, expert], zeros where no part goes."""
    experts, plan = job.plan.experts or 1, job.plan
    shape = (experts, job.rank, plan.in_features) if job.side == "A" else (plan.out_features, job.rank, experts)
    values = np.zeros(shape, np.float32)
    nonzero = 0
    for part in plan.parts:
        source = recent.values(part.tensor(job.side)) if part.experts > 1 or part.rows else _float32(part, job.side)
        piece = _stack_of(part, job.side, source)
        ranks = slice(part.rank_at, part.rank_at + part.rank)
        at_expert = slice(part.put, part.put + piece.shape[0 if job.side == "A" else 2])
        if job.side == "A":
            values[at_expert, ranks] = piece
        else:
            with np.errstate(over="ignore", under="ignore"):
                values[part.at : part.at + len(piece), ranks, at_expert] = piece * np.float32(part.scale)
            nonzero += int(np.count_nonzero(piece))
    nonzero = nonzero if job.side == "B" else int(np.count_nonzero(values))
    with np.errstate(over="ignore", under="ignore"):
        cast = _cast(values, job.spec.dtype).reshape(job.spec.shape)
    _refuse_overflow(job, cast, max((part.scale for part in plan.parts), key=abs))
    return cast, nonzero - int(np.count_nonzero(_magnitude(cast)))


def _stack_of(part: Part, side: str, source: np.ndarray) -> np.ndarray:
    """What the part gives, with the roles of A and B and the expert put right."""
    count, rank = part.experts, part.rank
    if (side == "A") != part.swapped:
        stack = source.reshape(count, rank, -1)  # the file's A: expert by expert
        stack = stack.transpose(2, 1, 0) if part.swapped else stack
    else:
        stack = source.reshape(-1, rank, count)  # the file's B: experts innermost
        stack = stack.transpose(2, 1, 0) if part.swapped else stack
    if part.take is not None:
        chosen = slice(part.take, part.take + 1)
        stack = stack[chosen] if side == "A" else stack[:, :, chosen]
    return stack[slice(*part.rows)] if part.rows and side == "B" else stack


def _float32(part: Part, side: str) -> np.ndarray:
    tensor = part.tensor(side)
    return _as_float32(_checked(tensor), tensor.dtype)


def _checked(tensor: Tensor) -> np.ndarray:
    stored = np.frombuffer(tensor.read(), _STORED[tensor.dtype]).reshape(tensor.shape)
    bad = _not_finite(stored)
    if bad:
        text = f"`{shown(tensor.name, 200)}` holds NaN or infinity ({many(bad, 'value')})"
        raise refusal("adapter_corrupt", text, limit=0, value=bad, hint="the training run diverged; publish an earlier step")
    return stored


def _refuse_overflow(job: _Job, cast: np.ndarray, scale: float) -> None:
    bad = _not_finite(cast)
    if bad:
        text = f"{many(bad, 'value')} of `{shown(job.spec.name, 200)}` too large when scaled by {scale:g} and cast"
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
