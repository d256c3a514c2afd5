"""What an author should hear although nothing is refused, and which tool seems to have written a folder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
    name = _bare_name(config.base_name)
    if contract is None:
        yield "no base contract was at hand: shapes, rank limit and modules were not checked"
    elif name and name.lower() != _bare_name(contract.base).lower():
        yield f"the configuration names the base `{shown(name)}`; it is published to `{contract.base}`"
    if name and _FOUR_BIT.search(name):
        yield "the adapter was trained on a base quantised to 4 bits; answers may differ a little on the full base"
    if rules["drop-copies"]:
        yield f"{rules['drop-copies']} copies of the base's own weights are left out"
    largest = max((abs(plan.scale) for plan in plans), default=0)
    if largest > UNUSUAL_SCALE:
        yield f"the largest scale is {largest:g}; above {UNUSUAL_SCALE} is unusual"
    if any(len(config.alphas_of(plan.trained_path)) > 1 for plan in plans):
        # PEFT sorts the entries when it saves, so the file's order need not be the one of the training run.
        yield "entries of `alpha_pattern` overlap; the first in the file counts, which may not be the order used in training"
    for pattern in config.alpha_pattern:
        if not any(pattern.regex.fullmatch(plan.trained_path) for plan in plans):
            yield f"the entry `{shown(pattern.text)}` of `alpha_pattern` matches no module"


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
    if "runtime_config" in raw and "peft_version" not in raw:
        return "SkyRL"
    return "PEFT" if "peft_version" in raw else None
