"""Tiny adapter folders, written without the code under test: a good one, the same one in odd clothes, and broken ones.

All values fit bfloat16 and the scale is a power of two, so that every clothing has the same bits.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from adapters.types import BaseContract, ModuleShape

RANK, ALPHA = 4, 16
PREFIX = "base_model.model."
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I8": 1}
SHAPES = {
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (16, 8),
    "self_attn.v_proj": (16, 8),
    "self_attn.o_proj": (16, 16),
    "mlp.gate_proj": (16, 24),
    "mlp.up_proj": (16, 24),
    "mlp.down_proj": (24, 16),
}
VISION_MODULE = "model.visual.blocks.0.attn.qkv"


def contract_of(
    root: str, *, tower: str | None = None, serves_vision: bool = False, layers: int = 2, wider: int = 1
) -> BaseContract:
    """A base of a few layers below `root`."""
    modules = {
        f"{root}.layers.{layer}.{name}": ModuleShape(width_in * wider, width_out * wider)
        for layer in range(layers)
        for name, (width_in, width_out) in SHAPES.items()
    }
    if tower:
        modules[VISION_MODULE] = ModuleShape(16, 48)
    return BaseContract("tiny/base", "f" * 64, modules, max_rank=8, tower=tower, serves_vision=serves_vision)


TEXT = contract_of("model")
VLM = contract_of("model.language_model", tower="model.language_model")


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter before it is written. `dtype` is that of all tensors, unless `dtypes` names another one."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    dtype: str = "F32"
    dtypes: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    shards: int = 0
    index: bool = True

    def configured(self, **fields: Any) -> AdapterFolder:
        return replace(self, config={**self.config, **fields})

    def without(self, *fields: str) -> AdapterFolder:
        return replace(self, config={key: value for key, value in self.config.items() if key not in fields})

    def renamed(self, rename: Callable[[str], str]) -> AdapterFolder:
        return replace(self, tensors={rename(key): value for key, value in self.tensors.items()})

    def with_tensor(self, key: str, value: np.ndarray) -> AdapterFolder:
        return replace(self, tensors={**self.tensors, key: value})

    def minus(self, part: str) -> AdapterFolder:
        return replace(self, tensors={key: value for key, value in self.tensors.items() if part not in key})

    def with_file(self, name: str, data: bytes = b"x") -> AdapterFolder:
        return replace(self, files={**self.files, name: data})

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(self.config))
        if self.shards:
            self._write_shards(folder)
        else:
            (folder / "adapter_model.safetensors").write_bytes(self._bytes(list(self.tensors)))
        for name, data in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return folder

    def _bytes(self, keys: list[str]) -> bytes:
        dtypes = {key: self.dtypes.get(key, self.dtype) for key in keys}
        return safetensors_bytes({key: self.tensors[key] for key in keys}, dtypes)

    def _write_shards(self, folder: Path) -> None:
        keys, index = list(self.tensors), {}
        for number in range(self.shards):
            name = f"adapter_model-{number + 1:05d}-of-{self.shards:05d}.safetensors"
            mine = keys[number :: self.shards]
            (folder / name).write_bytes(self._bytes(mine))
            index.update(dict.fromkeys(mine, name))
        if self.index:
            (folder / "adapter_model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def safetensors_bytes(tensors: dict[str, np.ndarray], dtypes: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"written_by": "a test"}}
    data = b""
    for key, value in tensors.items():
        raw = encode(value, dtypes[key])
        header[key] = {"dtype": dtypes[key], "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def encode(values: np.ndarray, dtype: str) -> bytes:
    """Float32 values as bytes of `dtype`; for BF16 they must fit exactly (NaN and Inf do)."""
    if dtype == "BF16":
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype({"F64": "<f8", "F32": "<f4", "F16": "<f2", "I8": "i1"}[dtype]).tobytes()


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors as float32."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    found = {}
    for key, row in json.loads(raw[8 : 8 + length]).items():
        if key == "__metadata__":
            continue
        start, end = (8 + length + offset for offset in row["data_offsets"])
        found[key] = decode(raw[start:end], row["dtype"]).reshape(row["shape"])
    return found


def decode(data: bytes, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)


def exact(values: np.ndarray) -> np.ndarray:
    """Values that bfloat16 holds exactly."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def plain(contract: BaseContract = TEXT, *, rank: int = RANK, seed: int = 7, **fields: Any) -> AdapterFolder:
    """What PEFT leaves: float32, one rank, one alpha."""
    random = np.random.default_rng(seed)
    tensors = {}
    for path, shape in contract.modules.items():
        if path == VISION_MODULE:
            continue
        tensors[f"{PREFIX}{path}.lora_A.weight"] = exact(random.normal(size=(rank, shape.in_features)))
        tensors[f"{PREFIX}{path}.lora_B.weight"] = exact(random.normal(size=(shape.out_features, rank)))
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": ALPHA,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "target_modules": sorted(name.rpartition(".")[2] for name in SHAPES),
        "base_model_name_or_path": "tiny/base",
        "modules_to_save": None,
        "peft_version": "0.21.2",
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    return AdapterFolder({**config, **fields}, tensors)


def moved(folder: AdapterFolder, old: str, new: str) -> AdapterFolder:
    """The same factors with `old` in each name replaced by `new`, once."""
    return folder.renamed(lambda key: key.replace(old, new, 1))


def _wrapped_module(folder: AdapterFolder) -> AdapterFolder:
    return folder.renamed(lambda key: re.sub(r"layers\.(\d+)\.", r"layers.\1._checkpoint_wrapped_module.", key))


def _with_copies(folder: AdapterFolder) -> AdapterFolder:
    return folder.with_tensor(f"{PREFIX}model.embed_tokens.base_layer.weight", exact(np.ones((32, 16))))


def _mixed_alpha(folder: AdapterFolder) -> AdapterFolder:
    return folder.configured(lora_alpha=ALPHA * 2, alpha_pattern={r".*_proj": ALPHA})


# The same adapter, by what is odd about it. Each works on any other, so that they can be worn together.
CLOTHES: dict[str, Callable[[AdapterFolder], AdapterFolder]] = {
    "plain": lambda folder: folder,
    "bfloat16": lambda folder: replace(folder, dtype="BF16"),
    "float64": lambda folder: replace(folder, dtype="F64"),
    "adapter name": lambda folder: folder.renamed(lambda key: re.sub(r"(lora_[AB])\.weight", r"\1.default.weight", key)),
    "no prefix": lambda folder: moved(folder, PREFIX, ""),
    "prefix twice": lambda folder: moved(folder, PREFIX, PREFIX * 2),
    "compiled": lambda folder: folder.renamed(lambda key: f"_orig_mod.{key}"),
    "compiled inside": lambda folder: moved(folder, PREFIX, f"{PREFIX}_orig_mod."),
    "DDP": lambda folder: folder.renamed(lambda key: f"module.{key}"),
    "FSDP": lambda folder: moved(folder, "layers.", "_fsdp_wrapped_module.layers."),
    "checkpointed": _wrapped_module,
    "three shards": lambda folder: replace(folder, shards=3),
    "shards without index": lambda folder: replace(folder, shards=2, index=False),
    "alpha pattern": _mixed_alpha,
    "rank pattern": lambda folder: folder.configured(r=64, rank_pattern={"[a-z_]+_proj": RANK}),
    "rsLoRA": lambda folder: folder.configured(lora_alpha=8, use_rslora=True, alpha_pattern={}),
    "empty modules_to_save": lambda folder: folder.configured(modules_to_save=[]),
    "copies of the embeddings": _with_copies,
    "null targets": lambda folder: folder.configured(target_modules=None),
    "regex targets": lambda folder: folder.configured(target_modules=r".*layers.*(q|k|v|o|gate|up|down)_proj"),
    "other base name": lambda folder: folder.configured(base_model_name_or_path="/home/ann/.cache/tiny--bnb-4bit"),
    "trainer files": lambda folder: folder.with_file("trainer_state.json").with_file("model.safetensors"),
    "a reference inside": lambda folder: folder.with_file("reference/adapter_config.json"),
}  # fmt: skip

# Names that each kind of base's text layers have been seen under.
TEXT_NAMES = ("model.layers", "layers", "model.language_model.layers", "language_model.model.layers", "language_model.layers")
