"""What lies in an adapter's folder: which files count, which are ignored, and which show that this is something else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from adapters.contract.refusals import refusal, shown
from adapters.contract.safetensors_file import Tensor, read_header
from adapters.contract.strict_json import parse_object
from adapters.errors import AdapterRefused, InvalidRequest
from adapters.types import CONFIG_FILE, WEIGHTS_FILE

INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
MAX_CONFIG_BYTES = 2**20
MAX_INDEX_BYTES = 16 * 2**20

_SHARD = re.compile(r"adapter_model-(\d{5})-of-(\d{5})\.safetensors")
_FULL_MODEL = re.compile(r"(model(-\d+-of-\d+)?\.safetensors|pytorch_model.*\.bin)")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_FOREIGN_FILES = {
    "adapters.safetensors": ("mlx-lm", "train with PEFT, or fuse the adapter and serve it as a base"),
    "pytorch_lora_weights.safetensors": ("diffusers", "an adapter of an image model can't be served by a language model"),
}
_KOHYA_KEY = re.compile(r"lora_(unet|te\d?)_|\.lora_(down|up)\.")


@dataclass(frozen=True, slots=True)
class FolderContents:
    """The two files of an adapter as they lie there. `shards` is 0 for a single weights file; sizes are in bytes."""

    config: bytes
    tensors: dict[str, Tensor]
    shards: int
    size_bytes: int
    names: frozenset[str]
    warnings: tuple[str, ...]


def read_folder(folder: Path, *, max_bytes: int) -> FolderContents:
    """Reads the configuration and the headers of the weights in `folder`; no tensor values.

    Raises InvalidRequest if there is no such folder, else the refusal that names what lies there instead.
    """
    if not folder.is_dir():
        raise InvalidRequest("the source is not a folder", param="source")
    names = frozenset(entry.name for entry in folder.iterdir() if entry.is_file())
    files = [folder / name for name in _weight_files(folder, names)]
    size = sum(file.stat().st_size for file in files)
    if size > max_bytes:
        raise refusal("too_large", f"the weights have {size} bytes; at most {max_bytes} are taken", limit=max_bytes, value=size)
    for file in files:
        _refuse_pointer(file)
    config = _read_config(folder, names)
    tensors = _merged([read_header(file) for file in files])
    shards = len(files) if files[0].name != WEIGHTS_FILE else 0
    if shards and INDEX_FILE in names:
        _check_index(folder, tensors)
    return FolderContents(config, tensors, shards, size + len(config), names, _folder_warnings(folder, names))


def _weight_files(folder: Path, names: frozenset[str]) -> list[str]:
    """The names of the weights, in order. Raises the refusal that fits best if there are none or too many."""
    shards = sorted(name for name in names if _SHARD.fullmatch(name))
    if "vit.safetensors" in names:
        raise refusal("extra_weights", "a fully trained vision tower lies beside the adapter", value="vit.safetensors")
    if WEIGHTS_FILE in names and shards:
        raise refusal(
            "ambiguous_folder",
            "the folder holds a single weights file and shards",
            limit=1,
            value=1 + len(shards),
            hint="remove the one that is not the adapter",
        )
    if WEIGHTS_FILE in names:
        return [WEIGHTS_FILE]
    if shards:
        return _complete(shards)
    raise _without_weights(folder, names)


def _complete(shards: list[str]) -> list[str]:
    total = int(_SHARD.fullmatch(shards[0])[2])  # type: ignore[index]
    wanted = [f"adapter_model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, min(total, 10_000) + 1)]
    missing = [name for name in wanted if name not in shards]
    if missing or len(shards) != total:
        raise refusal(
            "incomplete_shards",
            f"{len(shards)} of {total} shards are there",
            limit=total,
            value=missing[:5] or len(shards),
        )
    return wanted


def _without_weights(folder: Path, names: frozenset[str]) -> AdapterRefused:
    """The refusal that says what lies there instead of weights."""
    for name, (tool, hint) in _FOREIGN_FILES.items():
        if name in names:
            return refusal("foreign_format", f"this is an adapter in the format of {tool}", limit="PEFT", value=tool, hint=hint)
    for name in sorted(names):
        if name.endswith(".safetensors") and any(_KOHYA_KEY.search(key) for key in read_header(folder / name)):
            hint = "convert it to PEFT's format first"
            return refusal("foreign_format", "this is an adapter in the format of kohya", limit="PEFT", value="kohya", hint=hint)
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        text = f"`{shown(pickles[0])}` is a pickle; only safetensors are taken"
        return refusal("pickle_refused", text, limit=WEIGHTS_FILE, value=shown(pickles[0]))
    inside = _adapters_inside(folder)
    if inside:
        commands = ", ".join(f"`loramux publish .../{name}`" for name in inside)
        text = f"{len(inside)} adapters lie in subfolders, none here"
        return refusal("ambiguous_folder", text, limit=1, value=inside, hint=f"name one: {commands}")
    if INDEX_FILE in names:
        return refusal("incomplete_shards", "an index of shards is there, the shards are not", value=0)
    return refusal("no_tensors", f"`{WEIGHTS_FILE}` is missing", limit=WEIGHTS_FILE, value=0)


def _adapters_inside(folder: Path) -> list[str]:
    entries = (entry.name for entry in folder.iterdir() if entry.is_dir())
    return sorted(name for name in entries if any((folder / name / file).is_file() for file in (CONFIG_FILE, WEIGHTS_FILE)))[:20]


def _refuse_pointer(file: Path) -> None:
    with file.open("rb") as opened:
        if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
            size = file.stat().st_size
            text = f"`{file.name}` is a git-lfs pointer of {size} bytes, not the file itself"
            raise refusal("not_downloaded", text, value=file.name)


def _read_config(folder: Path, names: frozenset[str]) -> bytes:
    if CONFIG_FILE not in names:
        hint = "save with the adapter's own `save_pretrained`"
        raise refusal("config_invalid", f"`{CONFIG_FILE}` is missing", limit=CONFIG_FILE, hint=hint)
    file = folder / CONFIG_FILE
    _refuse_pointer(file)
    size = file.stat().st_size
    if size > MAX_CONFIG_BYTES:
        raise refusal("config_invalid", f"`{CONFIG_FILE}` has {size} bytes", limit=MAX_CONFIG_BYTES, value=size)
    return file.read_bytes()


def _merged(files: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    merged: dict[str, Tensor] = {}
    for tensors in files:
        twice = sorted(merged.keys() & tensors.keys())
        if twice:
            raise refusal("adapter_corrupt", f"`{shown(twice[0])}` lies in two shards", limit=1, value=twice[0])
        merged.update(tensors)
    return merged


def _check_index(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Index and files must agree; file names in the index are compared, never opened."""
    if (folder / INDEX_FILE).stat().st_size > MAX_INDEX_BYTES:
        raise refusal("adapter_corrupt", "the index of the shards is too large", limit=MAX_INDEX_BYTES)
    index = parse_object((folder / INDEX_FILE).read_bytes(), what="the index of the shards", code="adapter_corrupt")
    named = index.get("weight_map")
    if not isinstance(named, dict):
        raise refusal("adapter_corrupt", "the index of the shards has no `weight_map`")
    found = {name: tensor.file.name for name, tensor in tensors.items()}
    odd = sorted(name for name in named.keys() | found.keys() if named.get(name) != found.get(name))
    if odd:
        code = "incomplete_shards" if odd[0] not in found else "adapter_corrupt"
        raise refusal(code, f"index and shards disagree on {len(odd)} tensors, `{shown(odd[0])}` first", limit=0, value=len(odd))


def _folder_warnings(folder: Path, names: frozenset[str]) -> tuple[str, ...]:
    warnings = []
    if any(_FULL_MODEL.fullmatch(name) for name in names):
        warnings.append("the folder also holds a full model, which is ignored")
    if any(name.endswith(_PICKLES) and name.startswith("adapter_model") for name in names):
        warnings.append("the folder also holds the weights as a pickle, which is ignored")
    inside = _adapters_inside(folder)
    if inside:
        warnings.append(f"further adapters in subfolders are ignored: {', '.join(shown(name, 40) for name in inside[:5])}")
    return tuple(warnings)
