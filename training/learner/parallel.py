"""One learner or several: one program in each process (SPMD), gloo on CPUs, NCCL on GPUs, the policy in shards (FSDP2)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True, slots=True)
class World:
    """This process among `size` of them. `is_grouped` says that there is a process group, and that policies are sharded; one
    process alone needs none."""

    device: torch.device
    rank: int = 0
    size: int = 1
    is_grouped: bool = False

    def sum(self, values: Tensor) -> Tensor:
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Tensor, how: Any) -> Tensor:
        if self.is_grouped:
            dist.all_reduce(values, how)
        return values


def alone(device: str = "auto") -> World:
    """A process by itself; `auto` is the GPU where there is one."""
    return World(torch.device(_kind(device)))


def join(device: str = "auto") -> World:
    """The process group that the environment tells of (RANK, WORLD_SIZE, LOCAL_RANK and the rendezvous, as `torchrun` sets them);
    without it, this process alone. Whoever joins calls `leave`."""
    if "WORLD_SIZE" not in os.environ:
        return alone(device)
    kind, local = _kind(device), int(os.environ.get("LOCAL_RANK", "0"))
    place = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(BACKENDS[kind])
    return World(place, dist.get_rank(), dist.get_world_size(), is_grouped=True)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _kind(device: str) -> str:
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def shard(policy: nn.Module, layers: nn.ModuleList, world: World, reshard_after_forward: bool = True) -> None:
    """Every decoder layer is a unit, all else another. Gradients are summed, never averaged: the loss is a plain sum over all
    processes' rows."""
    if not world.is_grouped:
        return
    mesh = init_device_mesh(world.device.type, (world.size,))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(policy, mesh=mesh)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other way to divide by one


def sync_gradients(policy: nn.Module, now: bool) -> None:
    """Whether the next backward pass adds up gradients over processes: only a mini-batch's last has to."""
    if isinstance(policy, FSDPModule):
        policy.set_requires_gradient_sync(now)


def local(values: Tensor) -> Tensor:
    """This process's shard of a parameter or of what belongs to it."""
    return values.to_local() if isinstance(values, DTensor) else values


def whole(values: Tensor) -> Tensor:
    """All of it, gathered; every process has to ask."""
    return values.full_tensor() if isinstance(values, DTensor) else values
