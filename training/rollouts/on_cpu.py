"""What vLLM's CPU build (0.29) lacks for rollouts, in the process of an engine alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform


class OneAdapter(PunicaWrapperCPU):
    """LoRA where all requests of a step have the same adapter, or none: two matrix products a module. vLLM's own kernels gather
    both factors anew for each token, which took four times as long as all the rest; and they take "no adapter" for the last
    slot, so that the base would answer as whoever is there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slot: int | None = None

    def update_metadata(self, mapping: Any, lora_index_to_id: list[int | None], *args: Any, **kwargs: Any) -> None:
        super().update_metadata(mapping, lora_index_to_id, *args, **kwargs)
        wanted = set(mapping.index_mapping) | set(mapping.prompt_mapping)
        if len(wanted) > 1:
            raise ValueError(f"requests with the adapters {sorted(wanted)} share a step: rollouts use one at a time")
        self._slot = next((lora_index_to_id.index(one) for one in wanted if one > 0), None)

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        """y [N, out] += scale * x [N, in] @ A^T @ B^T, for each slice of `out`; A [slot, 1, rank, in], B [slot, 1, out, rank]."""
        if self._slot is None:
            return
        x, begin = x.view(-1, x.shape[-1]), 0
        y = y.view(-1, y.shape[-1])
        for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            filled = min(size, b.shape[2])  # the head's rows are padded further than its factor's
            low = (x @ a[self._slot, 0].T).mul_(scale)
            y[:, begin : begin + filled].addmm_(low, b[self._slot, 0, :filled].T)
            begin += size

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **_: Any
    ) -> None:
        """The same for the head."""
        self.add_lora_linear(y, x, (lora_a_stacked,), (lora_b_stacked,), scale, (y.shape[-1],))


class Dice(torch.Generator):
    """vLLM takes back what a request drew for a token that it throws away (its prompt was not read to the end yet), by an offset
    that only generators of GPUs have. Here the draw is spent: as good, and the same whenever the same is played."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None: ...


def mend() -> None:
    """Call it before the engine is made, in a process that does nothing else."""
    type(current_platform).get_punica_wrapper = classmethod(lambda cls: f"{OneAdapter.__module__}.{OneAdapter.__qualname__}")
    torch.Generator = Dice  # type: ignore[misc]
