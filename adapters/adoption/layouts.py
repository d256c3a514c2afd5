"""Which folders of a listing are adapters, what they are called and of which step they are. Pure.

Known: `<name>/`, `<team>/<name>/`, `<run>/global_step_N/policy/` with `lora_adapter/` in it or not, `<name>/checkpoint-N/`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from adapters.contract.adapter_folder import INDEX_FILE
from adapters.names import RESERVED_ADAPTER_NAMES
from adapters.store import Listed
from adapters.types import CONFIG_FILE, WEIGHTS_FILE

UNNAMED = "adapter"
MAX_SEGMENT_CHARS = 63

_SHARD = re.compile(r"(adapter_)?model-(\d+)-of-(\d+)\.safetensors")
_PICKLE = "adapter_model.bin"
_STEP = re.compile(r"(?:global_step_|checkpoint-|step[_-]?|iter_)(\d{1,12})")
_BELOW_A_STEP = frozenset({"policy", "actor", "lora_adapter"})  # what trainers put between a step and its adapter
_FOREIGN = re.compile(r"[^a-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder with files of an adapter in it. `prefix` ends with `/` or is empty, `files` are those directly in it."""

    prefix: str
    original: str
    step: int | None
    files: tuple[Listed, ...]
    is_inside_another: bool = False

    @property
    def names(self) -> dict[str, Listed]:
        return {file.key.rpartition("/")[2]: file for file in self.files}

    @property
    def state(self) -> str:
        """Equal state, equal content."""
        lines = (f"{file.key} {file.size_bytes} {file.etag}\n" for file in self.files)
        return hashlib.sha256("".join(lines).encode(errors="surrogatepass")).hexdigest()

    @property
    def modified_s(self) -> float:
        return max(file.modified_s for file in self.files)


def folders_of(rows: Iterable[Listed], prefix: str, default_name: str | None = None) -> list[Folder]:
    """The adapter folders among the rows under `prefix`, in order of name and step; what has no step is the newest."""
    files: dict[str, list[Listed]] = {}
    for row in rows:
        files.setdefault(row.key[: row.key.rfind("/") + 1], []).append(row)
    found = {folder: tuple(sorted(inside, key=_key)) for folder, inside in files.items() if _is_adapter(inside)}
    folders = [
        _folder(folder, prefix, default_name, inside, found) for folder, inside in found.items() if _is_seen(folder, prefix)
    ]
    return sorted(folders, key=lambda folder: (folder.original, folder.step is None, folder.step or 0, folder.prefix))


def _key(row: Listed) -> str:
    return row.key


def _is_adapter(files: Iterable[Listed]) -> bool:
    names = {row.key.rpartition("/")[2] for row in files}
    return bool(names & {CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE, _PICKLE}) or bool(shards_of(names))


def shards_of(names: Collection[str]) -> list[str]:
    """The shards of an adapter; those that bear a model's name only beside an adapter's index."""
    shards = sorted(name for name in names if _SHARD.fullmatch(name))
    own = [name for name in shards if name.startswith("adapter_")]
    return own or (shards if INDEX_FILE in names else [])


def are_all_there(shards: Collection[str]) -> bool:
    """Whether the numbers in the names are those of one whole set."""
    numbers = {(int(match[2]), int(match[3])) for name in shards if (match := _SHARD.fullmatch(name))}
    return numbers == {(number, len(shards)) for number in range(1, len(shards) + 1)}


def _is_seen(folder: str, prefix: str) -> bool:
    """Hidden folders are other tools' caches."""
    return not any(part.startswith(".") for part in folder.removeprefix(prefix).split("/"))


def _folder(
    folder: str, prefix: str, default_name: str | None, files: tuple[Listed, ...], all_folders: Mapping[str, object]
) -> Folder:
    parts = _parts(folder.removeprefix(prefix))
    name, step = _split(parts)
    if not name:
        above, step_above = _split(_parts(prefix))
        name = above[-1:] or [default_name or UNNAMED]
        step = step if step is not None else step_above
    inside = any(_is_within(folder, other) for other in all_folders)
    return Folder(folder, "/".join(name), step, files, inside)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _split(parts: list[str]) -> tuple[list[str], int | None]:
    """The parts that name the adapter, and the step that the last ones name."""
    last = len(parts)
    while last and parts[last - 1] in _BELOW_A_STEP:
        last -= 1
    if last and (match := _STEP.fullmatch(parts[last - 1])):
        return parts[: last - 1], int(match[1])
    return parts, None


def _is_within(folder: str, other: str) -> bool:
    """Whether `folder` is a part of the adapter in `other`; a step below it is not."""
    if folder == other or not folder.startswith(other):
        return False
    return not any(_STEP.fullmatch(part) for part in _parts(folder.removeprefix(other)))


def adapter_name(original: str) -> str:
    """An adapter name in the grammar, the same for the same `original`: lower case, other characters as `-`, the first folder as
    the namespace and the others joined, too long ones cut and told apart by a digest."""
    first, *others = _parts(original) or [UNNAMED]
    return "/".join(_slug(part) for part in ([first, "-".join(others)] if others else [first]))


def _slug(text: str) -> str:
    slug = _FOREIGN.sub("-", text.lower()).strip("-._")
    if slug and slug not in RESERVED_ADAPTER_NAMES and len(slug) <= MAX_SEGMENT_CHARS:
        return slug
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{slug[: MAX_SEGMENT_CHARS - 9].rstrip('-._') or UNNAMED}-{digest}"


def doubles(folders: Iterable[Folder]) -> Iterator[Folder]:
    """The folders whose name is somebody else's already: the one that spells it so keeps it, else the first in order."""
    owners: dict[str, str] = {}
    found = list(folders)
    for original in sorted(
        {folder.original for folder in found}, key=lambda original: (original != adapter_name(original), original)
    ):
        owners.setdefault(adapter_name(original), original)
    yield from (folder for folder in found if owners[adapter_name(folder.original)] != folder.original)
