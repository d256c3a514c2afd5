"""Where a module path of an adapter lands in a base, and why it doesn't."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from adapters.types import BaseContract, ModuleShape

# How exporters name the text layers, longest first. What is left is the path below the text root (`layers.0...`).
_TEXT_ROOTS = (
    "model.language_model.model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.text_model.",
    "model.",
)
_OTHER_TOWERS = frozenset(
    {
        "visual",
        "vision_tower",
        "vision_model",
        "vision_encoder",
        "vision_embedder",
        "vision_projector",
        "embed_vision",
        "image_encoder",
        "img_processor",
        "multi_modal_projector",
        "mm_projector",
        "connector",
        "resampler",
        "audio_tower",
        "audio_model",
        "embed_audio",
    }
)
_NUMBER = re.compile(r"\.(\d+)\.")
_EXPERT_LINEAR = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<name>[^.]+)")

# Projections that some models compute as one: the fused name, and its parts in the order of their rows.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# The linears of one expert by what they do: as most models name them, and as Mixtral does.
EXPERT_NAMES = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


@dataclass(frozen=True, slots=True)
class Home:
    """What a path of an adapter means in the base, and the rule that moved the path there, if one did.

    `module` is a module of the base, or a form that `BaseMap` knows how to turn into modules of the base.
    """

    module: str
    rule: str | None


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The experts of one layer, `experts` their path.

    `stacked` has the base's modules with an expert dimension by name (`gate_up_proj`, `down_proj`) in the order in which PEFT
    wraps them, `single` those of one expert each, by number and role (`gate`, `up`, `down`). One of the two is empty.
    """

    experts: str
    count: int
    stacked: Mapping[str, str]
    single: Mapping[tuple[int, str], str]

    @property
    def modules(self) -> frozenset[str]:
        return frozenset((*self.stacked.values(), *self.single.values()))


class BaseMap:
    """The modules of one base, prepared for looking up many paths.

    `modules` is what the base has. `fused` maps the path of a fused projection that the base has in parts to those parts,
    `parts` the path of a part that the base has only fused to (the fused module, position); `groups` has the experts of each
    layer by their path.
    """

    def __init__(self, contract: BaseContract) -> None:
        self.modules = contract.modules
        self.max_rank = contract.max_rank
        self.serves_vision = contract.serves_vision
        # gpt-oss keeps gate and up row by row in turn, so that a split down the middle would be wrong.
        self.interleaves_experts = (contract.architecture or "").startswith("GptOss")
        self.groups = _groups(contract.modules)
        self.fused = _fused(contract.modules)
        self.parts = _parts(contract.modules)
        self._known = {*self.modules, *self.fused, *self.parts, *_expert_forms(self.groups.values())}
        tower = [f"{contract.tower}."] if contract.tower else []
        self._roots = tuple(dict.fromkeys([*tower, "model.", ""]))
        self._layers = _layers_of_forms(self._known)
        self.has_module_part = any("module" in path.split(".") for path in contract.modules)

    def home_of(self, path: str) -> Home | None:
        """The one thing in the base that `path` can mean; None if there is none or more than one."""
        if path in self._known:
            return Home(path, None)
        homes = [home for home in self._candidates(path) if home in self._known]
        if len(homes) != 1:
            return None
        headless = path.startswith("layers.")
        return Home(homes[0], "lift-headless" if headless else "remap-tower")

    def group_of(self, module: str) -> ExpertGroup | None:
        """The experts that `module` belongs to, if it does."""
        at = module.rfind(".experts")
        return self.groups.get(module[: at + len(".experts")]) if at >= 0 else None

    def stored_path(self, module: str) -> str:
        """The path under which the engine looks for the factors of `module` in a file.

        PEFT wraps the second parameter of a layer's experts around the first, so the first is called `base_layer`.
        """
        group = self.group_of(module)
        if group is None or not group.stacked:
            return module
        first = next(iter(group.stacked.values()))
        return f"{group.experts}.base_layer" if module == first else group.experts

    def missing_layer(self, path: str) -> tuple[int, int] | None:
        """(layer, layers of the base) if `path` is a module of the base's kind in a layer that the base doesn't have."""
        for candidate in (path, *self._candidates(path)):
            match = _NUMBER.search(candidate)
            layers = self._layers.get(_form(candidate)) if match else None
            if match and layers is not None and int(match[1]) >= layers:
                return int(match[1]), layers
        return None

    def nearest(self, path: str) -> str | None:
        """The form of module in the base that looks most like `path`, layer numbers as `N`."""
        forms = {_NUMBER.sub(".N.", module) for module in self.modules}
        close = difflib.get_close_matches(_NUMBER.sub(".N.", path[-200:]), forms, n=1, cutoff=0.3)
        return close[0] if close else None

    def _candidates(self, path: str) -> list[str]:
        core = next((path[len(root) :] for root in _TEXT_ROOTS if path.startswith(root)), path)
        return [root + core for root in self._roots]


def is_vision(path: str) -> bool:
    """Whether `path` lies in a tower that is not the language model's."""
    return not _OTHER_TOWERS.isdisjoint(path.split("."))


def is_expert(path: str) -> bool:
    """Whether `path` lies among a layer's experts."""
    return "experts" in path.split(".")


def _groups(modules: Mapping[str, ModuleShape]) -> dict[str, ExpertGroup]:
    stacked: dict[str, dict[str, str]] = {}
    single: dict[str, dict[tuple[int, str], str]] = {}
    for path, shape in modules.items():
        match = _EXPERT_LINEAR.fullmatch(path)
        if shape.experts is not None:
            experts, _, name = path.rpartition(".")
            stacked.setdefault(experts, {})[name] = path
        elif match and match["name"] in EXPERT_NAMES:
            single.setdefault(match["experts"], {})[int(match["number"]), EXPERT_NAMES[match["name"]]] = path
    groups = {}
    for experts, names in stacked.items():
        # The projection into the experts comes first, whatever order the contract lists them in.
        ordered = dict(sorted(names.items(), key=lambda item: EXPERT_NAMES.get(item[0]) == "down"))
        count = modules[next(iter(names.values()))].experts or 0
        groups[experts] = ExpertGroup(experts, count, ordered, {})
    for experts, linears in single.items():
        groups[experts] = ExpertGroup(experts, len({number for number, _ in linears}), {}, linears)
    return groups


def _fused(modules: Mapping[str, ModuleShape]) -> dict[str, tuple[str, ...]]:
    found = {}
    for path in modules:
        parent, _, name = path.rpartition(".")
        for fused, parts in FUSED.items():
            paths = tuple(f"{parent}.{part}" for part in parts)
            if name == parts[0] and f"{parent}.{fused}" not in modules and all(part in modules for part in paths):
                found[f"{parent}.{fused}"] = paths
    return found


def _parts(modules: Mapping[str, ModuleShape]) -> dict[str, tuple[str, int]]:
    found = {}
    for path, shape in modules.items():
        parent, _, name = path.rpartition(".")
        parts = FUSED.get(name, ()) if shape.experts is None else ()
        for position, part in enumerate(parts):
            if f"{parent}.{part}" not in modules:
                found[f"{parent}.{part}"] = (path, position)
    return found


def _expert_forms(groups: Iterable[ExpertGroup]) -> Iterable[str]:
    """The paths by which files name the experts of a layer in the form that the base does not have."""
    for group in groups:
        yield from (group.experts, f"{group.experts}.base_layer")
        if group.single:
            yield from (f"{group.experts}.gate_up_proj", f"{group.experts}.down_proj")
        else:
            yield from (f"{group.experts}.{number}.{name}" for number in range(group.count) for name in EXPERT_NAMES)


def _form(path: str) -> str:
    return _NUMBER.sub(".*.", path, count=1)


def _layers_of_forms(modules: Iterable[str]) -> dict[str, int]:
    """For each form of module, the number of layers of the stack that it belongs to."""
    stacks: dict[str, int] = {}
    forms: dict[str, str] = {}
    for path in modules:
        match = _NUMBER.search(path)
        if match:
            stack = path[: match.start()]
            forms[_form(path)] = stack
            stacks[stack] = max(stacks.get(stack, 0), int(match[1]) + 1)
    return {form: stacks[stack] for form, stack in forms.items()}
