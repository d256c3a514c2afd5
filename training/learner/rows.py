"""Trajectories as rows of token ids with a place for each image token, and several rows as one padded micro-batch.

Axes: B rows, L tokens of the longest, T sampled tokens of whoever has most, left-aligned; only at those is there a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from training.learner.pictures import Grid
from training.maze import Episode
from training.trajectory import Trajectory

Group = tuple[int | None, int]
# Of expanded ids and the grids of their pictures: positions [3, L], as the model's own `get_rope_index` gives them.
Positions = Callable[[Tensor, Sequence[Grid]], Tensor]


class BadTrajectory(ValueError):
    """A trajectory that no row can be made of; says which task's and what does not fit."""


@dataclass(frozen=True, slots=True)
class Row:
    """One answer. `token_ids` (L) have as many image tokens as each picture has; `sampled_at` (T) are the places of sampled
    tokens, each predicted at the place before. `log_probs` (T) are the sampler's."""

    group: Group
    token_ids: tuple[int, ...]
    pictured: tuple[Episode, ...]
    sampled_at: tuple[int, ...]
    log_probs: tuple[float, ...]
    reward: float

    def __len__(self) -> int:
        return len(self.token_ids)


def group_of(trajectory: Trajectory) -> Group:
    """Answers to the same maze."""
    return (trajectory.task.size, trajectory.task.maze_seed)


def row_of(trajectory: Trajectory, image_token_id: int | None, tokens_of: Callable[[Episode], int]) -> Row:
    """Each picture's one image token becomes as many as `tokens_of` its state. Raises BadTrajectory."""
    _check(trajectory, image_token_id)
    pictures = iter(trajectory.pictured)
    times = [tokens_of(next(pictures)) if token == image_token_id else 1 for token in trajectory.token_ids]
    begins = [0, *accumulate(times)]
    sampled = [trajectory.prompt_tokens + at for at, is_sampled in enumerate(trajectory.loss_mask) if is_sampled]
    return Row(
        group=group_of(trajectory),
        token_ids=tuple(t for token, n in zip(trajectory.token_ids, times, strict=True) for t in (token,) * n),
        pictured=trajectory.pictured,
        sampled_at=tuple(begins[at] for at in sampled),
        log_probs=tuple(trajectory.log_probs[at - trajectory.prompt_tokens] for at in sampled),
        reward=trajectory.reward,
    )


def _check(trajectory: Trajectory, image_token_id: int | None) -> None:
    answer = len(trajectory.token_ids) - trajectory.prompt_tokens
    images = trajectory.token_ids.count(image_token_id) if image_token_id is not None else 0
    for name, found, needed in (
        ("loss_mask", len(trajectory.loss_mask), answer),
        ("log_probs", len(trajectory.log_probs), answer),
        ("pictured", len(trajectory.pictured), images),
    ):
        if found != needed:
            raise BadTrajectory(f"{trajectory.task}: {name} has {found} entries for {needed} places")
    if trajectory.prompt_tokens < 1:
        raise BadTrajectory(f"{trajectory.task}: prompt_tokens is {trajectory.prompt_tokens}: at least 1")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Padded on the right, where causal attention never looks, so there is no attention mask. `rows` are indices into the batch.
    `input_ids_bl`, `positions_3bl`; `before` are flat indices into [B * L] of the places that predict the sampled tokens,
    `targets` those tokens, both in the order of `mask_bt`'s ones. `pictured` is in the order of the image tokens."""

    rows: tuple[int, ...]
    input_ids_bl: Tensor
    positions_3bl: Tensor
    before: Tensor
    targets: Tensor
    mask_bt: Tensor
    pictured: tuple[Episode, ...]

    def to(self, device: torch.device) -> MicroBatch:
        names = ("input_ids_bl", "positions_3bl", "before", "targets", "mask_bt")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return MicroBatch(rows=self.rows, pictured=self.pictured, **moved)


def micro_batch(
    rows: Sequence[Row], chosen: Sequence[int], pad_id: int, positions: Positions, grid_of: Callable[[Episode], Grid]
) -> MicroBatch:
    """The rows `chosen` of a batch as tensors; without any, one row of padding without a sampled token, for a process that has
    nothing left to do while others have."""
    of_batch = [rows[at] for at in chosen]
    length, sampled = max(map(len, of_batch), default=1), max((len(row.sampled_at) for row in of_batch), default=1)
    count = max(len(of_batch), 1)
    input_ids_bl = torch.full((count, length), pad_id)
    positions_3bl = torch.zeros((3, count, length), dtype=torch.long)
    mask_bt = torch.zeros((count, sampled))
    before: list[int] = []
    targets: list[int] = []
    for at, row in enumerate(of_batch):
        ids = torch.tensor(row.token_ids)
        input_ids_bl[at, : len(row)] = ids
        positions_3bl[:, at, : len(row)] = positions(ids, [grid_of(state) for state in row.pictured])
        mask_bt[at, : len(row.sampled_at)] = 1
        before += [at * length + place - 1 for place in row.sampled_at]
        targets += [row.token_ids[place] for place in row.sampled_at]
    pictured = tuple(state for row in of_batch for state in row.pictured)
    flat = (torch.tensor(before, dtype=torch.long), torch.tensor(targets, dtype=torch.long))
    return MicroBatch(tuple(chosen), input_ids_bl, positions_3bl, *flat, mask_bt, pictured)


def padded_log_probs(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """The sampler's log-probs [B, T] of all rows, and the mask of what is sampled."""
    sampled = max((len(row.log_probs) for row in rows), default=1)
    log_probs_bt, mask_bt = torch.zeros(len(rows), sampled), torch.zeros(len(rows), sampled)
    for at, row in enumerate(rows):
        log_probs_bt[at, : len(row.log_probs)] = torch.tensor(row.log_probs)
        mask_bt[at, : len(row.log_probs)] = 1
    return log_probs_bt, mask_bt
