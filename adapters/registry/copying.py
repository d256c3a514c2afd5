"""A registry copied into another store: a backup, and the way back.

The target is whole at every moment: bases first, then for each adapter its files, its manifests and last its head; the index is
rebuilt at the end. A copy that was interrupted goes on where it stopped. The source may be written meanwhile: each adapter is
copied as of one moment, that at which its head was read; what is published later comes with the next copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from adapters.names import AdapterRef
from adapters.registry.index import SweepReport
from adapters.store import Store

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy did. `heads_newer` are adapters whose head in the target is newer and was left; `damaged` are versions whose
    files are missing or wrong in the source, whose adapters were not brought up to date."""

    adapters: int
    versions: int
    versions_copied: int
    files_copied: int
    bytes_copied: int
    heads_copied: int
    heads_newer: tuple[str, ...]
    bases_copied: int
    damaged: tuple[AdapterRef, ...]
    index: SweepReport


async def copy(source: Store, target: Store, progress: Progress | None = None, *, verify: bool = False) -> CopyReport:
    """Copies the registry in `source` into `target`; what is there already stays. `progress` is told adapters done and in all.

    Manifests and heads go byte for byte; files are hashed while they are copied, with `verify` also those that are there already.
    Neither the index nor `registry.json` is copied. Raises VersionConflict with reason `different_history`, before anything is
    written, if a version is something else in the target, and for a head that went another way there; and the stores' errors.
    """
    raise NotImplementedError
