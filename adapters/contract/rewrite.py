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
from adapters.contract.tensor_keys import FactorKey, canonical_key, is_base_copy, is_training_state, parse_factor
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
    "drop-training-state",
    "drop-vision",
    "split-fused",
    "join-fused",
    "unswap-experts",
    "split-experts",
    "join-experts",
    "fold-scale",
    "pad-rank",
    "cast",
    "rewrite-config",
)
# Every PEFT adapter needs these, so they alone are no odd clothes.
ORDINARY_RULES = frozenset({"fold-scale", "cast", "rewrite-config"})
# These leave out what changed the model; they are applied only when they are asked for.
LOSSY_RULES = frozenset({"drop-vision"})


@dataclass(frozen=True, slots=True)
class Placed:
    """A factor and what it means in the base: a module, or a form of modules that is still to be arranged."""

    key: FactorKey
    tensor: Tensor
    module: str


@dataclass(frozen=True, slots=True)
class SortedTensors:
    """The tensors of a file by what they are."""

    factors: tuple[tuple[FactorKey, Tensor], ...]
    copies: tuple[Tensor, ...]
    training_state: tuple[Tensor, ...]
    others: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Both factors of one name in the file."""

    module: str
    a: Placed
    b: Placed


@dataclass(frozen=True, slots=True)
class Part:
    """What one pair gives to one module of the base.

    Every pair is seen as a stack of `experts` (1 for a plain linear): A as [expert, rank, in], B as [out, rank, expert]; if
    `swapped`, the file has their roles exchanged. `take` is the expert that the part comes from, None for all of them; `rows`
    are the rows of B that it takes. It goes to expert `put` of the module, in B from row `at` and in both from rank `rank_at`.
    `trained_path` is the name by which the patterns of the configuration know it; `scale` is the true scale of B @ A.
    """

    pair: Pair
    trained_path: str
    scale: float
    rank: int
    experts: int = 1
    swapped: bool = False
    take: int | None = None
    rows: tuple[int, int] | None = None
    put: int = 0
    at: int = 0
    rank_at: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the module's factors are the file's, byte by byte, apart from scale, dtype and padding."""
        return self.experts == 1 and self.rows is None and not (self.at or self.put or self.rank_at)

    def tensor(self, side: str) -> Tensor:
        """The tensor in the file that holds this side of the part."""
        return (self.pair.a if (side == "A") != self.swapped else self.pair.b).tensor


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """One module as it will be published: widths, rank (of each expert) and the parts that it is put together from.

    `stored` is the path in the published file, `experts` the number of experts of a module that has them all.
    """

    path: str
    stored: str
    in_features: int
    out_features: int
    parts: tuple[Part, ...]
    experts: int | None = None

    @property
    def rank(self) -> int:
        return max(part.rank_at + part.rank for part in self.parts)

    @property
    def suffix(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def is_embedding(self) -> bool:
        return self.parts[0].pair.a.key.is_embedding

    def dtypes(self, side: str) -> set[str]:
        return {part.tensor(side).dtype for part in self.parts}

    def spec(self, side: str, rank: int, *, keep_dtype: bool) -> TensorSpec:
        """The published tensor of one side, padded to `rank`."""
        ranks = rank * (self.experts or 1)
        shape = (ranks, self.in_features) if side == "A" else (self.out_features, ranks)
        name = canonical_key(self.stored, side, is_embedding=self.is_embedding)
        return TensorSpec(name, published_dtype(self.dtypes(side), keep_dtype=keep_dtype), shape)


def published_dtype(dtypes: set[str], *, keep_dtype: bool) -> str:
    """float32 (and wider, and a mixture) becomes bfloat16 unless kept; both 16-bit kinds stay as they are."""
    if dtypes in ({"BF16"}, {"F16"}):
        return next(iter(dtypes))
    return "F32" if keep_dtype else "BF16"


def sort_tensors(tensors: Mapping[str, Tensor], base: BaseMap | None) -> SortedTensors:
    """Splits the tensors into factors, copies of the base's own weights, what only the training needed, and everything else."""
    strip_module = base is None or not base.has_module_part
    factors: list[tuple[FactorKey, Tensor]] = []
    copies: list[Tensor] = []
    training_state: list[Tensor] = []
    others: list[Tensor] = []
    for name, tensor in tensors.items():
        key = parse_factor(name, strip_module=strip_module)
        if is_base_copy(name):
            copies.append(tensor)
        elif is_training_state(name):
            training_state.append(tensor)
        elif key is None:
            others.append(tensor)
        else:
            factors.append((key, tensor))
    return SortedTensors(tuple(factors), tuple(copies), tuple(training_state), tuple(others))


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


def pair(placed: Iterable[Placed]) -> tuple[list[Pair], list[AdapterRefused]]:
    """Joins the factors of each module, in module order; refuses doubles and halves."""
    sides: dict[tuple[str, str], Placed] = {}
    refusals: list[AdapterRefused] = []
    for factor in placed:
        slot = (factor.module, factor.key.side)
        first = sides.setdefault(slot, factor)
        if first is not factor:
            refusals.append(double(first, factor))
    pairs: list[Pair] = []
    for module in sorted({module for module, _ in sides}):
        a, b = sides.get((module, "A")), sides.get((module, "B"))
        if a is None or b is None:
            refusals.append(_half(module, "B" if a is None else "A"))
        else:
            pairs.append(Pair(module, a, b))
    return pairs, refusals


def data_rules(plans: Iterable[ModulePlan], rank: int, *, keep_dtype: bool) -> Counter[str]:
    """How many modules are folded and padded, and how many tensors are cast."""
    rules: Counter[str] = Counter()
    for plan in plans:
        rules["fold-scale"] += any(part.scale != 1 for part in plan.parts)
        rules["pad-rank"] += plan.rank != rank
        for side in "AB":
            rules["cast"] += plan.dtypes(side) != {plan.spec(side, rank, keep_dtype=keep_dtype).dtype}
    return rules


def applied(rules: Counter[str]) -> tuple[AppliedRule, ...]:
    """The rules that touched something, in the order of application."""
    return tuple(AppliedRule(name, rules[name], lossy=name in LOSSY_RULES) for name in RULES if rules[name])


def strict_refusal(rules: Counter[str], config: PeftConfig) -> AdapterRefused | None:
    """With `strict`, the refusal that names the rules which would have been needed."""
    needed = [name for name in RULES if rules[name] and name not in ORDINARY_RULES]
    if not config.is_uniform and rules["fold-scale"]:
        needed.append("fold-scale")
    if not needed:
        return None
    return refusal("rewrite_needed", f"the adapter needs rewriting: {', '.join(needed)}", limit=0, value=needed)


def double(first: Placed, second: Placed) -> AdapterRefused:
    """Two tensors of the file mean the same factor of the same module."""
    keys = [shown(first.key.raw, 200), shown(second.key.raw, 200)]
    text = f"two tensors are the {first.key.side} of `{shown(first.module)}`"
    return refusal("duplicate_module", text, limit=1, value=keys, hint=f"remove one of `{keys[0]}` and `{keys[1]}`")


def _half(module: str, side: str) -> AdapterRefused:
    other = "A" if side == "B" else "B"
    return refusal("incomplete_pair", f"`{shown(module)}` has {side} without {other}", limit="A and B", value=side)
