"""The publish contract: looks at a folder, says no early and why, or makes the one canonical form of the adapter.

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
from adapters.contract.adapter_folder import FolderContents, read_folder
from adapters.contract.advice import guess_tool, warnings_for
from adapters.contract.landing import BaseMap
from adapters.contract.peft_config import PeftConfig, canonical_config, feature_refusals, parse_config, read_config
from adapters.contract.refusals import refusal
from adapters.contract.rewrite import ModulePlan, applied, data_rules, pair, place, sort_tensors, strict_refusal
from adapters.errors import AdapterRefused
from adapters.types import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AppliedRule,
    BaseContract,
    FileDigest,
    PreparedAdapter,
    content_digest,
)


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """How to publish. `strict` refuses what needs rewriting; `alpha` replaces `lora_alpha`; `keep_dtype` keeps float32;
    `allow_zero` lets an adapter without effect pass; `max_bytes` limits the weights as they lie in the folder;
    `base_fingerprint` is that of the base it was trained on, if the trainer knows it."""

    strict: bool = False
    alpha: float | None = None
    keep_dtype: bool = False
    allow_zero: bool = False
    max_bytes: int = 8 * 2**30
    base_fingerprint: str | None = None


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
    """What the caller asked for; `base` is the base's id as served."""

    contract: BaseContract | None
    options: PublishOptions
    base: str


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
    folder: Path, contract: BaseContract | None, options: PublishOptions | None = None, *, base: str | None = None
) -> Inspection:
    """What publishing `folder` would do, all findings at once; writes nothing.

    `base` is the base's id as served, by default the contract's. Without a contract only the structure is checked.
    Raises InvalidRequest if there is no such folder.
    """
    request = _Request(contract, options or PublishOptions(), base or (contract.base if contract else ""))
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
    folder: Path,
    contract: BaseContract | None,
    options: PublishOptions | None = None,
    *,
    workdir: Path,
    base: str | None = None,
) -> PreparedAdapter:
    """Writes the canonical two files into `workdir` and describes them.

    Raises InvalidRequest if there is no such folder, else the first refusal, the most specific one; nothing is left in
    `workdir` then.
    """
    request = _Request(contract, options or PublishOptions(), base or (contract.base if contract else ""))
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


def _examine(folder: Path, request: _Request) -> _Examined:
    """Everything that can be said without reading the values."""
    try:
        contents = read_folder(folder, max_bytes=request.options.max_bytes)
        raw = parse_config(contents.config)
    except AdapterRefused as finding:
        return _Examined(Inspection(findings=(finding,)))
    seen = Inspection(warnings=contents.warnings, source_bytes=contents.size_bytes, tool=guess_tool(contents.names, raw))
    features = feature_refusals(raw)
    try:
        config = read_config(raw, alpha=request.options.alpha)
    except AdapterRefused as finding:
        return _Examined(replace(seen, findings=(*features, finding)))
    return _examine_weights(contents, config, request, replace(seen, findings=tuple(features)))


def _examine_weights(contents: FolderContents, config: PeftConfig, request: _Request, seen: Inspection) -> _Examined:
    base = BaseMap(request.contract) if request.contract else None
    tensors = sort_tensors(contents.tensors, base)
    placed, homeless, rules = place(tensors.factors, base)
    findings = [*seen.findings, *_fingerprint_findings(config, request)]
    findings += checks.refuse_others(tensors.others)
    if not tensors.factors and not tensors.others:
        findings.append(refusal("no_tensors", "the weights file holds no factors", limit=1, value=0))
    findings += checks.refuse_names(key for key, _ in tensors.factors)
    forms = checks.refuse_forms(placed)
    findings += forms
    if base:
        findings += checks.refuse_homeless(homeless, placed, base)
    plans, pair_findings = ([], []) if forms else pair(placed, config)
    findings += [*pair_findings, *_plan_findings(plans, config, base)]
    rules += Counter({"merge-shards": contents.shards, "drop-copies": len(tensors.copies)})
    return _concluded(replace(seen, findings=tuple(findings)), plans, rules, config, request)


def _concluded(
    seen: Inspection, plans: Sequence[ModulePlan], rules: Counter[str], config: PeftConfig, request: _Request
) -> _Examined:
    rank = max((plan.rank for plan in plans), default=config.rank)
    modules = tuple(sorted({plan.suffix for plan in plans}))
    rules = rules + data_rules(plans, rank, keep_dtype=request.options.keep_dtype)
    strict = strict_refusal(rules, config) if request.options.strict else None
    rewritten = parse_config(canonical_config(base=request.base, rank=rank, modules=modules))
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


def _fingerprint_findings(config: PeftConfig, request: _Request) -> list[AdapterRefused]:
    if request.contract is None:
        return []
    return checks.refuse_fingerprint(request.options.base_fingerprint or config.fingerprint, request.contract.fingerprint)


def _plan_findings(plans: Sequence[ModulePlan], config: PeftConfig, base: BaseMap | None) -> list[AdapterRefused]:
    findings = checks.refuse_ranks(plans, config)
    if base:
        findings += [*checks.refuse_rank_limit(plans, base), *checks.refuse_shapes(plans, base)]
    return [*findings, *checks.refuse_scales(plans), *checks.refuse_targets(plans, config, base)]


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
        text = "every B is zero: the adapter changes nothing"
        if not request.options.allow_zero:
            raise refusal("changes_nothing", text, limit="some B not zero", value=0)
        warnings.append(text)
    if weights.flushed:
        warnings.append(f"{weights.flushed} values were too small for their dtype and became zero")
    config = canonical_config(base=request.base, rank=rank, modules=seen.modules)
    files = (
        FileDigest(CONFIG_FILE, len(config), hashlib.sha256(config).hexdigest()),
        FileDigest(WEIGHTS_FILE, weights.size_bytes, weights.sha256),
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
