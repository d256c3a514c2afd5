"""Where a module path of an adapter lands in a base, and why it doesn't."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from adapters.types import BaseContract

# How exporters name the text layers, longest first. What is left is the path below the text root (`layers.0...`).
_TEXT_ROOTS = (
    "model.language_model.model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.text_model.",
    "model.",
)
_VISION_PARTS = frozenset(
    {
        "visual",
        "vision_tower",
        "vision_model",
        "vision_encoder",
        "vision_embedder",
        "embed_vision",
        "multi_modal_projector",
        "mm_projector",
        "audio_tower",
        "embed_audio",
    }
)
_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Home:
    """The module of the base that a path means, and the rule that moved the path there, if one did."""

    module: str
    rule: str | None


class BaseMap:
    """The modules of one base, prepared for looking up many paths."""

    def __init__(self, contract: BaseContract) -> None:
        self.modules = contract.modules
        self.max_rank = contract.max_rank
        self.serves_vision = contract.serves_vision
        tower = [f"{contract.tower}."] if contract.tower else []
        self._roots = tuple(dict.fromkeys([*tower, "model.", ""]))
        self._layers = _layers_of_forms(contract.modules)
        self.has_module_part = any("module" in path.split(".") for path in contract.modules)

    def home_of(self, path: str) -> Home | None:
        """The one module that `path` can mean; None if there is none or more than one."""
        if path in self.modules:
            return Home(path, None)
        homes = [home for home in self._candidates(path) if home in self.modules]
        if len(homes) != 1:
            return None
        headless = path.startswith("layers.")
        return Home(homes[0], "lift-headless" if headless else "remap-tower")

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
    return not _VISION_PARTS.isdisjoint(path.split("."))


def is_expert(path: str) -> bool:
    """Whether `path` lies among a layer's experts."""
    return "experts" in path.split(".")


def _form(path: str) -> str:
    return _NUMBER.sub(".*.", path, count=1)


def _layers_of_forms(modules: dict[str, object]) -> dict[str, int]:
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
