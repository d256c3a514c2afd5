"""What public exporters leave, as data: how the folder is made, the base that it goes to, and what must come of it.

`SAME` means that it is the plain adapter in other clothes and has its digest; a code means that it is refused; a number is the
count of modules of an adapter that is published but is not the plain one. The shapes are tiny, the layouts are the tools' own.
"""

from __future__ import annotations

import json
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from adapters.contract import PublishOptions
from adapters.types import BaseContract, ModuleShape
from tests.adapter_folders import (
    ALPHA,
    PREFIX,
    RANK,
    SHAPES,
    TEXT,
    VISION_MODULE,
    VLM,
    AdapterFolder,
    contract_of,
    exact,
    moved,
    plain,
    safetensors_bytes,
)

SAME = "same"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
INDEX = f"{WEIGHTS}.index.json"
NAMES = sorted(name.rpartition(".")[2] for name in SHAPES)
Q0 = "model.layers.0.self_attn.q_proj"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 175000000\n"

VLM_SERVED = replace(VLM, serves_vision=True)
# A base that lists the embeddings and the head, and one that computes q, k, v and gate, up as one.
HEADED = replace(TEXT, modules={**TEXT.modules, "model.embed_tokens": ModuleShape(32, 16), "lm_head": ModuleShape(16, 32)})
FUSED_SHAPES = {
    "self_attn.qkv_proj": (16, 32),
    "self_attn.o_proj": (16, 16),
    "mlp.gate_up_proj": (16, 48),
    "mlp.down_proj": (24, 16),
}
FUSED = replace(
    TEXT,
    modules={f"model.layers.{layer}.{name}": ModuleShape(*shape) for layer in (0, 1) for name, shape in FUSED_SHAPES.items()},
    max_rank=16,
)
# Two layers with experts, as one module for all of them and as linears of their own.
EXPERTS, HIDDEN, INNER = 3, 16, 12
ATTENTION = {name: shape for name, shape in SHAPES.items() if name.startswith("self_attn")}


def moe_contract(*, stacked: bool, gpt_oss: bool = False) -> BaseContract:
    modules = {}
    for layer in (0, 1):
        root = f"model.layers.{layer}"
        modules.update({f"{root}.{name}": ModuleShape(*shape) for name, shape in ATTENTION.items()})
        if stacked:
            modules[f"{root}.mlp.experts.gate_up_proj"] = ModuleShape(HIDDEN, 2 * INNER, EXPERTS)
            modules[f"{root}.mlp.experts.down_proj"] = ModuleShape(INNER, HIDDEN, EXPERTS)
            continue
        for expert in range(EXPERTS):
            modules[f"{root}.mlp.experts.{expert}.gate_proj"] = ModuleShape(HIDDEN, INNER)
            modules[f"{root}.mlp.experts.{expert}.up_proj"] = ModuleShape(HIDDEN, INNER)
            modules[f"{root}.mlp.experts.{expert}.down_proj"] = ModuleShape(INNER, HIDDEN)
    architecture = "GptOssForCausalLM" if gpt_oss else "SomeMoeForCausalLM"
    return BaseContract("tiny/base", "f" * 64, modules, max_rank=8, architecture=architecture)


STACKED, SINGLE = moe_contract(stacked=True), moe_contract(stacked=False)
# A vision-language base with experts.
MOE_VLM = replace(
    STACKED,
    tower="model.language_model",
    modules={
        **{path.replace("model.", "model.language_model.", 1): shape for path, shape in STACKED.modules.items()},
        VISION_MODULE: ModuleShape(16, 48),
    },
)


@dataclass(frozen=True)
class Layout:
    """One folder of one tool. `expected` is `SAME` (as `plain`), a refusal's code, or a number of modules."""

    name: str
    write: Callable[[Path], Any]
    expected: str | int
    contract: BaseContract = TEXT
    options: PublishOptions | None = None
    plain: AdapterFolder | None = None
    rules: tuple[str, ...] = ()
    warns: str | None = None
    source: str = ""


# Parts that several tools have in common.

TRAINER_FILES = dict.fromkeys(
    ("trainer_state.json", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "README.md"), b"{}"
)
TOKENIZER = {
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"chat_template": "{{ messages }}"}',
    "special_tokens_map.json": b"{}",
    "added_tokens.json": b'{"<|end|>": 31}',
}
BASE_CONFIG = {"config.json": b'{"architectures": ["Qwen3ForCausalLM"]}', "generation_config.json": b"{}"}
REGEX_OF_UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:k_proj|v_proj|q_proj|out_proj|o_proj|gate_proj|up_proj|down_proj).*?)"
)


def with_files(folder: AdapterFolder, *more: dict[str, bytes]) -> AdapterFolder:
    return replace(folder, files={**folder.files, **{name: data for files in more for name, data in files.items()}})


def paths_of(contract: BaseContract) -> list[str]:
    return sorted(path for path in contract.modules if path != VISION_MODULE)


def pair(folder: AdapterFolder, path: str, width_in: int, width_out: int, *, value: float = 1, rank: int = RANK) -> AdapterFolder:
    folder = folder.with_tensor(f"{PREFIX}{path}.lora_A.weight", np.full((rank, width_in), value, np.float32))
    return folder.with_tensor(f"{PREFIX}{path}.lora_B.weight", np.full((width_out, rank), value, np.float32))


def with_vision(contract: BaseContract, name: str = VISION_MODULE) -> AdapterFolder:
    return pair(plain(contract, target_modules=[*NAMES, "qkv"]), name, 16, 48)


def unused_vision_targets() -> AdapterFolder:
    return plain(VLM, target_modules=[*NAMES, "qkv"])


def replaced(folder: AdapterFolder, key: str, change: Callable[[np.ndarray], np.ndarray]) -> AdapterFolder:
    return folder.with_tensor(key, change(folder.tensors[key].copy()))


def first_value(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values.reshape(-1)[0] = value
        return values

    return change


def only_keys(folder: AdapterFolder, *parts: str) -> AdapterFolder:
    return replace(folder, tensors={key: value for key, value in folder.tensors.items() if any(part in key for part in parts)})


def renamed_files(folder: AdapterFolder, rename: Callable[[str], str]) -> Callable[[Path], None]:
    """Writes the folder, then renames its files."""

    def write(path: Path) -> None:
        folder.write(path)
        for file in list(path.iterdir()):
            file.rename(path / rename(file.name))

    return write


def nested(folder: AdapterFolder, *places: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for place in places:
            folder.write(path / place)

    return write


def bare(**files: bytes | dict[str, np.ndarray]) -> Callable[[Path], None]:
    """A folder of these files only; `__` in a name stands for a dot. Tensors are written as safetensors."""

    def write(path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            raw = safetensors_bytes(data, dict.fromkeys(data, "F32")) if isinstance(data, dict) else data
            (path / name.replace("__", ".")).write_bytes(raw)

    return write


def edited_json(folder: AdapterFolder, name: str, edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        folder.write(path)
        (path / name).write_bytes(edit((path / name).read_bytes()))

    return write


def snapshot(folder: AdapterFolder, *, missing: str | None = None) -> Callable[[Path], None]:
    """What a Hugging Face download leaves: files are links into a folder of blobs."""

    def write(path: Path) -> None:
        blobs = path.parent / f"{path.name}-blobs"
        folder.write(blobs)
        path.mkdir(parents=True)
        for file in list(blobs.iterdir()):
            blob = blobs / f"{abs(hash(file.name)):x}"
            file.rename(blob)
            (path / file.name).symlink_to(os.path.relpath(blob, path))
            if file.name == missing:
                blob.unlink()

    return write


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


# Experts: the same factors in each of the layouts that they are found in.


def expert_factors(layer: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A as [expert, rank, in] and B as [out, rank, expert], by parameter."""
    random = np.random.default_rng(100 + layer)

    def values(*shape: int) -> np.ndarray:
        return exact(random.normal(size=shape))

    return {
        "gate_up_proj": (values(EXPERTS, RANK, HIDDEN), values(2 * INNER, RANK, EXPERTS)),
        "down_proj": (values(EXPERTS, RANK, INNER), values(HIDDEN, RANK, EXPERTS)),
    }


def attention_only(**fields: Any) -> AdapterFolder:
    folder = plain(STACKED, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], **fields)
    return only_keys(folder, "self_attn")


def experts_adapter(layout: str, *, version: str | None = "0.21.2", **fields: Any) -> AdapterFolder:
    """Attention and experts. `layout`: `stacked` (PEFT since 0.19), `swapped` (before), `reversed` (wrapped the other way round),
    `named` (by the parameter's own name), `single` (a pair for each expert's linear), `mixtral` (that, with Mixtral's names)."""
    folder = attention_only(**fields)
    folder = folder.configured(
        peft_version=version, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], lora_dropout=0.0
    )
    for layer in (0, 1):
        root = f"{PREFIX}model.layers.{layer}.mlp.experts"
        for name, (a, b) in expert_factors(layer).items():
            for place, tensor in _laid_out(layout, name, a, b):
                folder = folder.with_tensor(f"{root}{place}.weight", np.ascontiguousarray(tensor))
    return folder


def _laid_out(layout: str, name: str, a: np.ndarray, b: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    if layout in ("single", "mixtral"):
        names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[name]
        short = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        for expert in range(EXPERTS):
            for number, linear in enumerate(names):
                rows = slice(number * INNER, (number + 1) * INNER) if len(names) == 2 else slice(None)
                place = f".{expert}.{short[linear] if layout == 'mixtral' else linear}"
                yield f"{place}.lora_A", a[expert]
                yield f"{place}.lora_B", b[rows, :, expert]
        return
    inner = "gate_up_proj" if layout != "reversed" else "down_proj"
    place = f".{name}" if layout == "named" else ".base_layer" if name == inner else ""
    if layout == "swapped":
        a, b = b.transpose(2, 1, 0), a.transpose(2, 1, 0)
    yield f"{place}.lora_A", a.reshape(EXPERTS * RANK, -1)
    yield f"{place}.lora_B", b.reshape(-1, RANK * EXPERTS)


EXPERTS_PLAIN = experts_adapter("stacked")


# Projections that a trainer's model has as one.


def fused_adapter(contract: BaseContract = FUSED) -> AdapterFolder:
    folder = plain(contract)
    return folder.configured(target_modules=sorted({key.split(".lora_")[0].rpartition(".")[2] for key in folder.tensors}))


def split_by_hand(folder: AdapterFolder) -> AdapterFolder:
    """The fused adapter as separate modules: A copied, B cut."""
    widths = {"qkv_proj": {"q_proj": 16, "k_proj": 8, "v_proj": 8}, "gate_up_proj": {"gate_proj": 24, "up_proj": 24}}
    tensors: dict[str, np.ndarray] = {}
    for key, value in folder.tensors.items():
        name = next((fused for fused in widths if f".{fused}." in key), None)
        at = 0
        for part, width in widths.get(name or "", {}).items():
            tensors[key.replace(f".{name}.", f".{part}.")] = value if "lora_A" in key else value[at : at + width]
            at += width
        if name is None:
            tensors[key] = value
    return replace(folder, tensors=tensors).configured(target_modules=NAMES)


def joined_by_hand(folder: AdapterFolder) -> AdapterFolder:
    """Separate modules as one: A on top of each other, B as blocks. Ranks add up, and each block keeps its scale."""
    tensors: dict[str, np.ndarray] = {}
    for layer in (0, 1):
        for fused, parts in {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}.items():
            root = f"{PREFIX}model.layers.{layer}.{fused.partition('.')[0]}"
            factors = [[folder.tensors.get(f"{root}.{part}_proj.lora_{side}.weight") for side in "AB"] for part in parts]
            present = [factor for factor in factors if factor[0] is not None]
            a = np.concatenate([a for a, _ in present])
            b = np.zeros((sum(b.shape[0] for _, b in present), sum(b.shape[1] for _, b in present)), np.float32)
            row = column = 0
            for _, block in present:
                b[row : row + block.shape[0], column : column + block.shape[1]] = block
                row, column = row + block.shape[0], column + block.shape[1]
            tensors[f"{PREFIX}model.layers.{layer}.{fused}.lora_A.weight"] = a
            tensors[f"{PREFIX}model.layers.{layer}.{fused}.lora_B.weight"] = b
    others = {key: value for key, value in folder.tensors.items() if ".o_proj." in key or ".down_proj." in key}
    ranks = {"qkv_proj": 3 * RANK, "gate_up_proj": 2 * RANK}
    alphas = {"qkv_proj": 3 * ALPHA, "gate_up_proj": 2 * ALPHA}
    names = ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]
    return replace(folder, tensors={**tensors, **others}).configured(
        target_modules=names, rank_pattern=ranks, alpha_pattern=alphas
    )


FUSED_PLAIN = fused_adapter()

PEFT = [
    Layout("PEFT: plain", plain().write, SAME),
    Layout("PEFT: bfloat16", replace(plain(), dtype="BF16").write, SAME),
    Layout("PEFT: on a vision-language model", plain(VLM).write, SAME, VLM),
    Layout(
        "PEFT: the old name of the tower",
        moved(plain(VLM), "model.language_model", "language_model.model").write,
        SAME,
        VLM,
        rules=("remap-tower",),
    ),
    Layout("PEFT: full paths as targets", plain(target_modules=paths_of(TEXT)).write, SAME),
    Layout(
        "PEFT: full paths of a tower as targets, text names as keys",
        moved(plain(VLM, target_modules=paths_of(VLM)), "model.language_model", "model").write,
        SAME,
        VLM,
    ),
    Layout("PEFT: dotted suffixes as targets", plain(target_modules=list(SHAPES)).write, SAME),
    Layout("PEFT: all-linear that was not resolved", plain(target_modules="all-linear").write, SAME),
    Layout("PEFT: a regular expression as targets", plain(target_modules=r".*\.(q|k|v|o|gate|up|down)_proj").write, SAME),
    Layout("PEFT: targets that the model never had", plain(target_modules=[*NAMES, "c_attn", "w1"]).write, SAME, warns="c_attn"),
    Layout("PEFT: targets in the tower, which was left out", unused_vision_targets().write, SAME, VLM),
    Layout(
        "PEFT: targets that exclude_modules takes away",
        only_keys(plain(exclude_modules=r".*k_proj"), *(f".{name}." for name in NAMES if name != "k_proj")).write,
        12,
    ),
    Layout("PEFT: a target whose weights are missing", plain().minus("k_proj").write, "no_matching_module"),
    Layout("PEFT: a layer without weights", only_keys(plain(), "layers.1.").write, 7, warns="has weights for 1 of 2 modules"),
    Layout(
        "PEFT: some layers only",
        only_keys(plain(layers_to_transform=[1]), "layers.1.").write,
        7,
    ),
    Layout("PEFT: a further adapter in a subfolder", with_files(plain(), {"other/adapter_config.json": b"{}"}).write, SAME),
    Layout("PEFT: the name of the adapter in the keys", moved(plain(), ".weight", ".tuned.weight").write, SAME),
    Layout(
        "PEFT: factors with and without a name",
        replace(plain(), tensors={**plain().tensors, **moved(plain(), ".weight", ".default.weight").tensors}).write,
        "duplicate_module",
    ),
    Layout("PEFT: two adapters in subfolders", nested(plain(), "sql", "chat"), "ambiguous_folder"),
    Layout("PEFT: one adapter in a subfolder", nested(plain(), "default"), "ambiguous_folder"),
    Layout(
        "PEFT: rank pattern over a regular expression", plain(r=2, rank_pattern={r".*\.layers\.\d+\..*_proj": RANK}).write, SAME
    ),
    Layout(
        "PEFT: rank pattern of full paths",
        plain(r=64, rank_pattern=dict.fromkeys(paths_of(TEXT), RANK)).write,
        SAME,
    ),
    Layout(
        "PEFT: patterns of full paths, keys of another tower name",
        moved(plain(VLM, lora_alpha=2, alpha_pattern=dict.fromkeys(paths_of(VLM), ALPHA)), "model.language_model", "model").write,
        SAME,
        VLM,
    ),
    Layout(
        "PEFT: the first pattern that matches counts",
        plain(alpha_pattern={"_proj": 1, r"[a-z_]+_proj": ALPHA, "q_proj": 2}, lora_alpha=1).write,
        SAME,
        warns="overlap",
    ),
    Layout("PEFT: a pattern ends at a dot", plain(alpha_pattern={"proj": 1, "_proj": 1}).write, SAME, warns="matches no module"),
    Layout("PEFT: alpha as a float", plain(lora_alpha=16.0).write, SAME),
    Layout("PEFT: r as a float", plain(r=4.0).write, SAME),
    Layout("PEFT: r as half a float", plain(r=4.5).write, "config_invalid"),
    Layout("PEFT: r as text", plain(r="4").write, "config_invalid"),
    Layout("PEFT: alpha of null", plain(lora_alpha=None).write, "config_invalid"),
    Layout("PEFT: alpha as text", plain(lora_alpha="16").write, "config_invalid"),
    Layout("PEFT: a configuration with a BOM", edited_json(plain(), CONFIG, lambda data: b"\xef\xbb\xbf" + data), SAME),
    Layout(
        "PEFT: a configuration in UTF-16",
        edited_json(plain(), CONFIG, lambda data: data.decode().encode("utf-16")),
        "config_invalid",
    ),
    Layout("PEFT: a configuration of zero bytes", edited_json(plain(), CONFIG, lambda data: b""), "config_invalid"),
    Layout("PEFT: the type in small letters", plain(peft_type="lora").write, SAME),
    Layout("PEFT: no type", plain().without("peft_type").write, SAME),
    Layout(
        "PEFT: nothing but what is needed",
        plain()
        .without(
            "bias",
            "use_rslora",
            "use_dora",
            "base_model_name_or_path",
            "modules_to_save",
            "peft_version",
            "rank_pattern",
            "alpha_pattern",
            "peft_type",
        )
        .write,
        SAME,
    ),
    Layout("PEFT: rsLoRA", plain(use_rslora=True, lora_alpha=8).write, SAME),
    Layout("PEFT: saved by a newer release", plain(peft_version="9.9.9", some_new_field={"a": 1}).write, SAME),
    Layout("PEFT: DoRA", plain(use_dora=True).write, "dora_unsupported"),
    Layout(
        "PEFT: DoRA by its keys only",
        plain().with_tensor(f"{PREFIX}{Q0}.lora_magnitude_vector.weight", zeros(16)).write,
        "dora_unsupported",
    ),
    Layout("PEFT: a bias of the factors", plain(lora_bias=True).write, "lora_bias_unsupported"),
    Layout("PEFT: biases", plain(bias="lora_only").write, "extra_weights"),
    Layout("PEFT: biases by their keys only", plain().with_tensor(f"{PREFIX}{Q0}.bias", zeros(16)).write, "extra_weights"),
    Layout("PEFT: saved modules", plain(modules_to_save=["lm_head"]).write, "extra_weights"),
    Layout(
        "PEFT: saved modules by their keys only",
        plain().with_tensor(f"{PREFIX}lm_head.weight", zeros(32, 16)).write,
        "extra_weights",
    ),
    Layout(
        "PEFT: saved modules inside a wrapper",
        plain().with_tensor(f"{PREFIX}score.modules_to_save.default.weight", zeros(2, 16)).write,
        "extra_weights",
    ),
    Layout(
        "PEFT: a resized vocabulary without a word in the configuration",
        plain().with_tensor(f"{PREFIX}model.embed_tokens.weight", zeros(40, 16)).write,
        "extra_weights",
    ),
    Layout(
        "PEFT: trained tokens",
        plain().with_tensor(f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta", zeros(2, 16)).write,
        "extra_weights",
    ),
    Layout("PEFT: activated LoRA", plain(alora_invocation_tokens=[1, 2]).write, "alora_unsupported"),
    Layout("PEFT: replicated layers", plain(layer_replication=[[0, 1], [0, 2]]).write, "layer_replication_unsupported"),
    Layout("PEFT: PiSSA", plain(init_lora_weights="pissa").write, "base_changing_init"),
    Layout("PEFT: OLoRA", plain(init_lora_weights="olora").write, "base_changing_init"),
    Layout("PEFT: CorDA", plain(init_lora_weights="corda").write, "base_changing_init"),
    Layout("PEFT: LoftQ", plain(init_lora_weights="loftq", loftq_config={"loftq_bits": 4}).write, "base_changing_init"),
    Layout("PEFT: EVA leaves the base alone", plain(init_lora_weights="eva").write, SAME),
    Layout("PEFT: an adapter of IA3", plain(peft_type="IA3").write, "peft_type_unsupported"),
    Layout(
        "PEFT: prompt tuning",
        lambda path: replace(plain(peft_type="PROMPT_TUNING"), tensors={"prompt_embeddings": zeros(8, 16)}).write(path),
        "peft_type_unsupported",
    ),
    Layout(
        "PEFT: LoHa by its keys only",
        plain().with_tensor(f"{PREFIX}{Q0}.hada_w1_a", zeros(4, 4)).write,
        "peft_type_unsupported",
    ),
    Layout("PEFT: a rank that the tensors do not have", plain(r=8).write, "rank_mismatch"),
    Layout("PEFT: a rank over the limit", plain(rank=16).write, "rank_too_large"),
    Layout(
        "PEFT: one module's rank over the limit",
        pair(plain(rank_pattern={"layers.1.mlp.up_proj": 16}), "model.layers.1.mlp.up_proj", 16, 24, rank=16).write,
        "rank_too_large",
    ),
    Layout("PEFT: a smaller sibling", plain().write, "shape_mismatch", contract_of("model", wider=2)),
    Layout("PEFT: a larger sibling", plain(contract_of("model", wider=2)).write, "shape_mismatch"),
    Layout("PEFT: a deeper sibling", plain(contract_of("model", layers=4)).write, "extra_layers"),
    Layout(
        "PEFT: another vocabulary's head",
        pair(plain(target_modules=[*NAMES, "lm_head"]), "lm_head", 16, 40).write,
        "shape_mismatch",
        HEADED,
    ),
    Layout("PEFT: a factor of the head", pair(plain(target_modules=[*NAMES, "lm_head"]), "lm_head", 16, 32).write, 15, HEADED),
    Layout(
        "PEFT: a factor of the head that the base does not take",
        pair(plain(target_modules=[*NAMES, "lm_head"]), "lm_head", 16, 32).write,
        "extra_tensors",
    ),
    Layout(
        "PEFT: embeddings with a copy of the base's",
        plain(target_modules=[*NAMES, "embed_tokens"])
        .with_tensor(f"{PREFIX}model.embed_tokens.lora_embedding_A", np.ones((RANK, 32), np.float32))
        .with_tensor(f"{PREFIX}model.embed_tokens.lora_embedding_B", np.ones((16, RANK), np.float32))
        .with_tensor(f"{PREFIX}model.embed_tokens.base_layer.weight", zeros(32, 16))
        .write,
        15,
        HEADED,
        rules=("drop-copies",),
        warns="copies",
    ),
    Layout(
        "PEFT: NaN in one value", replaced(plain(), f"{PREFIX}{Q0}.lora_A.weight", first_value(np.nan)).write, "adapter_corrupt"
    ),
    Layout(
        "PEFT: all of B zero",
        replace(plain(), tensors={key: value * ("lora_A" in key) for key, value in plain().tensors.items()}).write,
        "changes_nothing",
    ),
    Layout(
        "PEFT: half of the pairs zero",
        replace(
            plain(), tensors={key: value * ("lora_A" in key or "layers.0" in key) for key, value in plain().tensors.items()}
        ).write,
        14,
    ),
    Layout("PEFT: mixed dtypes", replace(plain(), dtypes={f"{PREFIX}{Q0}.lora_A.weight": "BF16"}).write, SAME),
    Layout("PEFT: float16 stays", replace(plain(), dtype="F16").write, 14),
    Layout(
        "PEFT: float16 that overflows when it is scaled",
        replace(replaced(plain(), f"{PREFIX}{Q0}.lora_B.weight", first_value(60_000)), dtype="F16").write,
        "overflow",
    ),
    Layout("PEFT: an 8-bit factor", replace(plain(), dtypes={f"{PREFIX}{Q0}.lora_A.weight": "I8"}).write, "dtype_unsupported"),
    Layout("PEFT: a base name of somebody's disk", plain(base_model_name_or_path="/home/ann/models/base").write, SAME),
    Layout(
        "PEFT: a headless model", moved(plain(), f"{PREFIX}model.layers", f"{PREFIX}layers").write, SAME, rules=("lift-headless",)
    ),
    Layout("PEFT: no prefix", moved(plain(), PREFIX, "").write, SAME, rules=("add-prefix",)),
    Layout("PEFT: wrapped and saved again", moved(plain(), PREFIX, PREFIX * 2).write, SAME, rules=("strip-wrappers",)),
    Layout(
        "PEFT: inside a trainer's own class", plain().renamed(lambda key: f"policy.{key}").write, SAME, rules=("strip-wrappers",)
    ),
    Layout(
        "PEFT: text and tower names at once",
        replace(plain(VLM), tensors={**plain(VLM).tensors, **moved(plain(VLM), "model.language_model", "model").tensors}).write,
        "duplicate_module",
        VLM,
    ),
    Layout("PEFT: hand-made names", moved(plain(VLM), "model.language_model", "language_model").write, SAME, VLM),
    Layout("PEFT: vision factors, tower not served", with_vision(VLM).write, "vision_keys_not_served", VLM),
    Layout("PEFT: vision factors, tower served", with_vision(VLM_SERVED).write, 15, VLM_SERVED),
    Layout(
        "PEFT: vision factors under the old name",
        with_vision(VLM_SERVED, VISION_MODULE.removeprefix("model.")).write,
        15,
        VLM_SERVED,
    ),
    Layout(
        "PEFT: vision factors dropped on request",
        with_vision(VLM).write,
        SAME,
        VLM,
        PublishOptions(drop=frozenset({"vision"})),
        rules=("drop-vision",),
        warns="LOSSY",
    ),
    Layout("PEFT: vision factors for a text base", with_vision(TEXT).write, "vision_keys_not_served"),
    Layout("PEFT: only vision factors", only_keys(with_vision(VLM), "visual").write, "vision_keys_not_served", VLM),
    Layout(
        "PEFT: only vision factors, dropped",
        only_keys(with_vision(VLM), "visual").write,
        "no_tensors",
        VLM,
        PublishOptions(drop=frozenset({"vision"})),
    ),
]

TRAINERS = [
    Layout("TRL: a checkpoint", with_files(plain(), TRAINER_FILES, TOKENIZER).write, SAME, warns="chat template"),
    Layout("TRL: DPO with its reference", with_files(plain(), {"reference/adapter_config.json": b"{}"}).write, SAME),
    Layout("TRL: a run's folder with checkpoints only", nested(plain(), "checkpoint-500", "checkpoint-1000"), "ambiguous_folder"),
    Layout(
        "TRL: a run's folder with a final adapter",
        lambda path: (plain().write(path), nested(plain(seed=1), "checkpoint-500")(path)),
        SAME,
    ),
    Layout(
        "TRL: a reward model",
        plain(task_type="SEQ_CLS", modules_to_save=["classifier", "score"])
        .with_tensor(f"{PREFIX}score.weight", zeros(1, 16))
        .write,
        "extra_weights",
    ),
    Layout(
        "TRL: ZeRO-3 left no tensors",
        edited_json(plain(), WEIGHTS, lambda data: (32).to_bytes(8, "little") + b'{"__metadata__":{"format":"pt"}}'),
        "no_tensors",
    ),
    Layout(
        "Unsloth: a 4-bit base",
        with_files(
            plain(
                base_model_name_or_path="unsloth/base-bnb-4bit", auto_mapping={"base_model_class": "Qwen3", "unsloth_fixed": True}
            ),
            TOKENIZER,
        ).write,
        SAME,
        warns="4 bits",
        source="Unsloth",
    ),
    Layout(
        "Unsloth: a base in a cache folder",
        plain(base_model_name_or_path="/home/ann/.cache/huggingface/hub/models--x/snapshots/abc").write,
        SAME,
    ),
    Layout("Unsloth: a vision model's expression", plain(VLM, target_modules=REGEX_OF_UNSLOTH).write, SAME, VLM),
    Layout("Unsloth: the base's config beside it", with_files(plain(), BASE_CONFIG, TOKENIZER).write, SAME),
    Layout(
        "Unsloth: continued pretraining",
        plain(modules_to_save=["embed_tokens", "lm_head"]).with_tensor(f"{PREFIX}model.embed_tokens.weight", zeros(32, 16)).write,
        "extra_weights",
    ),
    Layout(
        "Unsloth: a merged model beside it",
        with_files(plain(), {"model-00001-of-00002.safetensors": b"x"}, BASE_CONFIG).write,
        SAME,
        warns="full model",
    ),
    Layout(
        "axolotl: a run",
        with_files(plain(rank_pattern={}, alpha_pattern={}, layer_replication=None), BASE_CONFIG, TOKENIZER).write,
        SAME,
    ),
    Layout("axolotl: shards with an index", replace(plain(), shards=2).write, SAME, rules=("merge-shards",)),
    Layout(
        "axolotl: shards, the index with the model's names",
        edited_json(replace(plain(), shards=2), INDEX, lambda data: data.replace(b"adapter_model-", b"model-")),
        SAME,
        rules=("merge-shards",),
    ),
    Layout(
        "axolotl: the index renamed, the shards not",
        renamed_files(replace(plain(), shards=2), lambda name: name.replace("adapter_model-", "model-")),
        SAME,
        rules=("merge-shards",),
    ),
    Layout(
        "axolotl: shards that were not renamed, no index",
        renamed_files(replace(plain(), shards=2, index=False), lambda name: name.replace("adapter_model-", "model-")),
        "no_tensors",
    ),
    Layout(
        "axolotl: a merged file that was not renamed",
        renamed_files(plain(), lambda name: name.replace("adapter_model", "model")),
        "no_tensors",
    ),
    Layout("axolotl: an empty shard", lambda path: (replace(plain(), shards=3).write(path), _empty_last_shard(path)), SAME),
    Layout(
        "axolotl: a lost shard",
        lambda path: (replace(plain(), shards=3).write(path), (path / "adapter_model-00002-of-00003.safetensors").unlink()),
        "incomplete_shards",
    ),
    Layout(
        "axolotl: an index without shards",
        lambda path: (
            plain().write(path),
            (path / WEIGHTS).rename(path / "x"),
            (path / "x").unlink(),
            (path / INDEX).write_text("{}"),
        ),
        "incomplete_shards",
    ),
    Layout(
        "axolotl: an index of another run",
        edited_json(replace(plain(), shards=2), INDEX, lambda data: data.replace(b"q_proj", b"x_proj")),
        "incomplete_shards",
    ),
    Layout(
        "axolotl: shards of two runs",
        lambda path: (
            replace(plain(), shards=2, index=False).write(path),
            replace(plain(seed=1), shards=3, index=False).write(path),
        ),
        "ambiguous_folder",
    ),
    Layout(
        "axolotl: a single file beside shards",
        lambda path: (plain().write(path), replace(plain(), shards=2).write(path)),
        "ambiguous_folder",
    ),
    Layout(
        "LLaMA-Factory: a run",
        with_files(plain(), TRAINER_FILES, TOKENIZER, {"all_results.json": b"{}", "training_loss.png": b"x"}).write,
        SAME,
    ),
    Layout("LLaMA-Factory: full paths on a vision model", plain(VLM, target_modules=paths_of(VLM)).write, SAME, VLM),
    Layout(
        "LLaMA-Factory: full paths in the old tower's names",
        plain(VLM, target_modules=[path.replace("model.language_model", "language_model.model") for path in paths_of(VLM)]).write,
        SAME,
        VLM,
    ),
    Layout("LLaMA-Factory: a resized vocabulary", plain(modules_to_save=["embed_tokens", "lm_head"]).write, "extra_weights"),
    Layout(
        "LLaMA-Factory: PiSSA, its own folder",
        with_files(plain(), {"pissa_init/adapter_config.json": b"{}", "pissa_converted/adapter_config.json": b"{}"}).write,
        "base_changing_init",
    ),
    Layout("LLaMA-Factory: PiSSA, converted", plain(lora_alpha=ALPHA, init_lora_weights=True).write, SAME),
    Layout(
        "ms-swift: a run",
        with_files(
            plain(modules_to_save=[]), {"additional_config.json": b"{}", "args.json": b"{}", "training_args.bin": b"x"}
        ).write,
        SAME,
        source="ms-swift",
    ),
    Layout(
        "ms-swift: a look-ahead over the tower",
        plain(VLM, target_modules=r"^(model.language_model(?=\.).*\.(q_proj|k_proj|v_proj))$", modules_to_save=[]).write,
        SAME,
        VLM,
    ),
    Layout("ms-swift: a trained tower", with_files(plain(VLM), {"vit.safetensors": b"x"}).write, "extra_weights", VLM),
    Layout(
        "ms-swift: a trained tower, dropped",
        with_files(plain(VLM), {"vit.safetensors": b"x"}).write,
        SAME,
        VLM,
        PublishOptions(drop=frozenset({"vision"})),
        warns="LOSSY",
    ),
    Layout("ms-swift: LoRA-GA, not converted", plain(init_lora_weights="lora-ga").write, "base_changing_init"),
    Layout(
        "ms-swift: OLoRA with a converted one inside",
        with_files(plain(), {"converted/default/adapter_config.json": b"{}"}).write,
        "base_changing_init",
    ),
    Layout(
        "verl: a run",
        with_files(plain(base_model_name_or_path="").without("peft_version"), {"lora_train_meta.json": b"{}"}).write,
        SAME,
        source="verl",
    ),
    Layout("verl: alpha lost", plain(lora_alpha=0, base_model_name_or_path="").write, "scale_zero"),
    Layout("verl: alpha lost and given again", plain(lora_alpha=0).write, SAME, options=PublishOptions(alpha=ALPHA)),
    Layout(
        "verl: FSDP names left in",
        moved(plain(), f"{PREFIX}model.", f"_fsdp_wrapped_module.{PREFIX}_fsdp_wrapped_module.model.").write,
        SAME,
    ),
    Layout("verl: an actor's checkpoint", nested(plain(), "actor/lora_adapter"), "ambiguous_folder"),
    Layout("OpenRLHF: a run", with_files(plain(), BASE_CONFIG, TOKENIZER).write, SAME),
    Layout(
        "OpenRLHF: ZeRO-3 leaves a pickle only",
        renamed_files(plain(), lambda name: name.replace("safetensors", "bin")),
        "pickle_refused",
    ),
    Layout(
        "SkyRL: a policy export",
        with_files(
            plain(VLM, runtime_config={"ephemeral_gpu_offload": False}),
            BASE_CONFIG,
            TOKENIZER,
            {"preprocessor_config.json": b"{}"},
        ).write,
        SAME,
        VLM,
        source="SkyRL",
    ),
    Layout(
        "SkyRL: a text-only export of a vision model",
        moved(plain(VLM), "model.language_model", "model").write,
        SAME,
        VLM,
        rules=("remap-tower",),
    ),
    Layout("SkyRL: a checkpoint", nested(plain(), "policy/lora_adapter"), "ambiguous_folder"),
    Layout("SkyRL: the adapter of a checkpoint", plain(runtime_config={}).write, SAME),
    Layout(
        "prime-rl: as little as possible",
        replace(plain(), config={"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": NAMES}).write,
        SAME,
    ),
    Layout(
        "torchtune: four keys",
        replace(
            plain(),
            config={"r": RANK, "lora_alpha": ALPHA, "target_modules": NAMES, "peft_type": "LORA"},
            files={"adapter_model.pt": b"x", "ft-model-00001-of-00001.safetensors": b"x"},
        ).write,
        SAME,
        warns="pickle",
    ),
    Layout(
        "torchtune: only its own file", renamed_files(plain(), lambda name: name.replace("safetensors", "pt")), "pickle_refused"
    ),
    Layout(
        "HF: a download that was broken off",
        lambda path: (
            with_files(plain(), {".cache/huggingface/download/x.incomplete": b"x"}).write(path),
            (path / WEIGHTS).unlink(),
        ),
        "not_downloaded",
    ),
    Layout("HF: only some other broken file", bare(adapter_config__json=b"{}", notes__safetensors=b"x"), "no_tensors"),
    Layout("HF: weights of zero bytes", edited_json(plain(), WEIGHTS, lambda data: b""), "no_tensors"),
    Layout(
        "PEFT: AdaLoRA by its keys only", plain().with_tensor(f"{PREFIX}{Q0}.lora_E", zeros(4, 1)).write, "peft_type_unsupported"
    ),
    Layout(
        "TRL: a tokenizer of another vocabulary",
        with_files(plain(), {"added_tokens.json": b'{"<|new|>": 40}'}).write,
        14,
        HEADED,
        warns="41 tokens",
    ),
    Layout("TRL: a tokenizer that fits", with_files(plain(), {"added_tokens.json": b'{"<|end|>": 31}'}).write, 14, HEADED),
    Layout(
        "torchtune: its own names",
        replace(plain(), tensors={"layers.0.attn.q_proj.lora_a.weight": zeros(4, 16)}).write,
        "foreign_format",
    ),
    Layout("torchtune: a folder called adapter_model", with_files(plain(), {"adapter_model/x.json": b"{}"}).write, SAME),
    Layout(
        "accelerate: FSDP2's flat pieces", plain().with_tensor(f"{PREFIX}{Q0}.lora_A.weight", zeros(32)).write, "sharded_tensor"
    ),
    Layout(
        "accelerate: FSDP2's empty pieces",
        plain().with_tensor(f"{PREFIX}{Q0}.lora_A.weight", zeros(0, 16)).write,
        "sharded_tensor",
    ),
    Layout(
        "FSDP: flat parameters",
        plain().with_tensor("_fsdp_wrapped_module._flat_param", zeros(99)).write,
        "sharded_tensor",
    ),
    Layout(
        "accelerate: rank 0's rows of A", plain().with_tensor(f"{PREFIX}{Q0}.lora_A.weight", zeros(2, 16)).write, "rank_mismatch"
    ),
    Layout(
        "accelerate: rank 0's rows of B",
        plain().with_tensor(f"{PREFIX}{Q0}.lora_B.weight", np.ones((8, 4), np.float32)).write,
        "shape_mismatch",
    ),
    Layout("accelerate: a distributed checkpoint", bare(adapter_config__json=b"{}", __0_0__distcp=b"x"), "pickle_refused"),
    Layout("DDP", plain().renamed(lambda key: f"module.{key}").write, SAME, rules=("strip-wrappers",)),
    Layout("torch.compile", moved(plain(), f"{PREFIX}model", f"{PREFIX}_orig_mod.model").write, SAME, rules=("strip-wrappers",)),
    Layout(
        "torch.compile of each layer",
        plain().renamed(lambda key: key.replace(".self_attn", "._orig_mod.self_attn").replace(".mlp", "._orig_mod.mlp")).write,
        SAME,
    ),
    Layout(
        "compiled layers with patterns of full paths",
        plain(lora_alpha=1, alpha_pattern=dict.fromkeys(paths_of(TEXT), ALPHA))
        .renamed(lambda key: key.replace(".self_attn", "._orig_mod.self_attn").replace(".mlp", "._orig_mod.mlp"))
        .write,
        SAME,
    ),
    Layout(
        "Megatron",
        replace(plain(), tensors={"decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight": zeros(4, 16)}).write,
        "foreign_format",
    ),
    Layout(
        "mlx-lm",
        bare(
            adapters__safetensors={"model.layers.0.self_attn.q_proj.lora_a": zeros(16, 4)},
            adapter_config__json=b'{"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 4}}',
        ),
        "foreign_format",
    ),
    Layout(
        "mlx-lm: its names in our file",
        plain().renamed(lambda key: key.replace("lora_A.weight", "lora_a").replace("lora_B.weight", "lora_b")).write,
        "foreign_format",
    ),
    Layout(
        "kohya: a single file",
        bare(style__safetensors={"lora_unet_mid.lora_down.weight": zeros(4, 4), "lora_unet_mid.alpha": zeros(1)}),
        "foreign_format",
    ),
    Layout(
        "kohya: its names in our file, no configuration",
        bare(adapter_model__safetensors={"lora_te_text_model.lora_up.weight": zeros(4, 4)}),
        "foreign_format",
    ),
    Layout("diffusers", bare(pytorch_lora_weights__safetensors={"unet.mid.lora.down.weight": zeros(4, 4)}), "foreign_format"),
    Layout(
        "diffusers: PEFT's names",
        replace(
            plain(target_modules=["to_q"]),
            tensors={
                "transformer.blocks.0.attn.to_q.lora_A.weight": zeros(4, 16),
                "transformer.blocks.0.attn.to_q.lora_B.weight": zeros(16, 4),
            },
        ).write,
        "foreign_format",
    ),
    Layout("HF: a snapshot of links", snapshot(plain()), SAME),
    Layout("HF: a snapshot whose weights were not fetched", snapshot(plain(), missing=WEIGHTS), "not_downloaded"),
    Layout("HF: a snapshot whose configuration was not fetched", snapshot(plain(), missing=CONFIG), "not_downloaded"),
    Layout(
        "HF: a download",
        with_files(plain(), {".gitattributes": b"x", ".cache/huggingface/download/adapter_config.json.metadata": b"x"}).write,
        SAME,
    ),
    Layout("HF: a pointer for weights", edited_json(plain(), WEIGHTS, lambda data: POINTER), "not_downloaded"),
    Layout("HF: a pointer for the configuration", edited_json(plain(), CONFIG, lambda data: POINTER), "not_downloaded"),
    Layout(
        "HF: a pointer for a shard",
        edited_json(replace(plain(), shards=2), "adapter_model-00002-of-00002.safetensors", lambda data: POINTER),
        "not_downloaded",
    ),
    Layout("HF: the whole cache", nested(plain(), "models--acme--tuned/snapshots/abc"), "ambiguous_folder"),
    Layout("HF: a cut-off download", edited_json(plain(), WEIGHTS, lambda data: data[: len(data) // 2]), "adapter_corrupt"),
    Layout(
        "a merged model is no adapter",
        bare(model__safetensors={"model.embed_tokens.weight": zeros(4, 4)}, config__json=b"{}"),
        "no_tensors",
    ),
    Layout(
        "weights without a configuration",
        bare(adapter_model__safetensors={f"{PREFIX}{Q0}.lora_A.weight": zeros(4, 16)}),
        "config_invalid",
    ),
]

MOE = [
    *(
        Layout(
            f"experts: {layout} on a base of {base}",
            experts_adapter(layout, version="0.18.1" if layout == "swapped" else "0.21.2").write,
            SAME,
            contract,
            plain=EXPERTS_PLAIN,
        )
        for layout in ("stacked", "swapped", "reversed", "named", "single", "mixtral")
        for base, contract in (("one module", STACKED), ("single linears", SINGLE))
        if layout != "mixtral" or contract is STACKED
    ),
    Layout(
        "experts: rsLoRA is folded",
        experts_adapter("stacked", use_rslora=True, lora_alpha=8).write,
        SAME,
        STACKED,
        plain=EXPERTS_PLAIN,
        warns="rsLoRA",
    ),
    Layout(
        "experts: alpha by the parameter's path",
        experts_adapter(
            "stacked", lora_alpha=1, alpha_pattern={r"experts\.(gate_up|down)_proj": ALPHA, "[qkvo]_proj": ALPHA}
        ).write,
        SAME,
        STACKED,
        plain=EXPERTS_PLAIN,
    ),
    *(
        Layout(
            f"experts: {layout}, text names on a vision-language base",
            experts_adapter(layout).write,
            SAME,
            MOE_VLM,
            plain=moved(EXPERTS_PLAIN, "model.layers", "model.language_model.layers"),
            rules=("remap-tower",),
        )
        for layout in ("stacked", "swapped", "single")
    ),
    Layout("experts: attention alone", attention_only().write, 8, STACKED),
    Layout("experts: attention alone, generic targets", attention_only().configured(target_modules=NAMES).write, 8, SINGLE),
    Layout(
        "experts: half a pair, stacked",
        experts_adapter("stacked").minus("experts.base_layer").write,
        "moe_layout_unsupported",
        STACKED,
    ),
    Layout(
        "experts: half a pair, split", experts_adapter("stacked").minus("experts.lora").write, "moe_layout_unsupported", SINGLE
    ),
    Layout(
        "experts: a linear missing everywhere",
        experts_adapter("single").minus(".up_proj").write,
        "moe_layout_unsupported",
        SINGLE,
    ),
    Layout("experts: one expert missing", experts_adapter("single").minus("experts.1.").write, "moe_layout_unsupported", STACKED),
    Layout(
        "experts: one expert too many",
        pair(experts_adapter("single"), "model.layers.0.mlp.experts.7.gate_proj", HIDDEN, INNER).write,
        "moe_layout_unsupported",
        SINGLE,
    ),
    Layout(
        "experts: rank of another configuration",
        experts_adapter("stacked", r=8, rank_pattern={"[qkvo]_proj": RANK}).write,
        "rank_mismatch",
        STACKED,
    ),
    Layout(
        "experts: other widths",
        experts_adapter("stacked").write,
        "shape_mismatch",
        replace(
            STACKED,
            modules={
                path: replace(shape, in_features=shape.in_features * 2) if "experts" in path else shape
                for path, shape in STACKED.modules.items()
            },
        ),
    ),
    Layout("experts: on a dense base", experts_adapter("stacked").write, "moe_layout_unsupported", TEXT),
    Layout("experts: single on a dense base", experts_adapter("single").write, "moe_layout_unsupported", TEXT),
    Layout(
        "experts: single on gpt-oss",
        experts_adapter("single").write,
        "moe_layout_unsupported",
        moe_contract(stacked=True, gpt_oss=True),
    ),
    Layout(
        "experts: stacked on gpt-oss",
        experts_adapter("stacked").write,
        SAME,
        moe_contract(stacked=True, gpt_oss=True),
        plain=EXPERTS_PLAIN,
    ),
    Layout(
        "experts: a layer too many",
        experts_adapter("single").renamed(lambda key: key.replace("layers.1.", "layers.9.")).write,
        "extra_layers",
        SINGLE,
    ),
    Layout(
        "experts: NaN in one of them",
        replaced(EXPERTS_PLAIN, f"{PREFIX}model.layers.0.mlp.experts.lora_B.weight", first_value(np.nan)).write,
        "adapter_corrupt",
        SINGLE,
    ),
    Layout(
        "Tinker: shared factors",
        attention_only()
        .with_tensor(f"{PREFIX}model.layers.0.mlp.experts.w1.lora_A.weight", zeros(1, 4, 16))
        .with_tensor(f"{PREFIX}model.layers.0.mlp.experts.w1.lora_B.weight", zeros(3, 12, 4))
        .write,
        "moe_layout_unsupported",
        SINGLE,
    ),
    Layout(
        "Tinker: targets of null",
        experts_adapter("single", version=None).configured(target_modules=None).write,
        SAME,
        SINGLE,
        plain=EXPERTS_PLAIN,
    ),
    Layout(
        "prime-rl: one key per expert",
        replace(experts_adapter("single"), config={"r": RANK, "lora_alpha": ALPHA, "target_modules": NAMES}).write,
        SAME,
        SINGLE,
        plain=EXPERTS_PLAIN,
    ),
    Layout("Megatron: experts of SkyRL, names rewritten", experts_adapter("single").write, SAME, SINGLE, plain=EXPERTS_PLAIN),
]

FUSED_LAYOUTS = [
    Layout("fused: on a base of the same", FUSED_PLAIN.write, 8, FUSED),
    Layout("fused: on a base of parts", FUSED_PLAIN.write, SAME, TEXT, plain=split_by_hand(FUSED_PLAIN), rules=("split-fused",)),
    Layout(
        "fused: parts with one A on a fused base",
        split_by_hand(FUSED_PLAIN).write,
        SAME,
        FUSED,
        plain=FUSED_PLAIN,
        rules=("join-fused",),
    ),
    Layout("fused: parts on a fused base", plain().write, SAME, FUSED, plain=joined_by_hand(plain()), rules=("join-fused",)),
    Layout("fused: ranks that add up to more than the limit", plain(rank=8).write, "rank_too_large", FUSED),
    Layout(
        "fused: q and v alone on a fused base",
        only_keys(plain(target_modules=["q_proj", "v_proj"]), "q_proj", "v_proj").write,
        2,
        FUSED,
    ),
    Layout("fused: k alone on a fused base", only_keys(plain(target_modules=["k_proj"]), "k_proj").write, 2, FUSED),
    Layout(
        "fused: widths that do not add up",
        pair(
            plain(target_modules=[*NAMES, "qkv_proj"])
            .minus("layers.0.self_attn.q_proj")
            .minus("layers.0.self_attn.k_proj")
            .minus("layers.0.self_attn.v_proj"),
            "model.layers.0.self_attn.qkv_proj",
            16,
            40,
        ).write,
        "shape_mismatch",
    ),
    Layout(
        "SkyRL: Megatron's names as targets",
        plain(target_modules=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]).write,
        SAME,
    ),
    Layout(
        "fused: and a part beside it",
        pair(plain(target_modules=[*NAMES, "qkv_proj"]), "model.layers.0.self_attn.qkv_proj", 16, 32).write,
        "duplicate_module",
    ),
    Layout(
        "fused: alpha of the fused name",
        replace(
            FUSED_PLAIN.configured(
                lora_alpha=1, alpha_pattern={"qkv_proj": ALPHA, "gate_up_proj": ALPHA, "o_proj": ALPHA, "down_proj": ALPHA}
            )
        ).write,
        SAME,
        TEXT,
        plain=split_by_hand(FUSED_PLAIN),
    ),
]


def _empty_last_shard(path: Path) -> None:
    """Moves what the last shard holds to the first, as a merge over too many ranks does."""
    index = json.loads((path / INDEX).read_text())
    first, last = "adapter_model-00001-of-00003.safetensors", "adapter_model-00003-of-00003.safetensors"
    kept = [key for key, file in index["weight_map"].items() if file != "adapter_model-00002-of-00003.safetensors"]
    tensors = {key: plain().tensors[key] for key in kept}
    (path / first).write_bytes(safetensors_bytes(tensors, dict.fromkeys(tensors, "F32")))
    (path / last).write_bytes(safetensors_bytes({}, {}))
    index["weight_map"].update(dict.fromkeys(kept, first))
    (path / INDEX).write_text(json.dumps(index))


def archived(folder: AdapterFolder, name: str, below: str) -> Callable[[Path], None]:
    """The folder as one file, as services hand it out; `name` is its name in the folder that is written."""

    def write(path: Path) -> None:
        inside = folder.write(path.parent / f"{path.name}-inside")
        path.mkdir(parents=True)
        if name.endswith(".zip"):
            with zipfile.ZipFile(path / name, "w") as archive:
                for file in sorted(inside.iterdir()):
                    archive.write(file, f"{below}{file.name}")
            return
        with tarfile.open(path / name, "w:gz" if name.endswith("gz") else "w") as tar:
            for file in sorted(inside.iterdir()):
                tar.add(file, f"{below}{file.name}")

    return write


# The source is the file in the folder, not the folder.
ARCHIVES = [
    Layout("Tinker: a tar.gz", archived(plain(target_modules=None), "adapter.tar.gz", ""), SAME),
    Layout("SkyRL JAX: a tar.gz with a folder", archived(plain(target_modules=None), "ckpt.tar.gz", "lora_adapter/"), SAME),
    Layout("a zip from a desktop", archived(plain(), "adapter.zip", "tuned/"), SAME),
    Layout("a plain tar", archived(plain(), "adapter.tar", "./"), SAME),
]

LAYOUTS = [*PEFT, *TRAINERS, *MOE, *FUSED_LAYOUTS]
