"""What an author should hear although nothing is refused, and which tool seems to have written a folder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from adapters.contract.checks import Targets
from adapters.contract.landing import is_expert
from adapters.contract.peft_config import PeftConfig
from adapters.contract.refusals import shown
from adapters.contract.rewrite import ModulePlan
from adapters.types import BaseContract

UNUSUAL_SCALE = 64
_FOUR_BIT = re.compile(r"(bnb-)?4-?bit|gptq|awq", re.IGNORECASE)


def warnings_for(
    config: PeftConfig, plans: Sequence[ModulePlan], contract: BaseContract | None, rules: Counter[str]
) -> Iterable[str]:
    """One sentence for each thing that is worth a look."""
    if rules["drop-vision"]:
        yield (
            f"LOSSY: {rules['drop-vision']} tensors of the vision tower are left out on request; "
            "the answers are not those of the trained adapter"
        )
    if rules["drop-copies"]:
        yield f"{rules['drop-copies']} copies of the base's own weights are left out"
    yield from _base_warnings(_bare_name(config.base_name), contract)
    yield from _scale_warnings(config, plans)


def _base_warnings(name: str, contract: BaseContract | None) -> Iterable[str]:
    if contract is None:
        yield "no base contract was at hand: shapes, rank limit and modules were not checked"
    elif name and name.lower() != _bare_name(contract.base).lower():
        yield f"the configuration names the base `{shown(name)}`; it is published to `{contract.base}`"
    if name and _FOUR_BIT.search(name):
        yield "the adapter was trained on a base quantised to 4 bits; answers may differ a little on the full base"


def _scale_warnings(config: PeftConfig, plans: Sequence[ModulePlan]) -> Iterable[str]:
    parts = [part for plan in plans for part in plan.parts]
    trained = {part.trained_path for part in parts}
    largest = max((abs(part.scale) for part in parts), default=0)
    if largest > UNUSUAL_SCALE:
        yield f"the largest scale is {largest:g}; above {UNUSUAL_SCALE} is unusual"
    if config.use_rslora and any(is_expert(plan.path) for plan in plans):
        yield "experts are scaled by rsLoRA, which the engine forgets there; the scale is folded into the weights"
    if any(len(config.alphas_of(path)) > 1 for path in trained):
        # PEFT sorts the entries when it saves, so the file's order need not be the one of the training run.
        yield "entries of `alpha_pattern` overlap; the first in the file counts, which may not be the order used in training"
    paths = trained | {plan.path for plan in plans} | {part.pair.module for part in parts}
    for pattern in config.alpha_pattern:
        if not any(pattern.regex.fullmatch(path) for path in paths):
            yield f"the entry `{shown(pattern.text)}` of `alpha_pattern` matches no module"


def target_warnings(targets: Targets) -> Iterable[str]:
    """Names that match nothing are harmless: PEFT passes over them too."""
    if targets.unknown:
        names = ", ".join(f"`{shown(name, 60)}`" for name in targets.unknown[:5])
        yield f"`target_modules` names {names}: nothing was trained there"
    for name, found, wanted in targets.partial[:5]:
        yield f"`{shown(name, 60)}` has weights for {found} of {wanted} modules; is the file whole?"


def vocabulary_warnings(tokens: int | None, contract: BaseContract | None) -> Iterable[str]:
    """`tokens` is one more than the largest token id in the folder's tokenizer files, if there are any."""
    vocabulary = _vocabulary(contract) if contract else None
    if tokens is not None and vocabulary is not None and tokens > vocabulary:
        yield f"the tokenizer beside the adapter has {tokens} tokens, the base {vocabulary}: the base's own is used"


def _vocabulary(contract: BaseContract) -> int | None:
    for path, shape in contract.modules.items():
        if path.rpartition(".")[2] == "lm_head":
            return shape.out_features
        if path.rpartition(".")[2] == "embed_tokens":
            return shape.in_features
    return None


def _bare_name(name: str | None) -> str:
    """The last part of a base's name: the rest may be an organisation, or somebody's cache folder."""
    return (name or "").rstrip("/").rpartition("/")[2]


def guess_tool(names: frozenset[str], raw: Mapping[str, Any]) -> str | None:
    """The tool that probably wrote the folder with the files `names`; for messages only."""
    mark = raw.get("auto_mapping")
    if isinstance(mark, dict) and any("unsloth" in str(part).lower() for part in (*mark, *mark.values())):
        return "Unsloth"
    if {"args.json", "additional_config.json"} <= names:
        return "ms-swift"
    if "lora_train_meta.json" in names or raw.get("lora_alpha") == 0:
        return "verl"
    if "runtime_config" in raw:
        return "SkyRL"
    return "PEFT" if "peft_version" in raw else None
