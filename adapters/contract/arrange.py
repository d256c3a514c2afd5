"""From the pairs of a file to the modules of a base: what the file has fused, split, stacked or swapped is put right.

For experts PEFT keeps one pair of matrices for all of them: A's rows run expert by expert, B's columns rank by rank with the
experts innermost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from adapters.contract.landing import EXPERT_NAMES, FUSED, BaseMap, ExpertGroup, is_expert
from adapters.contract.peft_config import PeftConfig
from adapters.contract.refusals import refusal, shown
from adapters.contract.rewrite import ModulePlan, Pair, Part, double
from adapters.errors import AdapterRefused
from adapters.types import ModuleShape

# From this release on PEFT has an expert's A on the side of its input, whatever the order of the weight's dimensions.
UNSWAPPED_SINCE = (0, 19)
Shape = tuple[int, int]

_TOGETHER = "the engine takes the experts of a layer all at once: train gate, up and down projections of all of them"


@dataclass(slots=True)
class Arrangement:
    """The modules that will be published, what stands in the way, and how many pairs each rule moved.

    `misfits` are the modules of other widths than the base's: path, the base's [out, in], the file's.
    """

    plans: list[ModulePlan] = field(default_factory=list)
    refusals: list[AdapterRefused] = field(default_factory=list)
    misfits: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    rules: Counter[str] = field(default_factory=Counter)


def arrange(pairs: Iterable[Pair], config: PeftConfig, base: BaseMap | None) -> Arrangement:
    """Gives each pair to the modules that it stands for; in module order. Without a base, names are taken as they are."""
    if base is None:
        return _unchecked(pairs, config)
    work = _Work(base, config)
    stacks: dict[str, list[Pair]] = {}
    singles: dict[str, list[Pair]] = {}
    parts: dict[str, list[Pair]] = {}
    for pair in pairs:
        group = base.group_of(pair.module)
        if pair.module in base.fused:
            work.split_fused(pair)
        elif pair.module in base.parts:
            parts.setdefault(base.parts[pair.module][0], []).append(pair)
        elif group is None or (group.single and pair.module in base.modules):
            work.plain(pair)
        elif pair.module.rpartition(".")[0].endswith(".experts") or pair.module.endswith(".experts"):
            stacks.setdefault(group.experts, []).append(pair)
        else:
            singles.setdefault(group.experts, []).append(pair)
    for fused, found in parts.items():
        work.join_fused(fused, found)
    if stacks:
        work.place_stacks(stacks)
    for experts, found in singles.items():
        work.join_experts(base.groups[experts], found)
    work.refuse_incomplete_experts()
    work.done.plans.sort(key=lambda plan: plan.path)
    return work.done


def _unchecked(pairs: Iterable[Pair], config: PeftConfig) -> Arrangement:
    done = Arrangement()
    for pair in pairs:
        if is_expert(pair.module) and pair.module.rpartition(".")[2] in ("experts", "base_layer"):
            text = f"`{shown(pair.module)}` holds all experts in one; without the base's contract they can't be told apart"
            hint = "publish where the base is known, or give its contract"
            done.refusals.append(refusal("moe_layout_unsupported", text, limit="a base contract", value=None, hint=hint))
            continue
        part = _part(pair, config, (pair.a.key.path,))
        done.refusals += _rank_faults(part, config, pair.module)
        shape = (pair.a.tensor.shape[1], pair.b.tensor.shape[0])
        done.plans.append(ModulePlan(pair.module, pair.module, *shape, (part,)))
    return done


def _part(pair: Pair, config: PeftConfig, names: tuple[str, ...], **fields: int | bool | Shape | None) -> Part:
    """A part of a pair that is no stack, by default the whole pair; `names` are those of the module, the trainer's first."""
    return Part(pair, names[0], config.scale_of(*names), pair.a.tensor.shape[0], **fields)  # type: ignore[arg-type]


class _Work:
    def __init__(self, base: BaseMap, config: PeftConfig) -> None:
        self.base = base
        self.config = config
        self.done = Arrangement()
        self._planned: dict[str, ModulePlan] = {}

    def plain(self, pair: Pair) -> None:
        part = _part(pair, self.config, (pair.a.key.path, pair.module))
        self._check_rank(part, pair.module)
        self._add(pair.module, [part], (pair.b.tensor.shape[0], pair.a.tensor.shape[1]))

    def split_fused(self, pair: Pair) -> None:
        """One A for all parts; B's rows are cut by the widths of the base's modules."""
        modules = self.base.fused[pair.module]
        whole = _part(pair, self.config, (pair.a.key.path, pair.module))
        self._check_rank(whole, pair.module)
        outs = [self.base.modules[module].out_features for module in modules]
        wanted = [sum(outs), self.base.modules[modules[0]].in_features]
        found = [pair.b.tensor.shape[0], pair.a.tensor.shape[1]]
        if wanted != found:
            self.done.misfits.append((pair.module, wanted, found))
            return
        self.done.rules["split-fused"] += 1
        at = 0
        for module, out in zip(modules, outs, strict=True):
            part = _part(pair, self.config, (pair.a.key.path, pair.module), rows=(at, at + out))
            self._add(module, [part], (out, found[1]))
            at += out

    def join_fused(self, fused: str, pairs: Sequence[Pair]) -> None:
        """The parts side by side in one A, and as blocks of one B; a part that was not trained leaves its block zero."""
        shape = self.base.modules[fused]
        by_position = {self.base.parts[pair.module][1]: pair for pair in pairs}
        outs = _widths_of_parts(fused, shape.out_features, {at: pair.b.tensor.shape[0] for at, pair in by_position.items()})
        found = [sum(outs), pairs[0].a.tensor.shape[1]]
        wanted = [shape.out_features, shape.in_features]
        if wanted != found or any(pair.a.tensor.shape[1] != found[1] for pair in pairs):
            self.done.misfits.append((fused, wanted, found))
            return
        shared = _same_a(pairs, self.base.max_rank)
        parts, rank_at = [], 0
        for position, pair in sorted(by_position.items()):
            names = (pair.a.key.path, pair.module)
            part = _part(pair, self.config, names, at=sum(outs[:position]), rank_at=rank_at)
            self._check_rank(part, pair.module)
            parts.append(part)
            rank_at += 0 if shared else part.rank
        self.done.rules["join-fused"] += len(pairs)
        self._add(fused, parts, (found[0], found[1]))

    def place_stacks(self, stacks: Mapping[str, Sequence[Pair]]) -> None:
        """Pairs that hold all experts of a layer: whose they are and which way round, by their shapes."""
        assigned = {experts: self._assigned(self.base.groups[experts], pairs) for experts, pairs in stacks.items()}
        swapped = self._are_swapped([part for parts in assigned.values() for part in parts])
        if swapped is None:
            text = "the expert factors fit both ways round, and the configuration names no `peft_version`"
            hint = "add the `peft_version` that wrote the folder to its configuration"
            self._refuse_layout(text, "`peft_version`", None, hint)
            return
        for experts, slots in assigned.items():
            self._place_group(self.base.groups[experts], slots, swapped)

    def join_experts(self, group: ExpertGroup, pairs: Sequence[Pair]) -> None:
        """Pairs of one expert each become one for all of them."""
        if self._refuse_interleaved():
            return
        by_slot: dict[tuple[int, str], Pair] = {}
        for pair in pairs:
            number, _, name = pair.module.removeprefix(f"{group.experts}.").partition(".")
            first = by_slot.setdefault((int(number), EXPERT_NAMES[name]), pair)
            if first is not pair:
                self.done.refusals.append(double(first.a, pair.a))
        roles = {name: _roles(name) for name in group.stacked}
        needed = {(number, role) for each in roles.values() for role in each for number in range(group.count)}
        if by_slot.keys() != needed:
            text = f"`{shown(group.experts)}` has factors for {len(by_slot)} of {len(needed)} linears of its experts"
            self._refuse_layout(text, len(needed), len(by_slot), _TOGETHER)
            return
        for name, path in group.stacked.items():
            self._join(path, group.count, roles[name], by_slot)

    def refuse_incomplete_experts(self) -> None:
        """The engine takes the experts of a layer all at once."""
        for experts, group in self.base.groups.items():
            planned = group.modules & self._planned.keys()
            if planned and planned != group.modules:
                text = f"`{shown(experts)}` has factors for {len(planned)} of {len(group.modules)} modules of its experts"
                self._refuse_layout(text, len(group.modules), len(planned), _TOGETHER)

    def _join(self, path: str, count: int, roles: Sequence[str], by_slot: Mapping[tuple[int, str], Pair]) -> None:
        shape = self.base.modules[path]
        rows = shape.out_features // len(roles)
        for (number, role), pair in by_slot.items():
            found = [pair.b.tensor.shape[0], pair.a.tensor.shape[1]]
            if role in roles and found != [rows, shape.in_features]:
                self.done.misfits.append((f"{path}, expert {number}", [rows, shape.in_features], found))
                return
        # What came from one A for gate and up goes back to one; else each has its own ranks.
        shared = all(_same_a([by_slot[number, role] for role in roles], self.base.max_rank) for number in range(count))
        first_rank = max(by_slot[number, roles[0]].a.tensor.shape[0] for number in range(count))
        parts = []
        for number in range(count):
            for order, role in enumerate(roles):
                pair = by_slot[number, role]
                place = {"put": number, "at": order * rows, "rank_at": 0 if shared else order * first_rank}
                part = _part(pair, self.config, (pair.a.key.path, pair.module), **place)
                self._check_rank(part, pair.module)
                parts.append(part)
        self.done.rules["join-experts"] += len(parts)
        self._add(path, parts, (shape.out_features, shape.in_features))

    def _assigned(self, group: ExpertGroup, pairs: Sequence[Pair]) -> list[_Stack]:
        """Which of the layer's parameters each pair is for. `base_layer` is the inner, usually the first of them."""
        slots = self._slots(group)
        names = list(slots)
        by_name = {pair.module.rpartition(".")[2]: pair for pair in pairs}
        orders = [{"base_layer": names[0], "experts": names[-1]}, {"base_layer": names[-1], "experts": names[0]}]
        options = [
            [
                _Stack(pair, order.get(name, name), slots.get(order.get(name, name), (0, 0)), group)
                for name, pair in by_name.items()
            ]
            for order in orders
        ]
        return next((stacks for stacks in options if all(stack.ways for stack in stacks)), options[0])

    def _slots(self, group: ExpertGroup) -> dict[str, Shape]:
        """The layer's parameters in PEFT's order, with (out, in) of one expert."""
        if group.stacked:
            return {name: _out_in(self.base.modules[path]) for name, path in group.stacked.items()}
        shapes = {role: _out_in(self.base.modules[path]) for (_, role), path in group.single.items()}
        slots = {}
        if "up" in shapes:
            out, width = shapes["up"]
            slots = {"gate_up_proj": (2 * out, width)} if "gate" in shapes else {"up_proj": (out, width)}
        if "down" in shapes:
            slots["down_proj"] = shapes["down"]
        return slots

    def _are_swapped(self, stacks: Sequence[_Stack]) -> bool | None:
        """Whether A and B have exchanged their roles; None if nothing tells. One tool wrote all of them."""
        proofs = {next(iter(stack.ways)) for stack in stacks if len(stack.ways) == 1}
        if len(proofs) == 1:
            return next(iter(proofs))
        if len(proofs) == 2 or not all(stack.ways for stack in stacks):
            return False  # the widths are wrong, and will be named
        if self.base.interleaves_experts:
            return False  # its weights lie the other way, so that PEFT never had to swap
        version = self.config.peft_version
        return None if version is None else version < UNSWAPPED_SINCE

    def _place_group(self, group: ExpertGroup, stacks: Sequence[_Stack], swapped: bool) -> None:
        for stack in stacks:
            out, width = stack.shape
            found = list(stack.found(swapped))
            if not stack.shape_known or found != [out, width]:
                self.done.misfits.append((f"{group.experts}.{stack.name}", [out, width], found))
                continue
            # The trainer's own name of the parameter, which the patterns go by.
            trained = f"{_experts_of(stack.pair.a.key.path)}.{stack.name}"
            names = (trained, f"{group.experts}.{stack.name}")
            rows, ranks = stack.pair.a.tensor.shape[0], stack.pair.b.tensor.shape[1]
            wanted = self.config.rank_of(*names) * group.count
            if (rows, ranks) != (wanted, wanted):
                self.done.refusals.append(_rank_mismatch(names[1], wanted, rows if rows == ranks else [rows, ranks]))
                continue
            part = Part(
                stack.pair, trained, self.config.scale_of(*names), rows // group.count, experts=group.count, swapped=swapped
            )
            self.done.rules["unswap-experts"] += swapped
            if group.stacked:
                self._add(group.stacked[stack.name], [part], (out, width))
            elif not self._refuse_interleaved():
                self._split(group, stack.name, part)

    def _split(self, group: ExpertGroup, name: str, stack: Part) -> None:
        roles = _roles(name)
        self.done.rules["split-experts"] += 1
        for (number, role), path in group.single.items():
            if role in roles:
                out, width = _out_in(self.base.modules[path])
                start = roles.index(role) * out
                part = Part(
                    stack.pair,
                    stack.trained_path,
                    stack.scale,
                    stack.rank,
                    experts=stack.experts,
                    swapped=stack.swapped,
                    take=number,
                    rows=(start, start + out),
                )
                self._add(path, [part], (out, width))

    def _add(self, path: str, parts: Sequence[Part], found: Shape) -> None:
        shape = self.base.modules[path]
        plan = ModulePlan(path, self.base.stored_path(path), found[1], found[0], tuple(parts), shape.experts)
        first = self._planned.setdefault(path, plan)
        if first is not plan:
            self.done.refusals.append(double(first.parts[0].pair.a, parts[0].pair.a))
            return
        self.done.plans.append(plan)
        wanted = [shape.out_features, shape.in_features]
        if wanted != list(found):
            self.done.misfits.append((path, wanted, list(found)))

    def _check_rank(self, part: Part, module: str) -> None:
        self.done.refusals += _rank_faults(part, self.config, module)

    def _refuse_interleaved(self) -> bool:
        if self.base.interleaves_experts:
            text = "this base keeps gate and up of its experts row by row in turn; other layouts can't be told apart"
            self._refuse_layout(text, "one pair for all experts", None)
        return self.base.interleaves_experts

    def _refuse_layout(self, text: str, limit: object, value: object, hint: str | None = None) -> None:
        self.done.refusals.append(refusal("moe_layout_unsupported", text, limit=limit, value=value, hint=hint))


@dataclass(frozen=True, slots=True)
class _Stack:
    """A pair for all experts of a layer, and the parameter that it is taken for: name and (out, in) of one expert."""

    pair: Pair
    name: str
    shape: Shape
    group: ExpertGroup

    @property
    def shape_known(self) -> bool:
        return self.shape != (0, 0)

    @property
    def ways(self) -> frozenset[bool]:
        """The ways round, swapped or not, in which the widths are the base's."""
        return frozenset(swapped for swapped in (False, True) if self.found(swapped) == self.shape)

    def found(self, swapped: bool) -> Shape:
        """(out, in) of one expert."""
        out, width = self.pair.b.tensor.shape[0], self.pair.a.tensor.shape[1]
        return (width, out) if swapped else (out, width)


def _roles(name: str) -> tuple[str, ...]:
    """What the linears of one expert do that the parameter `name` holds."""
    return ("gate", "up") if name == "gate_up_proj" else (EXPERT_NAMES.get(name, name),)


def _out_in(shape: ModuleShape) -> Shape:
    return shape.out_features, shape.in_features


def _experts_of(path: str) -> str:
    return path[: path.rfind(".experts") + len(".experts")] if ".experts" in path else path


def _same_a(pairs: Sequence[Pair], max_rank: int) -> bool:
    """Whether all pairs have one and the same A, as the parts of a fused projection have. What is over `max_rank` is not read."""
    first = pairs[0].a.tensor
    if first.shape[0] > max_rank or any(
        (pair.a.tensor.shape, pair.a.tensor.dtype) != (first.shape, first.dtype) for pair in pairs
    ):
        return False
    data = first.read()
    return all(pair.a.tensor.read() == data for pair in pairs[1:])


def _widths_of_parts(fused: str, total: int, known: Mapping[int, int]) -> list[int]:
    """The rows of each part. Parts that were not trained have what is left: gate and up are equal, so are k and v."""
    parts = FUSED[fused.rpartition(".")[2]]
    if len(parts) == 2:
        return [known.get(0, known.get(1, 0)), known.get(1, known.get(0, 0))]
    k, v = known.get(1, known.get(2)), known.get(2, known.get(1))
    if k is None or v is None:
        rest = max(total - known[0], 0)
        return [known[0], rest // 2, rest - rest // 2]
    return [known.get(0, max(total - k - v, 0)), k, v]


def _rank_faults(part: Part, config: PeftConfig, module: str) -> list[AdapterRefused]:
    """Tensors and configuration must agree on each module's rank."""
    wanted = config.rank_of(part.trained_path, module)
    ranks = (part.pair.a.tensor.shape[0], part.pair.b.tensor.shape[1])
    if ranks == (wanted, wanted):
        return []
    return [_rank_mismatch(module, wanted, ranks[0] if ranks[0] == ranks[1] else list(ranks))]


def _rank_mismatch(path: str, wanted: int, value: int | list[int]) -> AdapterRefused:
    text = f"`{shown(path)}` has rank {value}, the configuration says {wanted}"
    return refusal("rank_mismatch", text, limit=wanted, value=value)
