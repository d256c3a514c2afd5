"""One process's share of what the learner's next step depends on, as a file: float32 weights, optimizer, random states."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.learner.adapter_files import sync
from training.learner.parallel import World, local

STATE_VERSION = 1

Weights = Mapping[str, nn.Parameter]


class BadState(ValueError):
    """A saved state that is not this learner's; names the file and what differs."""


def state_file(folder: Path, world: World) -> Path:
    return folder / f"learner_rank_{world.rank}_of_{world.size}.pt"


def captured(weights: Weights, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, Any]:
    return {
        "version": STATE_VERSION,
        "weights": {name: local(weight.detach()) for name, weight in weights.items()},
        "optimizer": {name: _shards(optimizer.state.get(weight, {})) for name, weight in weights.items()},
        "random": torch.get_rng_state(),
        "cuda_random": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def _shards(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {kind: local(values) for kind, values in moments.items()}


def restore(state: Mapping[str, Any], weights: Weights, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Raises BadState before anything is changed."""
    _refuse_other_shapes(state["weights"], weights)
    with torch.no_grad():
        for name, weight in weights.items():
            local(weight).copy_(state["weights"][name])
            if moments := state["optimizer"][name]:
                optimizer.state[weight] = {kind: _like(weight, values) for kind, values in moments.items()}
    torch.set_rng_state(state["random"])
    if device.type == "cuda" and state["cuda_random"] is not None:
        torch.cuda.set_rng_state(state["cuda_random"], device)


def _refuse_other_shapes(saved: Mapping[str, Tensor], weights: Weights) -> None:
    shapes = {name: tuple(values.shape) for name, values in saved.items()}
    held = {name: tuple(local(weight).shape) for name, weight in weights.items()}
    for name in sorted(shapes.keys() | held.keys()):
        if shapes.get(name) != held.get(name):
            raise BadState(f"the state's {name} is {shapes.get(name)}: the learner's is {held.get(name)}")


def _like(weight: nn.Parameter, values: Tensor) -> Tensor:
    """A moment of a sharded weight is sharded as it is; the count of steps is a plain number on the CPU."""
    if values.dim() == 0:
        return values.clone()
    here = values.to(local(weight).device, copy=True)
    if not isinstance(weight, DTensor):
        return here
    return DTensor.from_local(here, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride())


def write_state(file: Path, state: Mapping[str, Any]) -> None:
    """Tensors and plain values. Raises OSError; nothing is left under the name then."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        torch.save(dict(state), partial)
        sync(partial)
        partial.rename(file)
        sync(file.parent)
    finally:
        partial.unlink(missing_ok=True)


def read_state(file: Path) -> dict[str, Any]:
    """Raises BadState where there is none, or one of another version."""
    if not file.exists():
        raise BadState(f"{file} is not there: a state is read by as many processes as wrote it")
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    if state["version"] != STATE_VERSION:
        raise BadState(f"{file} is a state of version {state['version']}: only {STATE_VERSION} is known")
    return state
