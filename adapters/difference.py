"""How far two versions are apart: what their configurations say differently, and the norm of what changed in each module.

A module's update is B@A, out x in, which may be large; its norm needs only r x r products of the factors:
||B A||^2 = sum(B'B * AA'). All in float64. Equal factors are exactly 0; else the smallest change that can be told from none is
about 1e-8 of the update's own norm, far below what bfloat16 resolves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from adapters.contract.safetensors_file import Tensor, read_header
from adapters.errors import AdapterCorrupt
from adapters.types import CONFIG_FILE, WEIGHTS_FILE

PREFIX = "base_model.model."
FACTORS = {".lora_A.weight": "A", ".lora_B.weight": "B", ".lora_embedding_A": "A", ".lora_embedding_B": "B"}

Factors = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """`norm` is the Frobenius norm of the updates' difference, `relative` the same over the larger update's norm (0 to 2)."""

    name: str
    norm: float
    old_norm: float
    new_norm: float
    relative: float
    only_in: Literal["from", "to"] | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """`modules` has the most changed first; `config` maps each key that differs to both values; `relative` is the norm of the
    whole difference over the norm of the first one's whole update (infinite for an update of zero)."""

    modules: tuple[ModuleDifference, ...]
    config: dict[str, tuple[Any, Any]]
    relative: float | None


def compare(old: Path, new: Path) -> Difference:
    """Two folders in the canonical form. Raises AdapterCorrupt."""
    left, right = _read_factors(old), _read_factors(new)
    scales = _scale(old), _scale(new)
    modules = [_module(name, left.get(name), right.get(name), scales) for name in sorted({*left, *right})]
    modules.sort(key=lambda module: (-module.relative, module.name))
    whole, first = (math.hypot(*values) for values in ([m.norm for m in modules], [m.old_norm for m in modules]))
    return Difference(tuple(modules), _config_difference(old, new), whole / first if first else None)


def difference_norm(old: Factors, new: Factors) -> float:
    """||B1 A1 - B2 A2|| for factors (A: r x in, B: out x r); ranks may differ."""
    if _equal(old, new):
        return 0.0
    return update_norm((np.vstack([old[0], new[0]]), np.hstack([old[1], -new[1]])))


def update_norm(factors: Factors) -> float:
    """||B A||."""
    a, b = (np.asarray(factor, np.float64) for factor in factors)
    return math.sqrt(max(0.0, float(np.sum((b.T @ b) * (a @ a.T)))))


def _equal(old: Factors, new: Factors) -> bool:
    return all(one.shape == other.shape and np.array_equal(one, other) for one, other in zip(old, new, strict=True))


def _module(
    name: str, old: Mapping[str, Tensor] | None, new: Mapping[str, Tensor] | None, scales: tuple[float, float]
) -> ModuleDifference:
    left, right = (_factors(name, pair, scale) for pair, scale in zip((old, new), scales, strict=True))
    old_norm, new_norm = (update_norm(factors) if factors else 0.0 for factors in (left, right))
    if left is None or right is None:
        return ModuleDifference(name, max(old_norm, new_norm), old_norm, new_norm, 1.0, "from" if right is None else "to")
    if (left[0].shape[1], left[1].shape[0]) != (right[0].shape[1], right[1].shape[0]):
        raise AdapterCorrupt(f"`{name}` has another shape in each of them", reason="shapes_differ")
    norm = difference_norm(left, right)
    larger = max(old_norm, new_norm)
    return ModuleDifference(name, norm, old_norm, new_norm, norm / larger if larger else 0.0)


def _factors(name: str, pair: Mapping[str, Tensor] | None, scale: float) -> Factors | None:
    if pair is None:
        return None
    if pair.keys() != {"A", "B"}:
        raise AdapterCorrupt(f"`{name}` lacks one of its factors", reason="missing_factor")
    return _values(pair["A"]), _values(pair["B"]) * scale


def _values(tensor: Tensor) -> np.ndarray:
    """Float64, with two dimensions."""
    data = tensor.read()
    if tensor.dtype == "BF16":
        values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[tensor.dtype])
    return values.astype(np.float64).reshape(tensor.shape[0], -1)


def _read_factors(folder: Path) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in read_header(folder / WEIGHTS_FILE).items():
        for ending, side in FACTORS.items():
            if key.endswith(ending):
                found.setdefault(key.removesuffix(ending).removeprefix(PREFIX), {})[side] = tensor
    return found


def _config(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / CONFIG_FILE).read_bytes())
    except ValueError:
        raise AdapterCorrupt("the stored configuration is no JSON") from None


def _scale(folder: Path) -> float:
    config = _config(folder)
    return float(config["lora_alpha"]) / float(config["r"])


def _config_difference(old: Path, new: Path) -> dict[str, tuple[Any, Any]]:
    left, right = _config(old), _config(new)
    keys = sorted({*left, *right})
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}
