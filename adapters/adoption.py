"""Adapters that lie in plain folders of an object store, as `aws s3 sync` or a trainer leaves them, become versions.

`find` looks, `adopt` publishes one folder, `DropWatcher` does both by itself for a watched prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from adapters.contract import PublishOptions
from adapters.registry import Published, Registry
from adapters.settings import DropSettings, StoreSettings
from adapters.store import Listed, Store
from adapters.types import By

LOOK_AGAIN_S = 1.0
SETTLE_S = 10.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A folder that looks like an adapter. `prefix` is its key prefix in the source, with a `/` at the end (empty for the root).

    `name` is an adapter name in the grammar, made of `original`, the path as it lies there; `step` is the trainer's.
    `complete` says that configuration and weights are there to the last byte, `settled` that nothing changed lately; `reason`
    says why it is not taken: `no_config`, `no_weights`, `missing_shards`, `weights_cut_off`, `config_cut_off`, `inside_another`,
    `changing`, `earlier_step_changing`. `state` is a digest of keys, sizes and ETags: equal state, equal content.
    """

    name: str
    original: str
    step: int | None
    prefix: str
    complete: bool
    settled: bool
    reason: str | None
    files: tuple[Listed, ...]
    state: str

    @property
    def is_ready(self) -> bool:
        return self.complete and self.settled and self.reason is None

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class Adoption:
    """What to adopt and as what. `address` is what the manifest says about where it came from; credentials in it are removed.

    `options` are the publish contract's; `promote` is an alias that moves to the version afterwards.
    """

    base: str
    name: str
    prefix: str
    step: int | None = None
    original: str | None = None
    address: str | None = None
    promote: str | None = None
    by: By = field(default_factory=By)
    options: PublishOptions = field(default_factory=PublishOptions)


async def find(
    source: Store,
    prefix: str = "",
    *,
    default_name: str | None = None,
    settle_s: float = SETTLE_S,
    look_again_s: float = LOOK_AGAIN_S,
) -> tuple[Candidate, ...]:
    """The adapter folders under `prefix`, by name and step, ready or not. Reads listings and headers only, and looks twice,
    `look_again_s` apart. `default_name` names a folder that lies at the root. Raises the store's errors."""
    raise NotImplementedError


async def adopt(
    registry: Registry, source: Store, adoption: Adoption, progress: Callable[[int, int], None] | None = None
) -> Published:
    """Publishes the folder under `adoption.prefix` as the next version, or finds the version that holds its content.

    Takes the folder as it is now; `find` says whether it is complete and settled. `progress` is told bytes sent and bytes in all.
    Raises ModelNotFound if no adapter lies there, VersionConflict if the folder changed meanwhile, AdapterRefused, InvalidRequest
    and the stores' errors.
    """
    raise NotImplementedError


def source_settings(url: str, registry: StoreSettings) -> StoreSettings:
    """How to reach the folder `url`; where it says nothing else, with the registry's endpoint and credentials.

    Raises InvalidRequest for an address that is none.
    """
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one look of a watcher made of one folder: `published`, `known` (its content was a version), `refused`, `waiting`,
    `failed` (store trouble; tried again)."""

    prefix: str
    name: str
    what: str
    ref: str | None = None
    reason: str | None = None


class DropWatcher:
    """Watches a drop prefix: complete and settled folders become versions. Several at once do no harm."""

    def __init__(self, registry: Registry, source: Store, settings: DropSettings) -> None:
        raise NotImplementedError

    async def look(self) -> Sequence[Outcome]:
        """Looks once and takes what is ready, steps in ascending order. Raises the stores' errors if nothing could be listed."""
        raise NotImplementedError

    async def run(self) -> None:
        """Looks every `interval_s` until it is cancelled; trouble is logged and survived."""
        raise NotImplementedError
