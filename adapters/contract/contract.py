"""The publish contract: looks at a folder or an archive, says no early and why, or makes the one canonical form of the adapter.

Needs numpy and the base's contract, neither torch nor the base itself.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from adapters.contract import checks
from adapters.contract.adapter_folder import VISION_WEIGHTS, FolderContents, read_folder
from adapters.contract.advice import guess_tool, target_warnings, vocabulary_warnings, warnings_for
from adapters.contract.archive import opened
from adapters.contract.arrange import arrange
from adapters.contract.landing import BaseMap, is_vision
from adapters.contract.peft_config import (
    PeftConfig,
    canonical_config,
    feature_refusals,
    parse_config,
    read_config,
    refuse_pattern_work,
)
from adapters.contract.refusals import refusal, shown
from adapters.contract.rewrite import (
    ModulePlan,
    Placed,
    SortedTensors,
    applied,
    data_rules,
    pair,
    place,
    sort_tensors,
    strict_refusal,
)
from adapters.contract.safetensors_file import Tensor
from adapters.contract.tensor_keys import FactorKey
from adapters.errors import AdapterRefused, InvalidRequest
from adapters.types import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AppliedRule,
    BaseContract,
    FileDigest,
    PreparedAdapter,
    content_digest,
)

DROPPABLE = frozenset({"vision"})


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """How to publish. `strict` refuses what needs rewriting; `alpha` replaces `lora_alpha`; `keep_dtype` keeps float32;
    `allow_zero` lets an adapter without effect pass; `max_bytes` limits the weights as they lie in the folder;
    `base_fingerprint` is that of the base it was trained on, if the trainer knows it. `drop` names kinds of weights to leave
    out although they changed the model (`vision`: factors of the vision tower); the result says that it is lossy. Raises
    InvalidRequest for another kind."""

    strict: bool = False
    alpha: float | None = None
    keep_dtype: bool = False
    allow_zero: bool = False
    max_bytes: int = 8 * 2**30
    base_fingerprint: str | None = None
    drop: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        odd = sorted(set(self.drop) - DROPPABLE)
        if odd:
            text = f"`{shown(odd[0])}` can't be dropped"
            raise InvalidRequest(text, param="drop", limit=sorted(DROPPABLE), value=shown(odd[0]))


@dataclass(frozen=True, slots=True)
class Inspection:
    """What publishing would do. `digest` and `published_bytes` are None if it would be refused; `rank` is the largest of any
    module, `alpha` the author's own, `modules` the suffix names; `tool` is a guess, for messages only."""

    findings: tuple[AdapterRefused, ...] = ()
    warnings: tuple[str, ...] = ()
    rules: tuple[AppliedRule, ...] = ()
    rank: int | None = None
    alpha: float | None = None
    modules: tuple[str, ...] = ()
    num_modules: int = 0
    source_bytes: int = 0
    published_bytes: int | None = None
    digest: str | None = None
    tool: str | None = None

    @property
    def is_publishable(self) -> bool:
        return not self.findings


@dataclass(frozen=True, slots=True)
class _Request:
    """What the caller asked for; `base` is the base's id as served, `others` are bases that a hint may name."""

    contract: BaseContract | None
    options: PublishOptions
    base: str
    others: tuple[BaseContract, ...] = ()


@dataclass(frozen=True, slots=True)
class _Examined:
    """An inspection without the values of the tensors, and the plan for them."""

    inspection: Inspection
    plans: tuple[ModulePlan, ...] = ()


@dataclass(frozen=True, slots=True)
class _Canonical:
    config: bytes
    files: tuple[FileDigest, ...]
    warnings: tuple[str, ...]


def inspect(
    source: Path,
    contract: BaseContract | None,
    options: PublishOptions | None = None,
    *,
    base: str | None = None,
    others: Iterable[BaseContract] = (),
) -> Inspection:
    """What publishing `source`, a folder or an archive, would do, all findings at once; writes nothing.

    `base` is the base's id as served, by default the contract's. Without a contract only the structure is checked. `others` are
    further bases that the caller may see: a refusal names one that would fit. Raises InvalidRequest if there is no such source.
    """
    request = _request(contract, options, base, others)
    try:
        with opened(source, request.options.max_bytes) as folder:
            return _inspected(folder, request)
    except AdapterRefused as finding:
        return Inspection(findings=(finding,))


def refusal_by_headers(
    folder: Path, contract: BaseContract | None, options: PublishOptions, *, base: str, others: Iterable[BaseContract] = ()
) -> AdapterRefused | None:
    """The first refusal that configuration and headers show, whatever the values are; arguments as for `inspect`."""
    findings = _examine(folder, _request(contract, options, base, others)).inspection.findings
    return findings[0] if findings else None


def _inspected(folder: Path, request: _Request) -> Inspection:
    examined = _examine(folder, request)
    seen = examined.inspection
    if seen.findings:
        return seen
    try:
        made = _emit(examined, request, lambda piece: None)
    except AdapterRefused as finding:
        return replace(seen, findings=(finding,))
    size = sum(file.size_bytes for file in made.files)
    return replace(seen, warnings=made.warnings, published_bytes=size, digest=content_digest(made.files))


def prepare(
    source: Path,
    contract: BaseContract | None,
    options: PublishOptions | None = None,
    *,
    workdir: Path,
    base: str | None = None,
    others: Iterable[BaseContract] = (),
) -> PreparedAdapter:
    """Writes the canonical two files into `workdir` and describes them.

    `source`, `base` and `others` as for `inspect`. Raises InvalidRequest if there is no such source, else the first refusal, the
    most specific one; nothing is left in `workdir` then.
    """
    request = _request(contract, options, base, others)
    with opened(source, request.options.max_bytes) as folder:
        examined = _examine(folder, request)
        seen = examined.inspection
        if seen.findings:
            raise seen.findings[0]
        made = _write(examined, request, workdir)
    return PreparedAdapter(
        config=made.config,
        weights=workdir / WEIGHTS_FILE,
        files=made.files,
        digest=content_digest(made.files),
        rank=seen.rank or 0,
        alpha=seen.alpha or 0.0,
        modules=seen.modules,
        num_modules=seen.num_modules,
        base_fingerprint=contract.fingerprint if contract else request.options.base_fingerprint,
        rules=seen.rules,
        warnings=made.warnings,
    )


def _request(
    contract: BaseContract | None, options: PublishOptions | None, base: str | None, others: Iterable[BaseContract]
) -> _Request:
    return _Request(contract, options or PublishOptions(), base or (contract.base if contract else ""), tuple(others))


def _examine(folder: Path, request: _Request) -> _Examined:
    """Everything that can be said without reading the values."""
    try:
        contents = read_folder(folder, max_bytes=request.options.max_bytes)
        raw = parse_config(contents.config)
    except AdapterRefused as finding:
        return _Examined(Inspection(findings=(finding,)))
    except OSError as error:
        raise InvalidRequest("the source can't be read", param="source", value=type(error).__name__) from None
    seen = Inspection(warnings=contents.warnings, source_bytes=contents.size_bytes, tool=guess_tool(contents.names, raw))
    features = [*feature_refusals(raw), *_folder_findings(contents, request)]
    try:
        config = read_config(raw, alpha=request.options.alpha)
    except AdapterRefused as finding:
        return _Examined(replace(seen, findings=(*features, finding)))
    return _examine_weights(contents, config, request, replace(seen, findings=tuple(features)))


def _folder_findings(contents: FolderContents, request: _Request) -> Iterable[AdapterRefused]:
    """What other files in the folder say about the adapter."""
    if contents.trained_tower and "vision" not in request.options.drop:
        text = f"a fully trained vision tower (`{VISION_WEIGHTS}`) lies beside the adapter"
        yield refusal("extra_weights", text, limit=0, value=VISION_WEIGHTS)
    for name, size in contents.trained_beside:
        text = f"weights that were trained in full (`{name}`, {size} bytes) lie beside the adapter"
        hint = "merge them and serve the model as a base; if nothing but factors was trained, publish without that file"
        yield refusal("extra_weights", text, limit=0, value=name, hint=hint)
    if contents.unconverted:
        text = "the folder of an unconverted adapter, whose init changed the base's own weights"
        hint = f"publish its subfolder `{contents.unconverted}`"
        yield refusal("base_changing_init", text, limit="a converted adapter", value=contents.unconverted, hint=hint)


@dataclass(frozen=True, slots=True)
class _Landed:
    """The factors of a file against a base: what has a place there, what has none, what was left out on request."""

    placed: tuple[Placed, ...]
    homeless: tuple[FactorKey, ...]
    dropped: tuple[str, ...]
    rules: Counter[str]


def _landed(tensors: SortedTensors, base: BaseMap | None, options: PublishOptions) -> _Landed:
    drop_vision = "vision" in options.drop
    kept: list[tuple[FactorKey, Tensor]] = []
    dropped: list[str] = []
    for key, tensor in tensors.factors:
        home = base.home_of(key.path) if base else None
        if drop_vision and is_vision(home.module if home else key.path):
            dropped.append(key.path)
        else:
            kept.append((key, tensor))
    placed, homeless, rules = place(kept, base)
    rules["drop-vision"] += len(dropped)
    return _Landed(tuple(placed), tuple(homeless), tuple(dropped), rules)


def _examine_weights(contents: FolderContents, config: PeftConfig, request: _Request, seen: Inspection) -> _Examined:
    base = BaseMap(request.contract) if request.contract else None
    tensors = sort_tensors(contents.tensors, base)
    landed = _landed(tensors, base, request.options)
    findings = [*seen.findings, *_fingerprint_findings(config, request)]
    findings += checks.refuse_others(tensors.others)
    findings += checks.refuse_names(key for key, _ in tensors.factors)
    if not (landed.placed or landed.homeless or tensors.others):
        text = "nothing is left to publish" if landed.dropped else "the weights file holds no factors"
        findings.append(refusal("no_tensors", text, limit=1, value=0))
    forms = checks.refuse_forms(landed.placed)
    findings += forms
    if base:
        findings += checks.refuse_homeless(landed.homeless, landed.placed, base)
    costly = refuse_pattern_work(config, (factor.key.path for factor in landed.placed if factor.key.side == "A"))
    findings += costly
    plans: Sequence[ModulePlan] = ()
    if not (forms or costly):
        plans, targets, more = _planned(landed, config, request, base)
        findings += more
        seen = replace(seen, warnings=(*seen.warnings, *target_warnings(targets)))
    rules = landed.rules + Counter({"merge-shards": contents.shards, "drop-copies": len(tensors.copies)})
    rules["drop-training-state"] += len(tensors.training_state)
    if contents.trained_tower and "vision" in request.options.drop:
        rules["drop-vision"] += 1
    warnings = (*seen.warnings, *vocabulary_warnings(contents.tokens, request.contract))
    return _concluded(replace(seen, findings=tuple(findings), warnings=warnings), plans, rules, config, request)


def _planned(
    landed: _Landed, config: PeftConfig, request: _Request, base: BaseMap | None
) -> tuple[Sequence[ModulePlan], checks.Targets, list[AdapterRefused]]:
    """The modules that would be published, and every reason why not; the rules that it took are added to `landed`'s."""
    pairs, findings = pair(landed.placed)
    work = arrange(pairs, config, base)
    landed.rules.update(work.rules)
    findings += work.refusals
    if base:
        findings += checks.refuse_rank_limit(work.plans, base)
        findings += checks.refuse_shapes(work.misfits, _fitting(landed, config, request) if work.misfits else ())
    targets = checks.compare_targets(work.plans, config, base, landed.dropped)
    findings += [*checks.refuse_scales(work.plans), *checks.refuse_targets(targets)]
    return work.plans, targets, findings


def _fitting(landed: _Landed, config: PeftConfig, request: _Request) -> list[str]:
    """The other bases that would take the same factors as they are."""
    return [contract.base for contract in request.others if _fits(landed, config, BaseMap(contract))]


def _fits(landed: _Landed, config: PeftConfig, base: BaseMap) -> bool:
    placed, homeless, _ = place(((factor.key, factor.tensor) for factor in landed.placed), base)
    pairs, halves = pair(placed)
    work = arrange(pairs, config, base)
    return not (homeless or halves or work.refusals or work.misfits or checks.refuse_rank_limit(work.plans, base))


def _concluded(
    seen: Inspection, plans: Sequence[ModulePlan], rules: Counter[str], config: PeftConfig, request: _Request
) -> _Examined:
    rank = max((plan.rank for plan in plans), default=config.rank)
    modules = tuple(sorted({plan.suffix for plan in plans}))
    rules = rules + data_rules(plans, rank, keep_dtype=request.options.keep_dtype)
    strict = strict_refusal(rules, config) if request.options.strict else None
    rewritten = parse_config(_canonical_config(plans, rank, request))
    rules["rewrite-config"] = sum(config.raw.get(key) != rewritten.get(key) for key in config.raw.keys() | rewritten.keys())
    seen = replace(
        seen,
        findings=_one_per_code([*seen.findings, *([strict] if strict else [])]),
        warnings=(*seen.warnings, *warnings_for(config, plans, request.contract, rules)),
        rules=applied(rules),
        rank=rank,
        alpha=config.alpha,
        modules=modules,
        num_modules=len(plans),
    )
    return _Examined(seen, tuple(plans))


def _canonical_config(plans: Sequence[ModulePlan], rank: int, request: _Request) -> bytes:
    """Experts that are one module are parameters to PEFT, all others are modules by their last name."""
    modules = {plan.suffix for plan in plans if plan.experts is None}
    parameters = {".".join(plan.path.split(".")[-3:]) for plan in plans if plan.experts is not None}
    return canonical_config(base=request.base, rank=rank, modules=modules, parameters=parameters)


def _fingerprint_findings(config: PeftConfig, request: _Request) -> list[AdapterRefused]:
    if request.contract is None:
        return []
    return checks.refuse_fingerprint(request.options.base_fingerprint or config.fingerprint, request.contract.fingerprint)


def _one_per_code(findings: Iterable[AdapterRefused]) -> tuple[AdapterRefused, ...]:
    """The first finding of each code: configuration and weights often show the same fault."""
    first: dict[str | None, AdapterRefused] = {}
    for finding in findings:
        first.setdefault(finding.reason, finding)
    return tuple(first.values())


def _emit(examined: _Examined, request: _Request, sink: Callable[[bytes], object]) -> _Canonical:
    """Sends the weights to `sink`. Raises the refusals that only the values show."""
    from adapters.contract.canonical import emit  # numpy is loaded only when values are read

    seen = examined.inspection
    rank = seen.rank or 0
    weights = emit(examined.plans, rank, sink, keep_dtype=request.options.keep_dtype)
    warnings = list(seen.warnings)
    if not weights.changes_something:
        text = "in every module A or B is zero: the adapter changes nothing"
        if not request.options.allow_zero:
            raise refusal("changes_nothing", text, limit="some B @ A not zero", value=0)
        warnings.append(text)
    if weights.flushed:
        warnings.append(f"{weights.flushed} values were too small for their dtype and became zero")
    config = _canonical_config(examined.plans, rank, request)
    files = (
        FileDigest(CONFIG_FILE, len(config), hashlib.sha256(config).hexdigest()),
        FileDigest(WEIGHTS_FILE, weights.size_bytes, weights.sha256, weights.tree),
    )
    return _Canonical(config, files, tuple(warnings))


def _write(examined: _Examined, request: _Request, workdir: Path) -> _Canonical:
    """Both files appear under their names only when they are whole."""
    workdir.mkdir(parents=True, exist_ok=True)
    partial = workdir / f".{WEIGHTS_FILE}.partial"
    try:
        with partial.open("wb") as file:
            made = _emit(examined, request, file.write)
        (workdir / CONFIG_FILE).write_bytes(made.config)
        os.replace(partial, workdir / WEIGHTS_FILE)
    finally:
        partial.unlink(missing_ok=True)
    return made
