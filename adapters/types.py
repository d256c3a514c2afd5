"""The values that travel between parts. All frozen; nothing here does I/O."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from adapters.names import LATEST, PRODUCTION, AdapterRef

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)


@dataclass(frozen=True, slots=True)
class FileDigest:
    """One file of a version: its name, size in bytes and SHA-256 (hex).

    `tree` is the digest of the same bytes by parts (`adapters.tree_digest`), for files of more than one part; files are what
    their `sha256` says, with it or without.
    """

    name: str
    size_bytes: int
    sha256: str
    tree: str | None = field(default=None, compare=False)


def content_digest(files: tuple[FileDigest, ...]) -> str:
    """The digest of a version: SHA-256 over its files' names and digests, in name order. Equal content, equal digest."""
    lines = "".join(f"{file.name} {file.sha256}\n" for file in sorted(files, key=lambda file: file.name))
    return hashlib.sha256(lines.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class AppliedRule:
    """A rewrite that the publish contract applied: the rule's name and how many tensors or fields it touched.

    `lossy` marks a rule that left out weights which changed the model; it is applied only when it is asked for.
    """

    name: str
    count: int
    lossy: bool = False


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a version is. Written last and only if absent: its existence is the publication."""

    ref: AdapterRef
    digest: str
    files: tuple[FileDigest, ...]
    rank: int
    alpha: float
    modules: tuple[str, ...]
    created_at: str
    base_fingerprint: str | None = None
    num_modules: int = 0
    rules: tuple[AppliedRule, ...] = ()
    warnings: tuple[str, ...] = ()
    message: str | None = None
    who: str | None = None
    source: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class By:
    """Who changes an adapter and why; only if it still has `expected_revision`; `unlock` lets a protected alias move."""

    who: str | None = None
    message: str | None = None
    expected_revision: int | None = None
    unlock: bool = False


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """One change of an adapter: who, when, from, to, why.

    `alias` is None for what happens to a version as such (retire, restore, collect). `from_version` is None for an alias' first
    move, `to_version` when the alias is gone, `weights` what the alias shares its traffic by afterwards, `move_id` the pending
    move that this row ended.
    """

    alias: str | None
    from_version: int | None
    to_version: int | None
    at: str
    who: str | None = None
    message: str | None = None
    kind: str = "promote"
    weights: dict[int, int] | None = None
    move_id: str | None = None


WarmTier = Literal["engine", "disk"]


@dataclass(frozen=True, slots=True)
class Directive:
    """Where a version should be before anybody asks for it.

    `target` is a version number or an alias, as text: a directive on an alias follows its moves. `pin` keeps the adapter there
    until the directive ends; without it, it is brought there once and competes like any other then. `replicas` None means all.
    The window runs from `start` (None: at once) to `until` (None: for good), both ISO 8601 in UTC; with `every_s` it comes back
    that many seconds later, again and again. Replicas follow these; nobody below them decides.
    """

    target: str
    tier: WarmTier
    pin: bool
    replicas: int | None = None
    start: str | None = None
    until: str | None = None
    every_s: int | None = None
    at: str = ""
    who: str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class PendingMove:
    """A promotion that waits until `version` is warm: `alias` moves when `min_ready` replicas hold it in their engines (None:
    where the version before is held, one at least), or fails at `deadline` (ISO 8601, UTC). `taken_by` names the gateway that
    saw it first; until then nobody may be there to move it."""

    id: str
    alias: str
    version: int
    min_ready: int | None
    deadline: str
    at: str
    who: str | None = None
    message: str | None = None
    taken_by: str | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """The truth about an adapter beside its versions. `revision` grows by one with each write.

    `aliases` names one version each; where `weights` has the alias too, its traffic is shared by them, that version's among
    them. `collected` holds the versions whose files are gone, with the time when they were given up; they are retired as well.
    `recent_changes` are the ids of the last writes, so that a writer whose answer was lost knows its own; `pending` holds the
    moves under way by alias; `extra` is what a newer release put there, kept when an older one writes.
    """

    base: str
    name: str
    revision: int = 0
    change_id: str = ""
    aliases: dict[str, int] = field(default_factory=dict)
    weights: dict[str, dict[int, int]] = field(default_factory=dict)
    protected: frozenset[str] = frozenset()
    history: tuple[HistoryRow, ...] = ()
    retired: frozenset[int] = frozenset()
    collected: dict[int, str] = field(default_factory=dict)
    tags: dict[int, dict[str, str]] = field(default_factory=dict)
    recent_changes: tuple[str, ...] = ()
    directives: tuple[Directive, ...] = ()
    pending: dict[str, PendingMove] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def aliases_of(self, version: int) -> list[str]:
        """The aliases that send requests to `version`, in order."""
        weighted = {alias for alias, weights in self.weights.items() if version in weights}
        return sorted({alias for alias, named in self.aliases.items() if named == version} | weighted)


@dataclass(frozen=True, slots=True)
class VersionEntry:
    """A version as the index shows it: enough to resolve, list and fetch without another call to the store."""

    version: int
    digest: str
    files: tuple[FileDigest, ...]
    rank: int
    created_at: str
    num_modules: int = 0
    retired: bool = False
    collected: bool = False
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """An adapter as the index shows it. `head_etag` is that of the head which the row was made from: a listing that shows
    another one shows a row that is behind."""

    base: str
    name: str
    revision: int
    aliases: dict[str, int]
    versions: dict[int, VersionEntry]
    weights: dict[str, dict[int, int]] = field(default_factory=dict)
    head_etag: str | None = None
    directives: tuple[Directive, ...] = ()
    pending: dict[str, PendingMove] = field(default_factory=dict)

    @property
    def latest(self) -> int | None:
        """The newest version that is not retired."""
        live = [number for number, entry in self.versions.items() if not entry.retired]
        return max(live, default=None)

    def version_of(self, alias: str) -> int | None:
        """The version that `alias` names now, whatever its weights; `latest` is computed."""
        return self.latest if alias == LATEST else self.aliases.get(alias)

    @property
    def production(self) -> int | None:
        return self.aliases.get(PRODUCTION)


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """The answer to "which version": a ref and the files that make it. Travels with the request to the replica.

    `chosen_by` says how: the name alone, or, under an alias with weights, the caller's key or chance.
    """

    ref: AdapterRef
    digest: str
    files: tuple[FileDigest, ...]
    rank: int
    num_modules: int = 0
    chosen_by: Literal["name", "key", "chance"] = "name"

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class LocalAdapter:
    """Verified files on this node: `path` is a folder that holds exactly the adapter's two files."""

    digest: str
    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """A linear module of a base that takes LoRA: `weight` is [out_features, in_features].

    `experts` is set where the engine takes all experts of a layer as one module (`...mlp.experts.gate_up_proj`), whose weight
    has an expert dimension more; the widths are then those of one expert.
    """

    in_features: int
    out_features: int
    experts: int | None = None


@dataclass(frozen=True, slots=True)
class BaseContract:
    """What a base takes, as a live replica reports it: `bases/<base-key>.json`.

    `modules` maps each module's path in the Hugging Face model (without `base_model.model.`) to its shape;
    `max_rank` is the engine's limit; `tower` is the prefix of the text layers of a vision-language base or None;
    `serves_vision` says whether LoRA on the vision tower is applied.
    """

    base: str
    fingerprint: str
    modules: dict[str, ModuleShape]
    max_rank: int
    tower: str | None = None
    serves_vision: bool = False
    architecture: str | None = None


@dataclass(frozen=True, slots=True)
class PreparedAdapter:
    """What the publish contract made of a folder: the canonical two files and what a manifest says about them.

    `weights` is the file on disk, or its bytes; `modules` are the suffix names of the modules, `alpha` the author's own
    (in the files it is folded into the weights).
    """

    config: bytes
    weights: bytes | Path
    files: tuple[FileDigest, ...]
    digest: str
    rank: int
    alpha: float
    modules: tuple[str, ...]
    num_modules: int
    base_fingerprint: str | None
    rules: tuple[AppliedRule, ...] = ()
    warnings: tuple[str, ...] = ()
