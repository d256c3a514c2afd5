"""What lies in an adapter's folder: which files count, which are ignored, and which show that this is something else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.contract.refusals import many, refusal, shown
from adapters.contract.safetensors_file import Tensor, read_header
from adapters.contract.strict_json import parse_object
from adapters.contract.tensor_keys import foreign_tool
from adapters.errors import AdapterRefused, InvalidRequest
from adapters.types import CONFIG_FILE, WEIGHTS_FILE

INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
MAX_CONFIG_BYTES = 2**20
MAX_INDEX_BYTES = 16 * 2**20

VISION_WEIGHTS = "vit.safetensors"
# What is trained in full beside the factors: added tokens, projectors, norms. Of the pickles some trainers write one even if
# there is nothing to put into it.
_TRAINED_BESIDE = frozenset(
    {"new_embeddings.safetensors", "non_lora_trainables.bin", "non_lora_state_dict.bin", "trainable_params.bin"}
)
_EMPTY_PICKLE_BYTES = 4096
# Folders deeper than this, or more of them, are not looked for adapters.
MAX_DEPTH = 4
MAX_FOLDERS = 2000

# A trainer that merges FSDP's shards may leave the model's name on the files, on the index, or on both.
_SHARD = re.compile(r"(adapter_)?model-(\d+)-of-(\d+)\.safetensors")
_FULL_MODEL = re.compile(
    r"((ft-|hf_)?model([-_]\d+(-of-|_)\d+)?\.safetensors|pytorch_model.*\.bin|consolidated.*\.(safetensors|pth))"
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".distcp", ".nemo")
# What trainers keep to go on with; none of it is an adapter.
_TRAINER_STATE = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state|random_states|sampler|dl_state_dict)[\w-]*\.\w+"
)
_POINTERS = (b"version https://git-lfs.github.com/spec/", b"# xet version ")
_FOREIGN_FILES = {
    "adapters.safetensors": ("mlx-lm", "train with PEFT, or fuse the adapter and serve it as a base"),
    "adapters.npz": ("mlx-lm", "train with PEFT, or fuse the adapter and serve it as a base"),
    "lit_model.pth.lora": ("LitGPT", "train with PEFT, or merge with `litgpt merge_lora` and serve the result as a base"),
    "pytorch_lora_weights.safetensors": ("diffusers", "an adapter of an image model can't be served by a language model"),
}
_FOREIGN_KEY = re.compile(r"lora_(unet|te\d?)_|\.lora_(down|up)\.|\.lora_[ab](\.weight)?$|\.linear_(in|out)\.")
# What lies beside an adapter whose init took something out of the base: only the converted one can be used.
_UNCONVERTED = {
    "pissa_init": "pissa_converted",
    "pissa_backup": "pissa_converted",
    "converted/default": "converted/default",
}


@dataclass(frozen=True, slots=True)
class FolderContents:
    """The two files of an adapter as they lie there. `shards` is 0 for a single weights file; sizes are in bytes.

    `unconverted` names the subfolder with the usable adapter if this one needs a base that its init changed; `tokens` is one
    more than the largest id in the tokenizer files; `trained_tower` says that a vision tower lies there too, `trained_beside`
    has the name and size in bytes of other files with weights that are no factors.
    """

    config: bytes
    tensors: dict[str, Tensor]
    shards: int
    size_bytes: int
    names: frozenset[str]
    warnings: tuple[str, ...]
    unconverted: str | None = None
    tokens: int | None = None
    trained_tower: bool = False
    trained_beside: tuple[tuple[str, int], ...] = ()


def read_folder(folder: Path, *, max_bytes: int) -> FolderContents:
    """Reads the configuration and the headers of the weights in `folder`; no tensor values.

    Raises InvalidRequest if there is no such folder, else the refusal that names what lies there instead.
    """
    if not folder.is_dir():
        raise InvalidRequest("the source is not a folder", param="source")
    entries = sorted(folder.iterdir())
    names = frozenset(entry.name for entry in entries if entry.is_file())
    _refuse_broken_links(entries)
    files = [folder / name for name in _weight_files(folder, names)]
    size = sum(file.stat().st_size for file in files)
    if size > max_bytes:
        raise refusal("too_large", f"the weights have {size} bytes; at most {max_bytes} are taken", limit=max_bytes, value=size)
    for file in files:
        _refuse_pointer(file)
    if not size:
        hint = "copy it again; if a trainer saved it so, save after gathering (ZeRO-3 or FSDP)"
        raise refusal("no_tensors", "the weights file is empty", limit=1, value=0, hint=hint)
    tensors = _merged([read_header(file) for file in files])
    if CONFIG_FILE not in names:
        _refuse_foreign_keys(tensors)
    config = _read_config(folder, names)
    shards = len(files) if files[0].name != WEIGHTS_FILE else 0
    if shards and INDEX_FILE in names:
        _check_index(folder, tensors)
    return FolderContents(
        config,
        tensors,
        shards,
        size + len(config),
        names,
        _folder_warnings(folder, names, files),
        unconverted=_unconverted(folder),
        tokens=_tokens(folder, names),
        trained_tower=VISION_WEIGHTS in names,
        trained_beside=tuple(_trained_beside(folder, names)),
    )


def _weight_files(folder: Path, names: frozenset[str]) -> list[str]:
    """The names of the weights, in order. Raises the refusal that fits best if there are none or too many."""
    shards = sorted(name for name in names if _SHARD.fullmatch(name) and name.startswith("adapter_"))
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
    if not shards and INDEX_FILE in names:
        shards = sorted(name for name in names if _SHARD.fullmatch(name))
    if shards:
        return _complete(shards)
    raise _without_weights(folder, names)


def _complete(shards: list[str]) -> list[str]:
    """All shards in the order of their numbers."""
    matches = sorted((int(match[2]), int(match[3]), name) for name in shards if (match := _SHARD.fullmatch(name)))
    total = matches[0][1]
    numbers = {number for number, of, _ in matches if of == total}
    if len(numbers) != len(shards):
        text = "the folder holds shards of more than one set"
        hint = "remove those that are not the adapter's"
        raise refusal("ambiguous_folder", text, limit=1, value=shown(shards[-1]), hint=hint)
    missing = [number for number in range(1, min(total, 10_000) + 1) if number not in numbers]
    if missing or len(shards) != total:
        _, of, name = matches[0]
        first = name.replace(name[name.index("model-") + 6 : name.index("-of-")], "{}", 1)
        digits = name.index("-of-") - name.index("model-") - 6
        value = [first.format(f"{number:0{digits}d}") for number in missing[:5]]
        raise refusal("incomplete_shards", f"{len(shards)} of {total} shards are there", limit=of, value=value or len(shards))
    return [name for _, _, name in matches]


def _without_weights(folder: Path, names: frozenset[str]) -> AdapterRefused:
    """The refusal that says what lies there instead of weights."""
    for name, (tool, hint) in _FOREIGN_FILES.items():
        if name in names:
            return refusal("foreign_format", f"this is an adapter in the format of {tool}", limit="PEFT", value=tool, hint=hint)
    for name in sorted(names):
        if name.endswith(".safetensors") and name != VISION_WEIGHTS and not _FULL_MODEL.fullmatch(name):
            _refuse_foreign_keys(_keys_if_readable(folder / name))
    unfinished = [*folder.glob("*.incomplete"), *folder.glob(".cache/huggingface/download/*.incomplete")]
    if unfinished and CONFIG_FILE in names:
        text = f"`{WEIGHTS_FILE}` is missing; a download was broken off"
        hint = "download the repository again, with its weights"
        return refusal("not_downloaded", text, limit="the file itself", value=WEIGHTS_FILE, hint=hint)
    pickles = sorted(name for name in names if name.endswith(_PICKLES) and not _TRAINER_STATE.fullmatch(name))
    if pickles:
        text = f"`{shown(pickles[0])}` is a pickle; only safetensors are taken"
        return refusal("pickle_refused", text, limit=WEIGHTS_FILE, value=shown(pickles[0]))
    inside = _adapters_inside(folder)
    if inside:
        commands = ", ".join(f"`loramux publish .../{name}`" for name in inside)
        text = f"{len(inside)} adapter{'s lie' if len(inside) > 1 else ' lies'} in subfolders, none here"
        return refusal("ambiguous_folder", text, limit=1, value=inside, hint=f"name one: {commands}")
    if INDEX_FILE in names:
        return refusal("incomplete_shards", "an index of shards is there, the shards are not", limit=INDEX_FILE, value=0)
    return refusal("no_tensors", f"`{WEIGHTS_FILE}` is missing", limit=WEIGHTS_FILE, value=0, hint=_hint_without(folder, names))


def _hint_without(folder: Path, names: frozenset[str]) -> str:
    """What to do where nothing looks like an adapter's weights."""
    if CONFIG_FILE in names and "model.safetensors" in names and _holds_factors(folder / "model.safetensors"):
        return f"`model.safetensors` holds the factors: rename it to `{WEIGHTS_FILE}`"
    if any(_FULL_MODEL.fullmatch(name) for name in names):
        return "a full model lies there: serve it as a base, or publish the adapter that it was merged from"
    return "publish the folder that holds the adapter's two files"


def _holds_factors(file: Path) -> bool:
    return any(".lora_A." in key for key in _keys_if_readable(file))


def _keys_if_readable(file: Path) -> Iterable[str]:
    """The names in a file that need not be an adapter's at all."""
    try:
        return read_header(file)
    except AdapterRefused:
        return ()


def _refuse_foreign_keys(tensors: Iterable[str]) -> None:
    """Names by which another tool can be told, although nothing else says what the file is."""
    for key in tensors:
        if _FOREIGN_KEY.search(key):
            tool = foreign_tool(key)
            text = f"this is an adapter in the format of {tool}"
            raise refusal(
                "foreign_format", text, limit="PEFT", value=tool, hint=f"convert it to PEFT's format: see {tool}'s exporter"
            )


def _adapters_inside(folder: Path) -> list[str]:
    """Subfolders that look like adapters, as paths below `folder`; links are not followed."""
    found, waiting, seen = [], [(folder, 0)], 0
    while waiting and seen < MAX_FOLDERS:
        here, depth = waiting.pop(0)
        for entry in sorted(here.iterdir()):
            if not entry.is_dir() or entry.is_symlink() or depth >= MAX_DEPTH:
                continue
            seen += 1
            if any((entry / file).is_file() for file in (CONFIG_FILE, WEIGHTS_FILE)):
                found.append(entry.relative_to(folder).as_posix())
            waiting.append((entry, depth + 1))
    return [shown(name) for name in sorted(found)[:20]]


def _unconverted(folder: Path) -> str | None:
    return next((usable for name, usable in _UNCONVERTED.items() if (folder / name).is_dir()), None)


def _trained_beside(folder: Path, names: frozenset[str]) -> Iterable[tuple[str, int]]:
    for name in sorted(names & _TRAINED_BESIDE):
        size = (folder / name).stat().st_size
        if size > _EMPTY_PICKLE_BYTES or not name.endswith(_PICKLES):
            yield name, size


def _refuse_broken_links(entries: Iterable[Path]) -> None:
    """A snapshot's files are links into a cache; a file that was not fetched is a link to nothing."""
    for entry in entries:
        wanted = entry.name in (CONFIG_FILE, WEIGHTS_FILE) or _SHARD.fullmatch(entry.name)
        if wanted and entry.is_symlink() and not entry.exists():
            text = f"`{shown(entry.name)}` is a link to a file that is not there"
            hint = "download the repository again, with its weights"
            raise refusal("not_downloaded", text, limit="the file itself", value=shown(entry.name), hint=hint)


def _refuse_pointer(file: Path) -> None:
    with file.open("rb") as opened:
        first = opened.read(64)
    if first.startswith(_POINTERS):
        size = file.stat().st_size
        text = f"`{file.name}` is a git-lfs pointer of {size} bytes, not the file itself"
        raise refusal("not_downloaded", text, limit="the file itself", value=file.name)


def _read_config(folder: Path, names: frozenset[str]) -> bytes:
    if CONFIG_FILE not in names:
        hint = "save with the adapter's own `save_pretrained`"
        raise refusal("config_invalid", f"`{CONFIG_FILE}` is missing", limit=CONFIG_FILE, value=0, hint=hint)
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
        size = (folder / INDEX_FILE).stat().st_size
        text = f"the index of the shards has {size} bytes"
        raise refusal("adapter_corrupt", text, limit=MAX_INDEX_BYTES, value=size)
    index = parse_object((folder / INDEX_FILE).read_bytes(), what="the index of the shards", code="adapter_corrupt")
    named = index.get("weight_map")
    if not isinstance(named, dict):
        raise refusal("adapter_corrupt", "the index of the shards has no `weight_map`", limit="weight_map", value=0)
    found = {name: _shard_number(tensor.file.name) for name, tensor in tensors.items()}
    named = {name: _shard_number(file) for name, file in named.items()}
    odd = sorted(name for name in named.keys() | found.keys() if named.get(name) != found.get(name))
    if odd:
        code = "incomplete_shards" if any(name not in found for name in odd) else "adapter_corrupt"
        raise refusal(
            code, f"index and shards disagree on {many(len(odd), 'tensor')}, `{shown(odd[0])}` first", limit=0, value=len(odd)
        )


def _shard_number(name: Any) -> str:
    """The name of a shard without the model's part, which is not always renamed in the index."""
    return str(name).removeprefix("adapter_")


def _tokens(folder: Path, names: frozenset[str]) -> int | None:
    """One more than the largest token id that the small tokenizer files name; they only warn, so odd ones are passed over."""
    ids: list[int] = []
    if "added_tokens.json" in names:
        ids += [value for value in _lenient(folder / "added_tokens.json").values() if type(value) is int]
    if "tokenizer_config.json" in names:
        added = _lenient(folder / "tokenizer_config.json").get("added_tokens_decoder")
        ids += [int(key) for key in added if key.isdecimal() and len(key) < 10] if isinstance(added, dict) else []
    return max(ids) + 1 if ids else None


def _lenient(file: Path) -> dict[str, Any]:
    if file.stat().st_size > MAX_CONFIG_BYTES:
        return {}
    try:
        return parse_object(file.read_bytes(), what=file.name, code="config_invalid")
    except AdapterRefused:
        return {}


def _folder_warnings(folder: Path, names: frozenset[str], weights: Sequence[Path]) -> tuple[str, ...]:
    warnings = []
    used = {file.name for file in weights}
    if any(_FULL_MODEL.fullmatch(name) for name in names - used):
        warnings.append("the folder also holds a full model, which is ignored")
    if any(name.endswith(_PICKLES) and name.startswith("adapter_model") for name in names):
        warnings.append("the folder also holds the weights as a pickle, which is ignored")
    inside = _adapters_inside(folder)
    if inside:
        warnings.append(f"further adapters in subfolders are ignored: {', '.join(shown(name, 40) for name in inside[:5])}")
    if _brings_template(folder, names):
        warnings.append("a chat template lies in the folder; the base's own is used, which may differ")
    return tuple(warnings)


def _brings_template(folder: Path, names: frozenset[str]) -> bool:
    if {"chat_template.jinja", "chat_template.json"} & names:
        return True
    return "tokenizer_config.json" in names and bool(_lenient(folder / "tokenizer_config.json").get("chat_template"))
