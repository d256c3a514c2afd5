"""`adapter_config.json`, read with types: what decides the scale of each module, and what the engine can't serve.

The engine itself reads little of it and forgives much; everything that changes the model must be looked at here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from adapters.contract.refusals import refusal, shown
from adapters.contract.strict_json import parse_object
from adapters.contract.tensor_keys import without_wrappers
from adapters.errors import AdapterRefused
from adapters.types import CONFIG_FILE

MAX_PATTERN_CHARS = 512
MAX_REPEATS_IN_PATTERN = 2
MAX_PATTERN_WORK = 10_000_000
LONG_PATH_CHARS = 100
# The first release whose layout of expert factors is the canonical one.
CANONICAL_PEFT_VERSION = "0.19.0"

# An init of these kinds also changes the base, so the factors alone are not the fine-tune.
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEAT = re.compile(r"[*+}]")
# What runs to the end of a path is found at once.
_ANYTHING_AT_END = re.compile(r"(?<!\\)\.\*\$?$")
# Digits end at the next dot of a path, so repeating them costs nothing.
_REPEATED_DIGITS = re.compile(r"(\\d|\[0-9\])([*+?]|\{\d*,?\d*\})")


@dataclass(frozen=True, slots=True)
class Pattern:
    """One entry of `rank_pattern` or `alpha_pattern`: a regular expression and the value for the modules that it names."""

    text: str
    regex: re.Pattern[str]
    value: float

    @property
    def cost(self) -> int:
        """About how much longer it takes to compare than plain text."""
        return 1 + 30 * len(_repeats(self.text))


class Patterns(tuple[Pattern, ...]):
    """Entries in file order. Each path is compared once: files with an entry for each module are not rare."""

    def __init__(self, entries: Iterable[Pattern] = ()) -> None:
        self._found: dict[str, float | None] = {}

    def value_of(self, *paths: str) -> float | None:
        """PEFT's rule: the first entry that matches the end of the module's path at a dot boundary decides.

        `paths` are the names of one module, the trainer's own first; the next is asked only if no entry knows the one before
        (an exporter may have renamed the keys and not the patterns).
        """
        for path in paths:
            if path not in self._found:
                self._found[path] = next((entry.value for entry in self if entry.regex.fullmatch(path)), None)
            if self._found[path] is not None:
                return self._found[path]
        return None


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields that matter for serving. `target_modules` is None unless the file has a list of names; `chooses_modules` says
    that not all modules of those names were trained, `ties_weights` that embedding and head were trained as one."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Patterns
    alpha_pattern: Patterns
    target_modules: tuple[str, ...] | None
    targets_parameters: bool
    chooses_modules: bool
    ties_weights: bool
    base_name: str | None
    fingerprint: str | None
    peft_version: tuple[int, ...] | None
    raw: Mapping[str, Any]

    @property
    def is_uniform(self) -> bool:
        """Whether one `alpha / r` holds for every module, as the engine assumes."""
        return not (self.use_rslora or self.rank_pattern or self.alpha_pattern)

    def rank_of(self, *paths: str) -> int:
        """The rank that the file gives to the module: see `Patterns.value_of`."""
        found = self.rank_pattern.value_of(*paths)
        return self.rank if found is None else int(found)

    def alphas_of(self, path: str) -> set[float]:
        """The values of all entries that name the module at `path`: more than one means that their order decides."""
        return {pattern.value for pattern in self.alpha_pattern if pattern.regex.fullmatch(path)}

    def scale_of(self, *paths: str) -> float:
        """What B @ A of the module is multiplied by: see `Patterns.value_of`."""
        rank, found = self.rank_of(*paths), self.alpha_pattern.value_of(*paths)
        alpha = self.alpha if found is None else found
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def refuse_pattern_work(config: PeftConfig, paths: Iterable[str]) -> list[AdapterRefused]:
    """Every module is compared with every entry; a hostile file must not keep a machine busy."""
    # The time that repeats take grows with the cube of a path's length; those of models stay below `LONG_PATH_CHARS`.
    lengths = sum((1 + len(path) // LONG_PATH_CHARS) ** 3 for path in paths)
    work = sum(entry.cost for entry in (*config.rank_pattern, *config.alpha_pattern)) * lengths
    if work <= MAX_PATTERN_WORK:
        return []
    text = "there are more entries in the patterns than can be compared with so many modules"
    return [refusal("config_invalid", text, limit=MAX_PATTERN_WORK, value=work, hint="merge entries that give the same value")]


def parse_config(data: bytes) -> dict[str, Any]:
    """The file as an object. Raises `config_invalid`, or `foreign_format` for the same file name of another tool."""
    raw = parse_object(data, what=f"`{CONFIG_FILE}`", code="config_invalid")
    if "fine_tune_type" in raw or "lora_parameters" in raw:
        raise refusal("foreign_format", "this is a configuration of mlx-lm", limit="PEFT", value="mlx-lm")
    kind = raw.get("peft_type", "LORA")
    if str(kind).upper() != "LORA":
        raise refusal("peft_type_unsupported", f"the engine serves LoRA, not {shown(kind)}", limit="LORA", value=shown(kind))
    return raw


def read_config(raw: Mapping[str, Any], *, alpha: float | None = None) -> PeftConfig:
    """The typed view of a parsed file; `alpha` replaces `lora_alpha`. Raises `config_invalid` for wrong or missing values."""
    targets = raw.get("target_modules")
    return PeftConfig(
        rank=int(_number(raw, "r", whole=True)),
        alpha=_number(raw, "lora_alpha") if alpha is None else alpha,
        use_rslora=_flag(raw, "use_rslora"),
        rank_pattern=_patterns(raw, "rank_pattern", whole=True),
        alpha_pattern=_patterns(raw, "alpha_pattern"),
        target_modules=_names(targets) if isinstance(targets, list) else None,
        targets_parameters=bool(raw.get("target_parameters")),
        chooses_modules=any(raw.get(key) not in (None, [], "") for key in ("exclude_modules", "layers_to_transform")),
        ties_weights=bool(raw.get("ensure_weight_tying")),
        base_name=_text(raw, "base_model_name_or_path"),
        fingerprint=_text(raw, "base_fingerprint"),
        peft_version=_version(raw),
        raw=MappingProxyType(dict(raw)),
    )


def feature_refusals(raw: Mapping[str, Any]) -> list[AdapterRefused]:
    """One refusal for each feature in the file that the engine can't serve, or would serve wrongly without a word."""
    found = [refusal(code, text, limit=f"no `{key}`", value=shown(raw[key])) for key, code, text in _FEATURES if raw.get(key)]
    bias = raw.get("bias", "none")
    if bias not in ("none", None):
        found.append(refusal("extra_weights", "biases were trained too (`bias`)", limit="none", value=shown(bias)))
    init = str(raw.get("init_lora_weights", "")).lower().replace("-", "_")
    if init.startswith(_BASE_CHANGING_INITS):
        text = "the adapter's init changed the base's own weights"
        found.append(refusal("base_changing_init", text, limit="an init that leaves the base as it is", value=shown(init)))
    return found


def canonical_config(*, base: str, rank: int, modules: Iterable[str], parameters: Iterable[str] = ()) -> bytes:
    """The one configuration that is published: scale 1, suffix names, nothing about how the adapter was trained.

    `parameters` are those of experts that are one module, in PEFT's way of naming them.
    """
    fields: dict[str, Any] = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "peft_version": CANONICAL_PEFT_VERSION,
        "r": rank,
        "target_modules": sorted(set(modules)),
        "task_type": "CAUSAL_LM",
        "use_rslora": False,
    }
    if parameters:
        fields["target_parameters"] = sorted(set(parameters))
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()


_FEATURES = (
    ("use_dora", "dora_unsupported", "the engine has no DoRA"),
    ("lora_bias", "lora_bias_unsupported", "the engine has no bias on the low-rank path"),
    ("alora_invocation_tokens", "alora_unsupported", "the engine applies an adapter to all tokens"),
    ("layer_replication", "layer_replication_unsupported", "the adapter replicates layers of the base"),
    ("modules_to_save", "extra_weights", "whole modules were trained too (`modules_to_save`)"),
    ("trainable_token_indices", "extra_weights", "token embeddings were trained too (`trainable_token_indices`)"),
    ("use_qalora", "peft_type_unsupported", "the engine has no QA-LoRA"),
    ("use_bdlora", "peft_type_unsupported", "the engine has no block-diagonal LoRA"),
    ("arrow_config", "peft_type_unsupported", "the engine does not route between adapters"),
    ("kasa_config", "peft_type_unsupported", "the engine has no KaSA"),
    ("monteclora_config", "peft_type_unsupported", "the engine has no Monte Carlo LoRA"),
)


def _number(raw: Mapping[str, Any], key: str, *, whole: bool = False) -> float:
    """A finite number, positive if `whole`."""
    kind = "a positive integer" if whole else "a finite number"
    if key not in raw:
        raise refusal(
            "config_invalid", f"`{key}` is missing", limit=kind, value=None, hint=f"`{key}` is never guessed: add it to the file"
        )
    return _checked(raw[key], f"`{key}`", whole=whole)


def _checked(value: Any, what: str, *, whole: bool) -> float:
    # JSON has one kind of number: 16.0 is whole.
    good = type(value) in (int, float) and abs(value) < 1e9 and (not whole or (value > 0 and value == int(value)))
    if not good:
        kind = "a positive integer" if whole else "a finite number"
        found = f'"{shown(value)}"' if isinstance(value, str) else shown(value)
        raise refusal("config_invalid", f"{what} is {found}, not {kind}", limit=kind, value=found)
    return value


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key) or False
    if not isinstance(value, bool):
        raise refusal("config_invalid", f"`{key}` is {shown(value)}, not a boolean", limit="boolean", value=shown(value))
    return value


def _text(raw: Mapping[str, Any], key: str) -> str | None:
    value = raw.get(key)
    return value if isinstance(value, str) and value else None


def _version(raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Major and minor release of the PEFT that wrote the file, if it says so."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})", _text(raw, "peft_version") or "")
    return (int(match[1]), int(match[2])) if match else None


def _names(targets: list[Any]) -> tuple[str, ...]:
    for name in targets:
        if not isinstance(name, str) or not name:
            raise refusal("config_invalid", "`target_modules` holds something that is no name", limit="names", value=shown(name))
    return tuple(targets)


def _patterns(raw: Mapping[str, Any], key: str, *, whole: bool = False) -> Patterns:
    entries = raw.get(key) or {}
    if not isinstance(entries, dict):
        raise refusal("config_invalid", f"`{key}` is not an object", limit="object", value=shown(entries))
    return Patterns(
        Pattern(text, _compiled(key, text), _checked(value, f"`{key}` of `{shown(text)}`", whole=whole))
        for text, value in entries.items()
    )


def _repeats(text: str) -> list[str]:
    return _REPEAT.findall(_REPEATED_DIGITS.sub("0", _ANYTHING_AT_END.sub("", text)))


def _compiled(key: str, text: str) -> re.Pattern[str]:
    """The expression at a dot boundary. Those that could take forever on a long path are refused, not run."""
    slow = len(text) > MAX_PATTERN_CHARS or _REPEATED_GROUP.search(text) or len(_repeats(text)) > MAX_REPEATS_IN_PATTERN
    if slow:
        raise refusal(
            "config_invalid",
            f"`{key}` has an entry that is too complex",
            value=shown(text),
            limit=f"{MAX_PATTERN_CHARS} characters, {MAX_REPEATS_IN_PATTERN} repeats, no repeated groups",
            hint="name the modules by the ends of their paths, with fewer `*` and `+`",
        )
    try:
        # Names in the file are compared without wrappers, so those of the patterns must have none.
        return re.compile(rf"(.*\.)?({without_wrappers(text)})")
    except (re.error, OverflowError, RecursionError):
        raise refusal(
            "config_invalid",
            f"`{key}` has an entry that is no regular expression",
            limit="a regular expression",
            value=shown(text),
        ) from None
