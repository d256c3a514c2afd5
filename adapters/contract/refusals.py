"""The codes of the publish contract. One constructor, so that each code has one error class and one standing hint."""

from __future__ import annotations

from typing import Any

from adapters.errors import AdapterCorrupt, AdapterIncompatible, AdapterRefused

CORRUPT_CODES = frozenset(
    {
        "adapter_corrupt",
        "archive_corrupt",
        "config_invalid",
        "incomplete_pair",
        "incomplete_shards",
        "no_tensors",
        "not_downloaded",
        "sharded_tensor",
    }
)

# Every code, with what helps if the place that refuses knows nothing better.
HINTS = {
    "adapter_corrupt": "save or copy it again; if it holds NaN, publish an earlier step",
    "alora_unsupported": "serve it without the invocation tokens, or merge it and serve it as a base",
    "ambiguous_folder": "publish the folder of the one adapter that you mean",
    "archive_corrupt": "pack it again, as .tar, .tar.gz or .zip",
    "archive_too_large": "pack the adapter's two files only",
    "archive_unsafe": "pack plain files: `tar -h` follows links",
    "base_changing_init": "publish the converted adapter: look for `converted/default` or `pissa_converted`",
    "changes_nothing": "was it saved before the first step? allow it explicitly if an adapter without effect is wanted",
    "config_invalid": "save with the adapter's own `save_pretrained`",
    "dora_unsupported": "train without `use_dora`, or merge the adapter and serve it as a base",
    "dtype_unsupported": "save the factors as float32, float16 or bfloat16",
    "duplicate_module": "remove one of the two",
    "extra_layers": "it was trained on a deeper model: publish it to that base",
    "extra_tensors": "publish to the base that the adapter was trained on, and save its factors only",
    "extra_weights": "the engine serves low-rank factors only: merge the adapter and serve it as a base",
    "foreign_format": "use that tool's exporter to PEFT's format",
    "incomplete_pair": "save again, and after gathering if the trainer shards weights",
    "incomplete_shards": "copy all shards and the index, or save as one file",
    "layer_replication_unsupported": "merge the adapter and serve it as a base",
    "lora_bias_unsupported": "train without `lora_bias`",
    "moe_layout_unsupported": "export one pair of factors per expert and projection",
    "no_matching_module": "publish to the base that the adapter was trained on",
    "no_tensors": "save after gathering (ZeRO-3 or FSDP)",
    "not_downloaded": "run `git lfs pull` in the folder",
    "overflow": "publish with the dtype kept, or check alpha",
    "peft_type_unsupported": "train LoRA, or merge the adapter and serve it as a base",
    "pickle_refused": "convert it where it was trained: load it there and save with `safe_serialization=True`",
    "rank_mismatch": "configuration and weights come from different runs, or a pattern is missing",
    "rank_too_large": "train with a smaller rank, or ask for a base with a higher limit",
    "rewrite_needed": "publish without `--strict` to let the named rules rewrite it",
    "scale_zero": "exported by verl without lora_train_meta.json? pass --alpha",
    "shape_mismatch": "the adapter was trained on another size of this model; publish it to that base",
    "sharded_tensor": "save after gathering (ZeRO-3 or FSDP)",
    "too_large": "train with a smaller rank or fewer modules, or ask for a higher limit",
    "vision_keys_not_served": "publish to a base that applies adapters to its vision tower, or leave them out: --drop vision",
    "wrong_base": "publish to the base that the adapter was trained on",
}


def refusal(code: str, message: str, *, limit: Any = None, value: Any = None, hint: str | None = None) -> AdapterRefused:
    """The error of `code`, one of `HINTS`: AdapterCorrupt if the bytes are at fault, else AdapterIncompatible.

    `hint` replaces the standing one. `message`, `limit` and `value` reach clients: they name tensors, modules and numbers,
    never a path.
    """
    kind = AdapterCorrupt if code in CORRUPT_CODES else AdapterIncompatible
    return kind(message, reason=code, limit=limit, value=value, hint=hint or HINTS[code])


def many(count: int, noun: str) -> str:
    """`1 module`, `2 modules`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def shown(text: object, most: int = 120) -> str:
    """Foreign text as it may stand in a message: printable, at most `most` characters."""
    clean = str(text)
    if not clean.isprintable():
        clean = "".join(char if char.isprintable() else "?" for char in clean)
    return clean if len(clean) <= most else clean[: most - 3] + "..."
