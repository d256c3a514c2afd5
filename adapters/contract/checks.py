"""The checks of the publish contract, each a pure function from what was read to the refusals that it leads to."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adapters.contract.landing import BaseMap, is_expert, is_vision
from adapters.contract.peft_config import PeftConfig
from adapters.contract.refusals import many, refusal, shown
from adapters.contract.rewrite import ModulePlan, Placed
from adapters.contract.safetensors_file import Tensor
from adapters.contract.tensor_keys import FactorKey, clean_path, code_of_other, foreign_tool
from adapters.errors import AdapterRefused

# A module of other widths than the base's: its path, the base's [out, in], the file's.
Misfit = tuple[str, list[int], list[int]]
FACTOR_DTYPES = ("BF16", "F16", "F32", "F64")

# Trainers on Megatron rewrite the names of the weights for PEFT, and may leave those of the targets.
_MEGATRON_NAMES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
# `transformer.` alone says nothing: older language models begin with it too.
_IMAGE_MODEL = re.compile(r"(unet|text_encoder(_\d)?|transformer\.(.+\.)?((single_)?transformer_blocks|to_[qkv]))(\.|$)")
# What `ensure_weight_tying` trains as one; PEFT takes the second of them out of `target_modules`.
_TIED = frozenset({"embed_tokens", "lm_head"})
_OTHER_TEXT = {
    "dora_unsupported": "holds magnitude vectors of DoRA",
    "lora_bias_unsupported": "holds biases on the low-rank path",
    "extra_weights": "holds weights that are no low-rank factors",
    "peft_type_unsupported": "holds tensors of another method than LoRA",
    "sharded_tensor": "holds flat pieces of sharded weights",
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
    explained = vision | beyond.keys() | experts
    rest = [path for path in paths if path not in explained]
    found = []
    if vision | landed_vision:
        found.append(_vision(len(vision | landed_vision)))
    if beyond:
        found.append(_beyond(beyond))
    if experts:
        text = f"{many(len(experts), 'expert module')} without a counterpart in the base, `{shown(min(experts))}` first"
        found.append(refusal("moe_layout_unsupported", text, limit=0, value=len(experts)))
    if rest:
        found.append(_unknown(rest, bool(placed), base))
    return found


def refuse_rank_limit(plans: Sequence[ModulePlan], base: BaseMap) -> list[AdapterRefused]:
    """The largest rank of any module must be within the base's limit."""
    largest = max(plans, key=lambda plan: plan.rank, default=None)
    if largest is None or largest.rank <= base.max_rank:
        return []
    text = f"`{shown(largest.path)}` has rank {largest.rank}; the base takes at most {base.max_rank}"
    return [refusal("rank_too_large", text, limit=base.max_rank, value=largest.rank)]


def refuse_shapes(misfits: Sequence[Misfit], fitting: Sequence[str]) -> list[AdapterRefused]:
    """Widths must be the base's exactly: a narrower adapter would fit into a corner of the matrix without a sound.

    `fitting` are the ids of other bases that it would fit.
    """
    if not misfits:
        return []
    path, wanted, found = min(misfits)
    count = many(len(misfits), "module")
    text = f"other widths than the base in {count}: `{shown(path)}` is {found} (out, in), the base has {wanted}"
    return [refusal("shape_mismatch", text, limit=wanted, value=found, hint=_fitting_hint(fitting))]


def refuse_scales(plans: Iterable[ModulePlan]) -> list[AdapterRefused]:
    """A scale of 0 loads and answers as the base."""
    zero = [(plan, part.scale) for plan in plans for part in plan.parts if part.scale == 0 or not math.isfinite(part.scale)]
    if not zero:
        return []
    plan, scale = zero[0]
    text = f"the scale is {scale:g} in {many(len(zero), 'module')}, `{shown(plan.path)}` first: `lora_alpha` or a pattern is 0"
    return [refusal("scale_zero", text, limit="not 0", value=scale)]


@dataclass(frozen=True, slots=True)
class Targets:
    """How `target_modules` and the weights agree. `missing` are names that the base has and the file lacks, `unknown` those
    that neither has, `unnamed` the modules with weights that no name covers, `partial` names with the modules that have
    weights and those of the base."""

    missing: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()
    partial: tuple[tuple[str, int, int], ...] = ()


def compare_targets(
    plans: Sequence[ModulePlan], config: PeftConfig, base: BaseMap | None, dropped: Iterable[str] = ()
) -> Targets:
    """Looks for each name in `target_modules` among the weights, and for each module among the names.

    A regular expression is not looked into. `dropped` are paths of modules that were left out on purpose.
    """
    if not config.target_modules or not plans:
        return Targets()
    strip_module = base is None or not base.has_module_part
    endings = [_endings(plan) for plan in plans]
    known = set().union(*endings, *(_ends(path) for path in dropped))
    listed = {clean_path(name, strip_module=strip_module) for name in config.target_modules}
    # A name that the file itself has is meant as it stands: a vision tower has a `linear_fc1` of its own.
    names = {hf for name in listed for hf in ((name,) if name in known else _MEGATRON_NAMES.get(name, (name,)))}
    homes = {home.module for name in names if base and (home := base.home_of(name))}
    covered = names.union(*(_MEGATRON_NAMES.get(name, ()) for name in listed), _TIED if config.ties_weights else ())
    absent = sorted(name for name in names if name not in known and not _same_home(name, base, plans))
    missing = [name for name in absent if base and not config.chooses_modules and _must_have_weights(name, base)]
    unnamed = [
        plan.path
        for plan, ends in zip(plans, endings, strict=True)
        if ends.isdisjoint(covered) and homes.isdisjoint({plan.path, *(part.pair.module for part in plan.parts)})
    ]
    unknown = [name for name in absent if name not in missing]
    return Targets(
        tuple(missing),
        tuple(unknown),
        () if config.targets_parameters else tuple(unnamed),
        () if base is None or config.chooses_modules else tuple(_partial(names - set(absent), plans, base)),
    )


def refuse_targets(targets: Targets) -> list[AdapterRefused]:
    """Weights without a name, and names without weights where the base has such modules: two different runs."""
    found = []
    if targets.missing:
        text = f"`target_modules` names `{shown(targets.missing[0])}`: the base has it, the file has no weights for it"
        hint = "save again: weights are missing"
        value = [shown(name) for name in targets.missing[:5]]
        found.append(refusal("no_matching_module", text, limit=0, value=value, hint=hint))
    if targets.unnamed:
        count = many(len(targets.unnamed), "module")
        text = f"weights but no name in `target_modules`: {count}, `{shown(targets.unnamed[0])}` first"
        hint = "configuration and weights come from different runs"
        found.append(refusal("extra_tensors", text, limit=0, value=len(targets.unnamed), hint=hint))
    return found


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
    text = f"{many(count, 'module')} in the vision tower, where this base applies no adapters"
    return refusal("vision_keys_not_served", text, limit=0, value=count)


def _beyond(beyond: dict[str, tuple[int, int]]) -> AdapterRefused:
    layer, layers = max(beyond.values())
    text = f"the adapter has layer {layer}; the base has {layers} layers, the last is {layers - 1}"
    return refusal("extra_layers", text, limit=layers, value=layer)


def _unknown(paths: Sequence[str], some_landed: bool, base: BaseMap) -> AdapterRefused:
    image = [path for path in paths if _IMAGE_MODEL.match(path)]
    if image and not some_landed:
        text = f"`{shown(image[0])}` is a module of an image model"
        hint = "an adapter of an image model can't be served by a language model"
        return refusal("foreign_format", text, limit="PEFT", value="diffusers", hint=hint)
    nearest = base.nearest(paths[0])
    hint = f"nearest in the base: `{nearest}`" if nearest else None
    if some_landed:
        text = f"not in the base: {many(len(paths), 'module')}, `{shown(paths[0])}` first"
        return refusal("extra_tensors", text, limit=0, value=len(paths), hint=hint)
    text = f"none of the adapter's modules ({len(paths)}) is in the base, `{shown(paths[0])}` first"
    return refusal("no_matching_module", text, limit=1, value=0, hint=hint)


def _partial(names: Iterable[str], plans: Sequence[ModulePlan], base: BaseMap) -> Iterable[tuple[str, int, int]]:
    planned = {plan.path for plan in plans}
    for name in sorted(names):
        wanted = {
            path for path in base.modules if path.rpartition(".")[2] == name and not is_vision(path) and not is_expert(path)
        }
        if wanted & planned and wanted - planned:
            yield name, len(wanted & planned), len(wanted)


def _must_have_weights(name: str, base: BaseMap) -> bool:
    """Whether the base has modules of that name among those that any trainer reaches: towers are often left alone, and experts
    are no linears in every release."""
    reached = (path for path in base.modules if not is_vision(path) and not is_expert(path))
    return any(f".{path}".endswith(f".{name}") for path in reached)


def _fitting_hint(fitting: Sequence[str]) -> str | None:
    if not fitting:
        return None
    return f"it fits {', '.join(f'`{base}`' for base in fitting[:3])}: publish it there"


def _endings(plan: ModulePlan) -> set[str]:
    """All names by which `target_modules` may mean the module: its paths, and their ends at dots."""
    paths = {plan.path}
    for part in plan.parts:
        paths |= {part.pair.a.key.path, part.trained_path, part.pair.module}
    return set().union(*(_ends(path) for path in paths))


def _ends(path: str) -> set[str]:
    parts = path.split(".")
    return {".".join(parts[start:]) for start in range(len(parts))}


def _same_home(name: str, base: BaseMap | None, plans: Sequence[ModulePlan]) -> bool:
    home = base.home_of(name) if base else None
    return home is not None and any(
        home.module == plan.path or any(home.module == part.pair.module for part in plan.parts) for plan in plans
    )
