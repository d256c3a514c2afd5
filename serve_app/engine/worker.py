"""What runs where the model lives: vLLM's worker, mended and with a door of its own (0.29)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from serve_app.engine import on_cpu
from serve_app.engine.layers import Modules, landed_modules, lora_modules
from serve_app.engine.staging import STAGED_AT_ONCE, AdapterFile, Door, StageRequest, Staging, lora_request, reserve

MOST_OF_FREE_MEMORY = 0.25  # of the host, for pinned buffers
SWITCH_INTERVAL_S = 0.0005  # a thread that reads ahead gives way to the engine's loop ten times sooner than by default


class WorkerExtension:
    """Mixed into the engine's worker, where the model lives."""

    def loramux_prepare(self, folder: str) -> str:
        """Mends what would answer wrongly or hold up running streams, before the first request, and opens the door for reading
        adapters ahead: a socket in `folder`, whose path is returned."""
        manager = self.model_runner.lora_manager._adapter_manager
        if self.device.type == "cpu":
            on_cpu.mend()
        _leave_the_head_alone(manager)
        _read_files_whole()
        _reset_at_once(manager)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        reserve(_room_bytes(manager))
        self._loramux_staging = Staging(self.model_runner.lora_manager)
        path = Path(folder) / f"worker-{self.rank}-{os.getpid()}"
        self._loramux_door = Door(path, self._loramux_staging.stage, self._loramux_use_device)
        return str(path)

    def loramux_staged(self) -> list[int]:
        """The ids of adapters that were read ahead and neither added nor forgotten."""
        return self._loramux_staging.ids()

    def _loramux_use_device(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.set_device(self.device)

    def loramux_add(self, name: str, int_id: int, path: str) -> list[str]:
        """Adds an adapter as vLLM does; the modules, by the engine's own names, that it fills here."""
        self.add_lora(lora_request(StageRequest(name, int_id, path)))
        return self.loramux_landed(int_id)

    def loramux_lora_modules(self) -> Modules:
        """The modules that take LoRA; of this worker's layers, where a pipeline spreads them."""
        return lora_modules(self.model_runner.lora_manager._adapter_manager, self.model_config.hf_config)

    def loramux_places(self) -> list[int | None]:
        """The ids that sit in the engine's own places, None where one is free."""
        return list(self.model_runner.lora_manager._adapter_manager.lora_index_to_id)

    def loramux_landed(self, int_id: int) -> list[str]:
        """The modules, by the engine's own names, that a loaded adapter fills here."""
        return landed_modules(self.model_runner.lora_manager._adapter_manager, int_id)


def _room_bytes(manager: Any) -> int:
    """Bytes of as many of the largest adapters as the engine keeps, and as may be read ahead; at most a share of what is free."""
    layers = [(factor[0], getattr(layer, "tp_size", 1)) for layer in manager.modules.values() for factor in _stacked(layer)]
    largest = sum(factor.numel() * factor.element_size() * shares for factor, shares in layers)
    return min(largest * (manager.capacity + STAGED_AT_ONCE), int(psutil.virtual_memory().available * MOST_OF_FREE_MEMORY))


def _stacked(layer: Any) -> list[Any]:
    """A layer's factors of all places: [place, 1, rank, in] and [place, 1, out, rank]."""
    return [*getattr(layer, "lora_a_stacked", ()), *getattr(layer, "lora_b_stacked", ())]


def _reset_at_once(manager: Any) -> None:
    """vLLM clears a place layer by layer, factor by factor, before it fills it: half of the time that streams wait for a load.
    All of it in one call is as good."""
    import torch
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.model_manager import LoRAModelManager

    plain = [layer for layer in manager.modules.values() if type(layer).reset_lora is BaseLinearLayerWithLoRA.reset_lora]
    for layer in plain:
        layer.reset_lora = _nothing
    places = range(manager.lora_slots)
    factors = [[factor[place] for layer in plain for factor in _stacked(layer)] for place in places]
    activate = LoRAModelManager.activate_adapter

    def activate_adapter(self: Any, lora_id: int) -> bool:
        if self is manager and lora_id not in self._active_adapters and None in self.lora_index_to_id:
            with torch.inference_mode():
                torch._foreach_zero_(factors[self.lora_index_to_id.index(None)])
        return activate(self, lora_id)

    LoRAModelManager.activate_adapter = activate_adapter


def _nothing(index: int) -> None: ...


def _read_files_whole() -> None:
    """vLLM's reader opens adapters with `safe_open` and pins each tensor by itself, at the price of a system call each."""
    from vllm.lora import lora_model

    lora_model.safetensors = SimpleNamespace(safe_open=AdapterFile)


def _leave_the_head_alone(manager: Any) -> None:
    """Adapters on the head are refused, so it has nothing to add. Its kernels count on one row for each request, but the log
    probabilities of a prompt have one for each token: the CPU's fail there and take the engine with them."""
    for wrapper in manager.punica_wrapper_mapping.values():
        wrapper.add_lora_logits = lambda logits, *args, **kwargs: logits
