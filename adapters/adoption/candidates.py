"""Looking for adapter folders: what lies there, what of it is whole, and what has settled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from adapters.adoption.completeness import missing_part
from adapters.adoption.layouts import Folder, adapter_name, doubles, folders_of
from adapters.store import Listed, Store

LOOK_AGAIN_S = 1.0
SETTLE_S = 10.0

CHANGING = "changing"
EARLIER_CHANGING = "earlier_step_changing"
INSIDE = "inside_another"
NAME_TAKEN = "name_taken"

States = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A folder that looks like an adapter. `prefix` is its key prefix in the source, with a `/` at the end (empty for the root).

    `name` is an adapter name in the grammar, made of `original`, the path as it lies there; `step` is the trainer's.
    `complete` says that configuration and weights are there to the last byte, `settled` that nothing changed lately; `reason`
    says why it is not taken: `no_config`, `no_weights`, `missing_shards`, `weights_cut_off`, `config_cut_off`, `not_downloaded`,
    `inside_another` (a part of an adapter), `name_taken` (another folder's name comes to the same), `changing`,
    `earlier_step_changing`. `state` is a digest of keys, sizes and ETags: equal state, equal content.
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


async def find(
    source: Store,
    prefix: str = "",
    *,
    default_name: str | None = None,
    settle_s: float = SETTLE_S,
    look_again_s: float = LOOK_AGAIN_S,
) -> tuple[Candidate, ...]:
    """The adapter folders under `prefix`, by name and step, ready or not. Reads listings, small files and headers only, and looks
    twice, `look_again_s` apart. `default_name` names a folder that lies at the root. Raises the store's errors."""
    looker = Looker(source, prefix, default_name=default_name, settle_s=settle_s)
    await looker.look()
    await asyncio.sleep(look_again_s)
    return await looker.look()


class Looker:
    """Looks again and again; remembers the last look, and what it found out about folders that stay as they are."""

    def __init__(
        self,
        source: Store,
        prefix: str = "",
        *,
        default_name: str | None = None,
        settle_s: float = SETTLE_S,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._source = source
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._default_name = default_name
        self._settle_s = settle_s
        self._clock_s = clock_s
        self._before: States = {}
        self._missing: dict[tuple[str, str], str | None] = {}

    async def look(self) -> tuple[Candidate, ...]:
        """What lies there now. The first look finds nothing settled. Raises the store's errors."""
        rows = [row async for row in self._source.list(self._prefix)]
        folders = folders_of(rows, self._prefix, self._default_name)
        missing = {(folder.prefix, folder.state): await self._missing_part(folder) for folder in folders}
        found = judged(folders, missing, self._before, settle_s=self._settle_s, now_s=self._clock_s())
        self._before = {folder.prefix: folder.state for folder in folders}
        self._missing = missing
        return found

    async def _missing_part(self, folder: Folder) -> str | None:
        known = (folder.prefix, folder.state)
        return self._missing[known] if known in self._missing else await missing_part(self._source, folder)


def judged(
    folders: Sequence[Folder], missing: Mapping[tuple[str, str], str | None], before: States, *, settle_s: float, now_s: float
) -> tuple[Candidate, ...]:
    """What becomes of each folder; pure. A step waits while an earlier one of its name is being written, so that steps become
    versions in their order; one that was left half copied holds up nobody."""
    settled = {
        folder.prefix: before.get(folder.prefix) == folder.state and now_s - folder.modified_s >= settle_s for folder in folders
    }
    twice = {folder.prefix for folder in doubles(folders)}

    def reason(folder: Folder) -> str | None:
        if folder.is_inside_another:
            return INSIDE
        if folder.prefix in twice:
            return NAME_TAKEN
        if (part := missing[folder.prefix, folder.state]) is not None:
            return part
        if not settled[folder.prefix]:
            return CHANGING
        return EARLIER_CHANGING if any(not settled[other.prefix] for other in _earlier(folder, folders)) else None

    return tuple(
        Candidate(
            name=adapter_name(folder.original),
            original=folder.original,
            step=folder.step,
            prefix=folder.prefix,
            complete=missing[folder.prefix, folder.state] is None,
            settled=settled[folder.prefix],
            reason=reason(folder),
            files=folder.files,
            state=folder.state,
        )
        for folder in folders
    )


def _earlier(folder: Folder, folders: Sequence[Folder]) -> Iterable[Folder]:
    """The earlier steps of the same name; what has no step comes last."""
    same = (other for other in folders if other.original == folder.original and not other.is_inside_another and other != folder)
    return (other for other in same if other.step is not None and (folder.step is None or other.step < folder.step))
