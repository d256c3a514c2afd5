"""The contract of a base that is not served yet, from its config.json and the headers of its weights: no GPU, no weights read.

vLLM's own model is made without weights (on torch's meta device) and asked what it takes, by the code that a live replica
uses. The headers then confirm that the weights have the shapes which the config promises.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from adapters.contract.safetensors_file import Tensor, read_header
from adapters.errors import AdapterRefused, InvalidRequest, ModelNotFound, VersionConflict
from adapters.registry import Registry
from adapters.settings import read_config
from adapters.types import BaseContract, ModuleShape

logger = logging.getLogger(__name__)

DEFAULT_MAX_RANK = 64
INDEX_FILE = "model.safetensors.index.json"

# The engine arguments that decide which modules take LoRA. The rest (devices, memory, kernels) may not even be valid here.
DECISIVE = frozenset(
    {
        "convert",
        "enable_mixed_moe_lora_format",
        "enable_moe_shared_loras",
        "enable_tower_connector_lora",
        "hf_config_path",
        "hf_overrides",
        "hf_token",
        "language_model_only",
        "limit_mm_per_prompt",
        "lora_target_modules",
        "max_lora_rank",
        "model_impl",
        "revision",
        "runner",
        "trust_remote_code",
    }
)
# Stored as they are computed with; packed and integer forms of quantised weights have other shapes.
PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})


@dataclass(frozen=True, slots=True)
class Described:
    """A contract, and what could not be confirmed."""

    contract: BaseContract
    warnings: tuple[str, ...] = ()


def describe(source: str, base: str, engine: Mapping[str, Any] | None = None) -> Described:
    """What a replica that serves `source` with these engine arguments would write into the registry.

    `source` is a folder, or a Hugging Face id: then only its config is fetched. Takes seconds and this process' copy of vLLM,
    so call it once a process. Raises InvalidRequest for a folder that holds no base, an architecture or rank that the engine
    doesn't take, and weights that contradict the config.
    """
    check_folder(source)
    options = {key: value for key, value in (engine or {}).items() if key in DECISIVE}
    options.setdefault("max_lora_rank", DEFAULT_MAX_RANK)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from serve_app.engine import layers

    config = _engine_config(source, options)
    model = _without_weights(config)
    modules = layers.modules_of_model(model, config)
    contract = layers.describe_base(base, config.model_config, options["max_lora_rank"], modules)
    if not Path(source).is_dir():
        return Described(contract, ("the weights' headers were not looked at: the source is no folder",))
    return Described(contract, check_headers(stored_tensors(Path(source)), contract, layers.Names(model, None).after))


def engine_arguments(
    base: str, config: Path | None = None, *, max_rank: int | None = None, vision: bool | None = None
) -> dict[str, Any]:
    """The engine arguments of a base in the settings file, if it is listed there, with what the caller says over them.

    Raises InvalidRequest if it is listed to be served without adapters.
    """
    listed = read_config(config).get("bases") or []
    found = next((item for item in listed if isinstance(item, dict) and item.get("id") == base), None)
    engine = dict(found.get("engine") or {}) if found else {}
    if found and not engine.get("enable_lora"):
        raise InvalidRequest(
            f"the settings serve `{base}` without adapters", hint="`enable_lora: true` among its engine arguments changes that"
        )
    said = {"max_lora_rank": max_rank, "enable_tower_connector_lora": vision}
    return engine | {key: value for key, value in said.items() if value is not None}


async def publish(registry: Registry, contract: BaseContract, *, replace: bool = False) -> bool:
    """Writes the contract into the registry; says whether it was not there yet.

    Raises VersionConflict if the registry describes this base otherwise, unless it is to be replaced: a replica that serves
    the base writes its own.
    """
    try:
        known = await registry.base(contract.base)
    except ModelNotFound:
        known = None
    found = differences(known, contract) if known else ()
    if found and not replace:
        raise VersionConflict(
            f"the registry describes `{contract.base}` otherwise: {'; '.join(found)}",
            reason="base_described_otherwise",
            hint="if this source is what will be served, repeat with --replace",
        )
    await registry.put_base(contract)
    return known is None or bool(found)


async def report(registry: Registry, contract: BaseContract) -> None:
    """A live replica's word on its base: it stands, and what it changes is said in the log."""
    try:
        found = differences(await registry.base(contract.base), contract)
    except ModelNotFound:
        found = ()
    if found:
        logger.warning(
            "the registry described the base %s otherwise: %s; versions that were checked against that are served as they are",
            contract.base,
            "; ".join(found),
        )
    await registry.put_base(contract)


def differences(known: BaseContract, new: BaseContract) -> tuple[str, ...]:
    """What two contracts of a base disagree on, for people."""
    said = [
        f"{name} {getattr(known, name)}, now {getattr(new, name)}"
        for name in ("architecture", "max_rank", "tower", "serves_vision")
        if getattr(known, name) != getattr(new, name)
    ]
    other = [path for path in sorted({*known.modules, *new.modules}) if known.modules.get(path) != new.modules.get(path)]
    if other:
        said.append(f"{len(other)} modules differ, `{other[0]}` first")
    if known.fingerprint != new.fingerprint:
        said.append("its weights or its config changed")
    return tuple(said)


def check_folder(source: str) -> None:
    """Raises InvalidRequest if `source` looks like a folder and holds no base."""
    folder = Path(source)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InvalidRequest("the folder holds no config.json, so it is no base", hint="name the folder that the engine serves")
    if not folder.is_dir() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise InvalidRequest("there is no such folder", value=folder.name)


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the base by name, from the headers of its safetensors files; empty if it has none.

    Raises InvalidRequest for a shard that its index names and the folder lacks, and for a broken header.
    """
    files = sorted(folder.glob("*.safetensors"))
    named = _indexed(folder / INDEX_FILE)
    missing = sorted(named - {file.name for file in files})
    if missing:
        raise InvalidRequest(
            f"{len(missing)} of the {len(named)} files that the base's index names are missing, `{missing[0]}` first",
            limit=len(named),
            value=len(named) - len(missing),
            hint="finish the download",
        )
    chosen = [file for file in files if not named or file.name in named]
    try:
        return {name: tensor for file in chosen for name, tensor in read_header(file).items()}
    except AdapterRefused as error:
        raise InvalidRequest(
            f"the base's weights can't be read: {error.message}", limit=error.limit, value=error.value, hint="finish the download"
        ) from error


def _indexed(index: Path) -> set[str]:
    if not index.is_file():
        return set()
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{INDEX_FILE} of the base can't be read") from error


def check_headers(stored: Mapping[str, Tensor], contract: BaseContract, engine_name: Callable[[str], str]) -> tuple[str, ...]:
    """Compares stored shapes with the contract's; gives warnings for what it couldn't compare.

    Names are compared as the engine renames both, so that checkpoints of older transformers match. Raises InvalidRequest if
    a stored weight has another shape than the config promises.
    """
    if not stored:
        return ("the folder holds no safetensors: the contract rests on the config alone",)
    found = {engine_name(name.rpartition(".")[0]): tensor for name, tensor in stored.items() if name.endswith(".weight")}
    owners = {engine_name(name.rpartition(".")[0]) for name in stored}  # quantised modules own no `weight`
    unseen = []
    for module, shape in contract.modules.items():
        name = engine_name(module)
        tensor = found.get(name)
        if tensor is None:
            if name not in owners and not _is_of_experts(name, owners):
                unseen.append(module)
        elif tensor.dtype in PLAIN_DTYPES:
            _check_shape(module, shape, tensor)
    if not unseen:
        return ()
    return (f"{len(unseen)} modules of the config have no weight of their name in the folder, `{unseen[0]}` first",)


def _is_of_experts(name: str, owners: set[str]) -> bool:
    """Experts are stored one by one or as two 3-D weights of their layer, whichever the engine wants."""
    layer, found, _ = name.partition(".experts.")
    return bool(found) and any(owner.startswith(f"{layer}.experts") for owner in owners)


def _check_shape(module: str, shape: ModuleShape, tensor: Tensor) -> None:
    promised = (shape.out_features, shape.in_features)
    if shape.experts is None and tensor.shape != promised:
        raise InvalidRequest(
            f"`{module}` is stored as {list(tensor.shape)}; the config says {list(promised)}",
            limit=list(promised),
            value=list(tensor.shape),
            hint="config.json and the weights belong to different models",
        )


def _engine_config(source: str, options: dict[str, Any]) -> Any:
    """vLLM's configuration, always for CPUs: what takes LoRA does not depend on the device."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    from vllm.engine.arg_utils import EngineArgs

    arguments = options | {"hf_overrides": _not_quantised(options.get("hf_overrides"))}
    try:
        return EngineArgs(
            model=source,
            enable_lora=True,
            max_loras=1,
            max_cpu_loras=1,
            enforce_eager=True,
            skip_tokenizer_init=True,
            **arguments,
        ).create_engine_config()
    except Exception as error:
        raise InvalidRequest(
            f"the engine does not take this base: {_first_line(error)}", hint="the engine's own message; see its settings"
        ) from error


def _not_quantised(overrides: Any) -> Callable[[Any], Any]:
    """Quantised layers have the shapes of plain ones, but their code may need a GPU."""

    def apply(config: Any) -> Any:
        if callable(overrides):
            config = overrides(config)
        elif overrides:
            _update(config, overrides)
        for part in (config, getattr(config, "text_config", None)):
            if getattr(part, "quantization_config", None) is not None:
                del part.quantization_config
        return config

    return apply


def _update(config: Any, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping) and hasattr(getattr(config, key, None), "to_dict"):
            _update(getattr(config, key), value)
        else:
            setattr(config, key, value)


def _without_weights(config: Any) -> Any:
    """vLLM's model on the meta device: all its layers, no memory."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with tempfile.TemporaryDirectory(prefix="loramux-contract-") as folder, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        try:
            with torch.device("meta"), set_default_torch_dtype(config.model_config.dtype):
                return initialize_model(config)
        except Exception as error:
            raise InvalidRequest(f"the engine can't lay this base out: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """What an engine's error says, without paths of a trace: its first line, or the first fault of a settings object."""
    if isinstance(error, ValidationError):
        fault = error.errors()[0]
        return f"`{'.'.join(map(str, fault['loc']))}`: {fault['msg']}"[:200]
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]
