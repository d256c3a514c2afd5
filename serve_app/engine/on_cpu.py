"""What vLLM's CPU build (0.29) lacks, in an engine's worker.

LoRA by adapter: two products for all tokens that have it. vLLM (0.29) gathers both factors anew for each token, which
takes several times as long as all the rest, and takes "no adapter", index -1, for the last place: whoever sits there would
answer for the base as soon as two requests share a step."""

from __future__ import annotations

from functools import cache
from typing import Any

GROUPS = "_loramux_groups"


def mend() -> None:
    """In the process of an engine's worker, before the first request. Once is enough; more do no harm."""
    import torch

    torch.Generator = _dice()  # type: ignore[misc]
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    if PunicaWrapperCPU.add_lora_linear is _add_lora_linear:
        return
    update_metadata = PunicaWrapperCPU.update_metadata

    def update_and_forget(self: Any, *args: Any, **kwargs: Any) -> None:
        update_metadata(self, *args, **kwargs)
        vars(self).pop(GROUPS, None)

    PunicaWrapperCPU.update_metadata = update_and_forget
    PunicaWrapperCPU.add_lora_linear = _add_lora_linear


@cache
def _dice() -> type:
    """A generator that vLLM can turn back. It does so for the token of a prompt that was not read to its end, where a request has
    a seed, by an offset that only generators of GPUs have: without one the engine dies. Here the draw is spent."""
    import torch

    class Dice(torch.Generator):
        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> None: ...

    return Dice


def _add_lora_linear(
    wrapper: Any,
    y: Any,
    x: Any,
    lora_a_stacked: tuple[Any, ...],
    lora_b_stacked: tuple[Any, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """y [N, out] += scale * x [N, in] @ A^T @ B^T for each slice of `out`, with A [place, 1, rank, in] and
    B [place, 1, out, rank] of each token's place. What lies between is float32, as in vLLM."""
    x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
    for place, rows in _groups(wrapper):
        own, begin = x if rows is None else x[rows], 0
        for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            low = (own.float() @ a[place, 0].T.float()).mul_(scale)
            delta = low.to(y.dtype) @ b[place, 0].T.to(y.dtype)
            part = y[:, begin : begin + delta.shape[-1]]
            if rows is None:
                part += delta
            else:
                part.index_add_(0, rows, delta)
            begin += size


def _groups(wrapper: Any) -> list[tuple[int, Any]]:
    """Each place that tokens of this step have, with their rows; None where all tokens have the same."""
    found = vars(wrapper).get(GROUPS)
    if found is None:
        places = wrapper.token_lora_indices
        present = places.unique().tolist()
        found = [
            (place, None if len(present) == 1 else (places == place).nonzero().squeeze(1)) for place in present if place >= 0
        ]
        setattr(wrapper, GROUPS, found)
    return found
