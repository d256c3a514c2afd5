"""The adapter as PEFT's two files, complete or absent."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"


def write_adapter(folder: Path, adapted: PeftModel, weights: Mapping[str, Tensor], base_name: str) -> None:
    """`weights` are whole, by the names of `adapted`'s parameters. Raises OSError; nothing is left under the name then."""
    tensors = get_peft_model_state_dict(adapted, state_dict=dict(weights), save_embedding_layers=False)
    tensors = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}

    def fill(partial: Path) -> None:
        save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        (partial / CONFIG_FILE).write_text(json.dumps(_config(adapted, base_name), indent=2, sort_keys=True) + "\n")

    _whole_folder(folder, fill)


def _config(adapted: PeftModel, base_name: str) -> dict[str, Any]:
    """PEFT's own, with the modules by the last part of their names whatever chose them, and no path of this machine."""
    config = adapted.peft_config["default"].to_dict()
    modules = {name.rsplit(".", 1)[-1] for name, module in adapted.named_modules() if isinstance(module, LoraLayer)}
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    return {**values, "base_model_name_or_path": base_name, "target_modules": sorted(modules), "inference_mode": True}


def _whole_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        fill(partial)
        for file in partial.iterdir():
            sync(file)
        sync(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
