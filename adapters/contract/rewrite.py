"""The named rules that turn an adapter in odd clothes into the canonical form, and the plan that they make.

A rule never guesses an alpha, never chooses between two adapters and never drops weights that changed the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from adapters.contract.landing import BaseMap, Home
from adapters.contract.peft_config import PeftConfig
from adapters.contract.refusals import refusal, shown
from adapters.contract.safetensors_file import Tensor, TensorSpec
from adapters.contract.tensor_keys import FactorKey, canonical_key, is_base_copy, parse_factor
from adapters.errors import AdapterRefused
from adapters.types import AppliedRule

RULES = (
    "merge-shards",
    "strip-wrappers",
    "strip-name",
    "add-prefix",
    "remap-tower",
    "lift-headless",
    "drop-copies",
    "fold-scale",
    "pad-rank",
    "cast",
    "rewrite-config",
)
# Every PEFT adapter needs these, so they alone are no odd clothes.
ORDINARY_RULES = frozenset({"fold-scale", "cast", "rewrite-config"})


@dataclass(frozen=True, slots=True)
class Placed:
    """A factor and the module that it belongs to."""

    key: FactorKey
    tensor: Tensor
    module: str


@dataclass(frozen=True, slots=True)
class SortedTensors:
    """The tensors of a file by what they are."""

    factors: tuple[tuple[FactorKey, Tensor], ...]
    copies: tuple[Tensor, ...]
    others: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """One module as it will be published: its two factors, A of [rank, in] and B of [out, rank], and the true scale of B @ A."""

    path: str
    a: Placed
    b: Placed
    scale: float

    @property
    def rank(self) -> int:
        """The rank that the tensors have."""
        return self.a.tensor.shape[0]

    @property
    def trained_path(self) -> str:
        return self.a.key.trained_path

    @property
    def suffix(self) -> str:
        return self.path.rpartition(".")[2]

    def spec(self, side: str, rank: int, *, keep_dtype: bool) -> TensorSpec:
        """The published tensor of one side, padded to `rank`."""
        tensor = self.a.tensor if side == "A" else self.b.tensor
        shape = (rank, tensor.shape[1]) if side == "A" else (tensor.shape[0], rank)
        name = canonical_key(self.path, side, is_embedding=self.a.key.is_embedding)
        return TensorSpec(name, published_dtype(tensor.dtype, keep_dtype=keep_dtype), shape)


def published_dtype(dtype: str, *, keep_dtype: bool) -> str:
    """float32 (and wider) becomes bfloat16 unless kept; both 16-bit kinds stay as they are."""
    if dtype in ("BF16", "F16"):
        return dtype
    return "F32" if keep_dtype else "BF16"


def sort_tensors(tensors: Mapping[str, Tensor], base: BaseMap | None) -> SortedTensors:
    """Splits the tensors into factors, copies of the base's own weights, and everything else."""
    strip_module = base is None or not base.has_module_part
    factors: list[tuple[FactorKey, Tensor]] = []
    copies: list[Tensor] = []
    others: list[Tensor] = []
    for name, tensor in tensors.items():
        key = parse_factor(name, strip_module=strip_module)
        if is_base_copy(name):
            copies.append(tensor)
        elif key is None:
            others.append(tensor)
        else:
            factors.append((key, tensor))
    return SortedTensors(tuple(factors), tuple(copies), tuple(others))


def place(
    factors: Iterable[tuple[FactorKey, Tensor]], base: BaseMap | None
) -> tuple[list[Placed], list[FactorKey], Counter[str]]:
    """Finds the module of each factor: what landed, what found no home, and how many names each rule moved."""
    placed: list[Placed] = []
    homeless: list[FactorKey] = []
    rules: Counter[str] = Counter()
    for key, tensor in factors:
        rules.update(key.rules)
        home = Home(key.path, None) if base is None else base.home_of(key.path)
        if home is None:
            homeless.append(key)
            continue
        if home.rule:
            rules[home.rule] += 1
        placed.append(Placed(key, tensor, home.module))
    return placed, homeless, rules


def pair(placed: Iterable[Placed], config: PeftConfig) -> tuple[list[ModulePlan], list[AdapterRefused]]:
    """Joins the factors of each module, in module order; refuses doubles and halves."""
    sides: dict[tuple[str, str], Placed] = {}
    refusals: list[AdapterRefused] = []
    for factor in placed:
        slot = (factor.module, factor.key.side)
        first = sides.setdefault(slot, factor)
        if first is not factor:
            refusals.append(_double(first, factor))
    plans: list[ModulePlan] = []
    for module in sorted({module for module, _ in sides}):
        a, b = sides.get((module, "A")), sides.get((module, "B"))
        if a is None or b is None:
            refusals.append(_half(module, "B" if a is None else "A"))
        else:
            plans.append(ModulePlan(module, a, b, config.scale_of(a.key.trained_path)))
    return plans, refusals


def data_rules(plans: Iterable[ModulePlan], rank: int, *, keep_dtype: bool) -> Counter[str]:
    """How many modules are folded and padded, and how many tensors are cast."""
    rules: Counter[str] = Counter()
    for plan in plans:
        rules["fold-scale"] += plan.scale != 1
        rules["pad-rank"] += plan.rank != rank
        dtypes = (plan.a.tensor.dtype, plan.b.tensor.dtype)
        rules["cast"] += sum(dtype != published_dtype(dtype, keep_dtype=keep_dtype) for dtype in dtypes)
    return rules


def applied(rules: Counter[str]) -> tuple[AppliedRule, ...]:
    """The rules that touched something, in the order of application."""
    return tuple(AppliedRule(name, rules[name]) for name in RULES if rules[name])


def strict_refusal(rules: Counter[str], config: PeftConfig) -> AdapterRefused | None:
    """With `strict`, the refusal that names the rules which would have been needed."""
    needed = [name for name in RULES if rules[name] and name not in ORDINARY_RULES]
    if not config.is_uniform and rules["fold-scale"]:
        needed.append("fold-scale")
    if not needed:
        return None
    return refusal("rewrite_needed", f"the adapter needs rewriting: {', '.join(needed)}", limit=0, value=needed)


def _double(first: Placed, second: Placed) -> AdapterRefused:
    keys = [shown(first.key.raw, 200), shown(second.key.raw, 200)]
    text = f"two tensors are the {first.key.side} of `{shown(first.module)}`"
    return refusal("duplicate_module", text, limit=1, value=keys, hint=f"remove one of `{keys[0]}` and `{keys[1]}`")


def _half(module: str, side: str) -> AdapterRefused:
    other = "A" if side == "B" else "B"
    return refusal("incomplete_pair", f"`{shown(module)}` has {side} without {other}", limit="A and B", value=side)
