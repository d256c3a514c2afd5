"""Writes an adapter with expert parameters by the PEFT that is installed, and what it changes, expert by expert.

`tests/fixtures/peft-0.18-experts` was made by release 0.18.1: `python -m tests.peft_experts FOLDER`, with that one on the path.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from adapters.types import BaseContract, ModuleShape
from tests.adapter_folders import safetensors_bytes

HIDDEN, INNER, EXPERTS, LAYERS = 8, 12, 3, 2
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
DELTAS = "deltas.safetensors"


def contract(*, stacked: bool) -> BaseContract:
    """The contract of the model that the adapter is for, by the form in which its engine takes experts."""
    modules = {}
    for layer in range(LAYERS):
        root = f"model.layers.{layer}"
        modules[f"{root}.self_attn.q_proj"] = ModuleShape(HIDDEN, HIDDEN)
        if stacked:
            modules[f"{root}.mlp.experts.gate_up_proj"] = ModuleShape(HIDDEN, 2 * INNER, EXPERTS)
            modules[f"{root}.mlp.experts.down_proj"] = ModuleShape(INNER, HIDDEN, EXPERTS)
            continue
        for expert in range(EXPERTS):
            modules[f"{root}.mlp.experts.{expert}.gate_proj"] = ModuleShape(HIDDEN, INNER)
            modules[f"{root}.mlp.experts.{expert}.up_proj"] = ModuleShape(HIDDEN, INNER)
            modules[f"{root}.mlp.experts.{expert}.down_proj"] = ModuleShape(INNER, HIDDEN)
    return BaseContract("tiny/moe", "f" * 64, modules, max_rank=16)


def model() -> Any:
    """A torch model with the modules and parameters of the contract."""
    import torch
    from torch import nn

    def parent(**children: Any) -> nn.Module:
        module = nn.Module()
        for name, child in children.items():
            setattr(module, name, child)
        return module

    def layer() -> nn.Module:
        experts = parent(
            gate_up_proj=nn.Parameter(torch.zeros(EXPERTS, 2 * INNER, HIDDEN)),
            down_proj=nn.Parameter(torch.zeros(EXPERTS, HIDDEN, INNER)),
        )
        attention = parent(q_proj=nn.Linear(HIDDEN, HIDDEN, bias=False))
        return parent(mlp=parent(experts=experts), self_attn=attention)

    root = parent(model=parent(layers=nn.ModuleList(layer() for _ in range(LAYERS))))
    root.prepare_inputs_for_generation = None  # PEFT asks causal models for it
    return root


def write(folder: Path, **fields: Any) -> dict[str, np.ndarray]:
    """Saves the adapter into `folder`; what it adds to each weight, by module or parameter."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    patterns = {"rank_pattern": {"experts.down_proj": 4}, "alpha_pattern": {"gate_up_proj": 3}}
    fields = {"r": 2, "lora_alpha": 6, "target_parameters": PARAMETERS, **patterns, **fields}
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False, **fields)
    tuned = get_peft_model(model(), config)
    tuned.save_pretrained(str(folder))
    deltas = {}
    for name, module in tuned.base_model.model.named_modules():
        if hasattr(module, "get_delta_weight") and hasattr(module, "lora_A"):
            parameter = getattr(module, "parameter_name", None)
            path = name.replace(".base_layer", "") + (f".{parameter}" if parameter else "")
            deltas[path] = module.get_delta_weight("default").detach().numpy()
    return deltas


if __name__ == "__main__":
    target = Path(sys.argv[1])
    written = write(target)
    (target / DELTAS).write_bytes(safetensors_bytes(written, dict.fromkeys(written, "F32")))
    (target / "README.md").unlink(missing_ok=True)
