"""The checks of the publish contract, each a pure function from what was read to the refusals that it leads to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from adapters.contract.landing import BaseMap, is_expert, is_vision
from adapters.contract.peft_config import PeftConfig
from adapters.contract.refusals import refusal, shown
from adapters.contract.rewrite import ModulePlan, Placed
from adapters.contract.safetensors_file import Tensor
from adapters.contract.tensor_keys import FactorKey, clean_path, code_of_other, foreign_tool
from adapters.errors import AdapterRefused

FACTOR_DTYPES = ("BF16", "F16", "F32", "F64")

_OTHER_TEXT = {
    "dora_unsupported": "holds magnitude vectors of DoRA",
    "lora_bias_unsupported": "holds biases on the low-rank path",
    "extra_weights": "holds weights that are no low-rank factors",
    "peft_type_unsupported": "holds tensors of another method than LoRA",
    "moe_layout_unsupported": "holds expert factors in a layout that is not taken",
    "extra_tensors": "holds tensors that are no factors",
}


def refuse_others(others: Sequence[Tensor]) -> list[AdapterRefused]:
    """One refusal for each kind of tensor that is no factor, with count, bytes and the first name."""
    groups: dict[str, list[Tensor]] = {}
    for tensor in others:
        groups.setdefault(code_of_other(tensor.name), []).append(tensor)
    order = [*_OTHER_TEXT, "foreign_format"]
    return [_refuse_group(code, groups[code]) for code in sorted(groups, key=order.index)]


def refuse_names(factors: Iterable[FactorKey]) -> list[AdapterRefused]:
    """A file with the factors of two adapters does not say which one is meant."""
    names = sorted({key.adapter_name for key in factors if key.adapter_name is not None})
    if len(names) < 2:
        return []
    shown_names = [shown(name, 40) for name in names[:5]]
    text = f"the file holds the factors of {len(names)} adapters: {', '.join(shown_names)}"
    return [refusal("ambiguous_folder", text, limit=1, value=shown_names, hint="save the one that you mean")]


def refuse_forms(placed: Iterable[Placed]) -> list[AdapterRefused]:
    """Factors must be matrices of a float dtype. Reports the first of each kind of fault."""
    found: dict[str, AdapterRefused] = {}
    for factor in placed:
        fault = _form_fault(factor)
        if fault:
            found.setdefault(str(fault.reason), fault)
    return list(found.values())


def refuse_homeless(homeless: Sequence[FactorKey], placed: Sequence[Placed], base: BaseMap) -> list[AdapterRefused]:
    """Why paths found no module: tower not served, layers beyond the base, experts, nothing like it. One refusal each."""
    paths = sorted({key.path for key in homeless})
    vision = {path for path in paths if is_vision(path)}
    landed_vision = {factor.module for factor in placed if is_vision(factor.module)} if not base.serves_vision else set()
    beyond = {path: missing for path in paths if (missing := base.missing_layer(path))}
    experts = {path for path in paths if is_expert(path)} - beyond.keys()
    rest = [path for path in paths if path not in vision | beyond.keys() | experts]
    found = []
    if vision | landed_vision:
        found.append(_vision(len(vision | landed_vision)))
    if beyond:
        found.append(_beyond(beyond))
    if experts:
        text = f"{len(experts)} expert modules have no counterpart in the base, `{shown(min(experts))}` first"
        found.append(refusal("moe_layout_unsupported", text, limit=0, value=len(experts)))
    if rest:
        found.append(_unknown(rest, bool(placed), base))
    return found


def refuse_ranks(plans: Iterable[ModulePlan], config: PeftConfig) -> list[AdapterRefused]:
    """Tensors and configuration must agree on each module's rank."""
    for plan in plans:
        wanted, ranks = config.rank_of(plan.trained_path), (plan.rank, plan.b.tensor.shape[1])
        if ranks != (wanted, wanted):
            value = ranks[0] if ranks[0] == ranks[1] else list(ranks)
            text = f"`{shown(plan.path)}` has rank {value}, the configuration says {wanted}"
            hint = "configuration and weights come from different runs, or a pattern is missing"
            return [refusal("rank_mismatch", text, limit=wanted, value=value, hint=hint)]
    return []


def refuse_rank_limit(plans: Sequence[ModulePlan], base: BaseMap) -> list[AdapterRefused]:
    """The largest rank of any module must be within the base's limit."""
    largest = max(plans, key=lambda plan: plan.rank, default=None)
    if largest is None or largest.rank <= base.max_rank:
        return []
    text = f"`{shown(largest.path)}` has rank {largest.rank}; the base takes at most {base.max_rank}"
    return [refusal("rank_too_large", text, limit=base.max_rank, value=largest.rank)]


def refuse_shapes(plans: Iterable[ModulePlan], base: BaseMap) -> list[AdapterRefused]:
    """Widths must be the base's exactly: a narrower adapter would fit into a corner of the matrix without a sound."""
    wrong = []
    for plan in plans:
        shape = base.modules[plan.path]
        wanted, found = [shape.out_features, shape.in_features], [plan.b.tensor.shape[0], plan.a.tensor.shape[1]]
        if wanted != found:
            wrong.append((plan.path, wanted, found))
    if not wrong:
        return []
    path, wanted, found = wrong[0]
    text = f"{len(wrong)} modules have other widths than the base: `{path}` is {found} (out, in), the base has {wanted}"
    hint = "the adapter was trained on another size of this model; publish it to that base"
    return [refusal("shape_mismatch", text, limit=wanted, value=found, hint=hint)]


def refuse_scales(plans: Iterable[ModulePlan]) -> list[AdapterRefused]:
    """A scale of 0 loads and answers as the base."""
    zero = [plan for plan in plans if plan.scale == 0 or not math.isfinite(plan.scale)]
    if not zero:
        return []
    text = f"{len(zero)} modules are scaled by {zero[0].scale:g}, `{shown(zero[0].path)}` first: `lora_alpha` or a pattern is 0"
    return [refusal("scale_zero", text, limit="not 0", value=zero[0].scale)]


def refuse_targets(plans: Sequence[ModulePlan], config: PeftConfig, base: BaseMap | None) -> list[AdapterRefused]:
    """Each name in `target_modules` needs weights, and each module a name; a regular expression is not looked into."""
    if not config.target_modules or not plans:
        return []
    names = {clean_path(name, strip_module=base is None or not base.has_module_part) for name in config.target_modules}
    homes = {home.module for name in names if base and (home := base.home_of(name))}
    endings = [_endings(plan) for plan in plans]
    known = set().union(*endings)
    unmatched = sorted(name for name in names if name not in known and not _same_home(name, base, plans))
    if unmatched:
        return [_unmatched(unmatched, base)]
    if config.targets_parameters:
        return []
    unnamed = [plan for plan, ends in zip(plans, endings, strict=True) if ends.isdisjoint(names) and plan.path not in homes]
    if not unnamed:
        return []
    text = f"{len(unnamed)} modules have weights but no name in `target_modules`, `{shown(unnamed[0].path)}` first"
    hint = "configuration and weights come from different runs"
    return [refusal("extra_tensors", text, limit=0, value=len(unnamed), hint=hint)]


def refuse_fingerprint(known: str | None, expected: str) -> list[AdapterRefused]:
    """A fingerprint that is known must be the base's; without one there is nothing to compare."""
    if known is None or known == expected:
        return []
    return [refusal("wrong_base", "the adapter was trained on another base", limit=expected, value=shown(known, 100))]


def _refuse_group(code: str, tensors: Sequence[Tensor]) -> AdapterRefused:
    first, size = shown(min(tensor.name for tensor in tensors), 200), sum(tensor.size_bytes for tensor in tensors)
    if code == "foreign_format":
        tool = foreign_tool(tensors[0].name)
        text = f"the tensors are named as {tool} names them, `{first}` first"
        return refusal(code, text, limit="PEFT", value=tool, hint=f"use the PEFT exporter of {tool}")
    text = f"the file {_OTHER_TEXT[code]}: {len(tensors)} ({size} bytes), `{first}` first"
    return refusal(code, text, limit=0, value=len(tensors))


def _form_fault(factor: Placed) -> AdapterRefused | None:
    tensor, name = factor.tensor, shown(factor.key.raw, 200)
    shape = list(tensor.shape)
    if len(shape) < 2 or 0 in shape:
        return refusal("sharded_tensor", f"`{name}` has shape {shape}, a piece of a sharded factor", limit=2, value=shape)
    if len(shape) > 2:
        code = "moe_layout_unsupported" if is_expert(factor.key.path) else "shape_mismatch"
        return refusal(code, f"`{name}` has shape {shape}; a factor is a matrix", limit=2, value=shape)
    if tensor.dtype not in FACTOR_DTYPES:
        return refusal("dtype_unsupported", f"`{name}` is {tensor.dtype}", limit=list(FACTOR_DTYPES), value=tensor.dtype)
    return None


def _vision(count: int) -> AdapterRefused:
    text = f"{count} modules lie in the vision tower, where this base applies no adapters"
    return refusal("vision_keys_not_served", text, limit=0, value=count)


def _beyond(beyond: dict[str, tuple[int, int]]) -> AdapterRefused:
    layer, layers = max(beyond.values())
    text = f"the adapter has layer {layer}; the base has {layers} layers, the last is {layers - 1}"
    return refusal("extra_layers", text, limit=layers, value=layer, hint="it was trained on a deeper model")


def _unknown(paths: Sequence[str], some_landed: bool, base: BaseMap) -> AdapterRefused:
    nearest = base.nearest(paths[0])
    hint = f"nearest in the base: `{nearest}`" if nearest else None
    if some_landed:
        text = f"{len(paths)} modules are not in the base, `{shown(paths[0])}` first"
        return refusal("extra_tensors", text, limit=0, value=len(paths), hint=hint)
    text = f"none of the adapter's {len(paths)} modules is in the base, `{shown(paths[0])}` first"
    return refusal("no_matching_module", text, limit=1, value=0, hint=hint)


def _unmatched(names: Sequence[str], base: BaseMap | None) -> AdapterRefused:
    name = shown(names[0])
    in_base = base is not None and any(f".{path}".endswith(f".{names[0]}") for path in base.modules)
    why = "the base has it, the file has no weights for it" if in_base else "no module of the adapter has that name"
    hint = "save again: weights are missing" if in_base else "remove the entry if nothing was trained there"
    text = f"`target_modules` names `{name}`: {why}"
    return refusal("no_matching_module", text, limit=0, value=[shown(name) for name in names[:5]], hint=hint)


def _endings(plan: ModulePlan) -> set[str]:
    """All names by which `target_modules` may mean the module: its paths, and their ends at dots."""
    ends = set()
    for path in {plan.path, plan.a.key.path}:
        parts = path.split(".")
        ends.update(".".join(parts[start:]) for start in range(len(parts)))
    return ends


def _same_home(name: str, base: BaseMap | None, plans: Sequence[ModulePlan]) -> bool:
    home = base.home_of(name) if base else None
    return home is not None and any(plan.path == home.module for plan in plans)
