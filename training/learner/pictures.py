"""What a vision tower makes of pictures. The tower is frozen, so each distinct picture goes through it once per update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLVisionAttention,
    Qwen3VLVisionPatchEmbed,
    apply_rotary_pos_emb_vision,
)

from training.maze import Episode
from training.maze.rendering import picture

MOST_AT_ONCE = 64

Grid = tuple[int, int, int]


def looks(state: Episode) -> Episode:
    """The state with all that its picture does not show at its default: equal looks are equal pictures."""
    return replace(state, seed=0, turns=0, well_formed=0, done=False, solved=False)


@dataclass(frozen=True, slots=True)
class Seen:
    """A picture's N image tokens: `embeds_nh` [N, H] in the place of their embeddings, and what is added to the hidden states
    after the first layers, `deepstack_dnh` [D, N, H]."""

    embeds_nh: Tensor
    deepstack_dnh: Tensor


class Eye:
    """The tower with the base's own image processor."""

    def __init__(self, tower: Any, image_processor: Any, device: torch.device) -> None:
        self.tower, self.image_processor, self.device = tower, image_processor, device
        self._grids: dict[tuple[int, int], Grid] = {}
        quicken(tower)

    def grid(self, state: Episode) -> Grid:
        """(time, rows, columns) of the image tokens that the state's picture becomes."""
        size = (state.spec.size, state.spec.cell_px)
        if size not in self._grids:
            time, rows, columns = self._processed([state])[1]
            side = self.tower.spatial_merge_size
            self._grids[size] = (time, rows // side, columns // side)
        return self._grids[size]

    @torch.no_grad()
    def see(self, states: Iterable[Episode]) -> dict[Episode, Seen]:
        """What is seen in each distinct look among `states`, by look (`looks`)."""
        of_grid: dict[Grid, list[Episode]] = {}
        for look in dict.fromkeys(map(looks, states)):
            of_grid.setdefault(self.grid(look), []).append(look)
        seen: dict[Episode, Seen] = {}
        for of_one_size in of_grid.values():
            for begin in range(0, len(of_one_size), MOST_AT_ONCE):
                chunk = of_one_size[begin : begin + MOST_AT_ONCE]
                seen.update(zip(chunk, self._seen(chunk), strict=True))
        return seen

    def _seen(self, states: Sequence[Episode]) -> list[Seen]:
        pixels, grid = self._processed(states)
        grids = torch.tensor([grid] * len(states), device=self.device)
        out = self.tower(pixels.to(self.device, self.tower.dtype), grid_thw=grids)
        embeds = out.pooler_output.chunk(len(states))
        deepstack = [features.chunk(len(states)) for features in out.deepstack_features]
        none = embeds[0].new_zeros(0, *embeds[0].shape)
        return [
            Seen(embeds[at], torch.stack([of_layer[at] for of_layer in deepstack]) if deepstack else none)
            for at in range(len(states))
        ]

    def _processed(self, states: Sequence[Episode]) -> tuple[Tensor, Grid]:
        """Flattened patches of pictures of one size, [pictures * patches, values], and the grid of each."""
        out = self.image_processor(images=[picture(state) for state in states], return_tensors="pt", device=self.device)
        time, rows, columns = out["image_grid_thw"][0].tolist()
        return out["pixel_values"], (time, rows, columns)


def quicken(tower: Any) -> None:
    """From now on the tower attends to pictures of one size in one call, and embeds patches by one matrix product.

    Without FlashAttention its own attention is a loop over pictures, which takes most of the time that small pictures need;
    several sizes together still go that way. Its own embedding is a convolution over patches that do not overlap, for which
    GPUs without a fitting cuDNN have a loop over patches."""
    for module in tower.modules():
        if isinstance(module, Qwen3VLVisionAttention):
            module.forward = MethodType(_attend, module)
        if isinstance(module, Qwen3VLVisionPatchEmbed):
            module.forward = MethodType(_embed, module)


def _embed(embedding: Any, patches_nv: Tensor) -> Tensor:
    weight = embedding.proj.weight
    return F.linear(patches_nv.to(weight.dtype), weight.flatten(1), embedding.proj.bias)


def _attend(attention: Any, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: Any = None, **others: Any) -> Tensor:
    count, pictures = hidden_states.shape[0], cu_seqlens.shape[0] - 1
    if not (cu_seqlens.diff() == cu_seqlens[1]).all():
        return Qwen3VLVisionAttention.forward(attention, hidden_states, cu_seqlens, position_embeddings, **others)
    query, key, value = attention.qkv(hidden_states).view(count, 3, attention.num_heads, -1).unbind(1)
    query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
    apart = [part.view(pictures, count // pictures, attention.num_heads, -1).transpose(1, 2) for part in (query, key, value)]
    attended = F.scaled_dot_product_attention(*apart, scale=attention.scaling)
    return attention.proj(attended.transpose(1, 2).reshape(count, -1))
