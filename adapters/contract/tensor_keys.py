"""The grammar of tensor names in adapter files: which module, which factor, and which odd clothes the name wears.

The canonical form is `base_model.model.<module path>.lora_A.weight` (embeddings: `.lora_embedding_A`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PREFIX = "base_model.model."
MODULE_WRAPPER = "module"

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
_WRAPPER_PART = re.compile(rf"(?<![^.^(|])({'|'.join(sorted(_WRAPPERS))})\\?\.")
_LINEAR = re.compile(r"(?P<path>.+)\.lora_(?P<side>[AB])(?:\.(?P<name>[^.]+))?\.weight")
_EMBEDDING = re.compile(r"(?P<path>.+)\.lora_embedding_(?P<side>[AB])(?:\.(?P<name>[^.]+))?")
_BASE_COPY = re.compile(r"(.*\.)?(embed_tokens|lm_head)\.base_layer\.weight")

# Left by training and without a part in the answers: VeLoRA compresses what the backward pass keeps.
_TRAINING_STATE = re.compile(r".+\.lora_velora_embed(\.[^.]+)?")

# In this order: the first that occurs in a name decides what the name means.
_OTHER_KEYS = (
    (re.compile(r"lora_magnitude_vector|\.magnitude$"), "dora_unsupported"),
    (re.compile(r"lora_B(\.[^.]+)?\.bias$"), "lora_bias_unsupported"),
    (re.compile(r"trainable_tokens|token_adapter"), "extra_weights"),
    (re.compile(r"_flat_param"), "sharded_tensor"),
    (
        re.compile(
            r"vera_|vblora_|hada_w|lokr_w|ia3_l|oft_[rR]|boft_[rs]|prompt_|randlora_|fourierft_|waveft_|poly_lora|shira_|road_"
            r"|hra_u|c3a_|miss_block|bone_block|xlora_|lora_E(\.|$)|ranknum(\.|$)"
        ),
        "peft_type_unsupported",
    ),
    (re.compile(r"\.lora_[ab](\.|$)|linear_(in|out)\.|lora_(down|up)\.|^lora_(unet|te)|\.lora\.(down|up)\."), "foreign_format"),
    (re.compile(r"experts\.w[123]\.|^unembed\.|\.unembed\."), "moe_layout_unsupported"),
    (re.compile(r"lora_"), "extra_tensors"),
    (re.compile(r"\.(weight|bias)$"), "extra_weights"),
)
_FOREIGN_TOOLS = (
    (re.compile(r"linear_(in|out)\."), "Megatron"),
    (re.compile(r"^lora_(unet|te)|lora_(down|up)\."), "kohya"),
    (re.compile(r"\.lora\.(down|up)\."), "diffusers"),
    (re.compile(r"\.lora_[ab]\.weight$"), "torchtune"),
    (re.compile(r"\.lora_[ab]$"), "mlx-lm"),
)


@dataclass(frozen=True, slots=True)
class FactorKey:
    """A tensor name that is one factor of a module. `path` is free of prefix and wrappers: the path as the trainer's own model
    had it, which the patterns of the configuration refer to."""

    raw: str
    path: str
    side: str
    is_embedding: bool
    adapter_name: str | None
    rules: tuple[str, ...]


def parse_factor(key: str, *, strip_module: bool) -> FactorKey | None:
    """The factor that `key` names, or None if it names something else.

    `strip_module` says that no module of the base is called `module`, so that such a part is DDP's.
    """
    bare = without_wrappers(key)
    match = _LINEAR.fullmatch(bare) or _EMBEDDING.fullmatch(bare)
    if match is None:
        return None
    path, rules = _undressed(match["path"], strip_module)
    if bare != key:
        rules = tuple(dict.fromkeys(("strip-wrappers", *rules)))
    name = match["name"]
    if name is not None:
        rules = (*rules, "strip-name")
    return FactorKey(key, path, match["side"], "lora_embedding_" in key, name, rules)


def clean_path(path: str, *, strip_module: bool) -> str:
    """A module path without prefix and wrappers."""
    return _undressed(path, strip_module)[0]


def without_wrappers(text: str) -> str:
    """A name, or a pattern of names, without what compilers, FSDP and checkpointing put into it."""
    return _WRAPPER_PART.sub("", text)


def canonical_key(path: str, side: str, *, is_embedding: bool) -> str:
    return f"{PREFIX}{path}.lora_embedding_{side}" if is_embedding else f"{PREFIX}{path}.lora_{side}.weight"


def is_base_copy(key: str) -> bool:
    """Whether `key` is a copy of the base's own embedding or head, which PEFT saves beside their factors."""
    return _BASE_COPY.fullmatch(key) is not None


def is_training_state(key: str) -> bool:
    """Whether `key` names what only the training needed."""
    return _TRAINING_STATE.fullmatch(key) is not None


def code_of_other(key: str) -> str:
    """The refusal code for a name that is no factor."""
    return next((code for pattern, code in _OTHER_KEYS if pattern.search(key)), "extra_tensors")


def foreign_tool(key: str) -> str:
    """The tool that names tensors like `key`."""
    return next((tool for pattern, tool in _FOREIGN_TOOLS if pattern.search(key)), "another tool")


def _undressed(path: str, strip_module: bool) -> tuple[str, tuple[str, ...]]:
    parts = path.split(".")
    dropped = _WRAPPERS | {MODULE_WRAPPER} if strip_module else _WRAPPERS
    kept = ".".join(part for part in parts if part not in dropped)
    # A trainer's own classes may stand before the prefix, and a model that was wrapped twice has it twice.
    before, prefix, bare = f".{kept}".rpartition(f".{PREFIX}")
    if not prefix:
        return kept, (*(("strip-wrappers",) if kept != path else ()), "add-prefix")
    return bare, ("strip-wrappers",) if before or kept != path else ()
