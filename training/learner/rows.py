"""Trajectories as rows of token ids with a place for each image token, and several rows as one padded micro-batch.

Axes: B rows, L tokens of the longest, T sampled tokens of whoever has most, left-aligned; only at those is there a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.learner.pictures import Grid
from training.maze import Episode
from training.trajectory import Trajectory

Group = tuple[int | None, int]


class BadTrajectory(ValueError):
    """A trajectory that no row can be made of; says which task's and what does not fit."""


@dataclass(frozen=True, slots=True)
class Row:
    """One answer. `ids_l` has as many image tokens as each picture has, `positions_3l` the time, row and column of each place.
    `sampled_at` (T) are the places of sampled tokens, each predicted at the place before. `log_probs` (T) are the sampler's."""

    group: Group
    ids_l: Tensor
    positions_3l: Tensor
    pictured: tuple[Episode, ...]
    sampled_at: Tensor
    log_probs: tuple[float, ...]
    reward: float

    def __len__(self) -> int:
        return len(self.ids_l)


def group_of(trajectory: Trajectory) -> Group:
    """Answers to the same maze."""
    return (trajectory.task.size, trajectory.task.maze_seed)


def row_of(trajectory: Trajectory, image_token_id: int | None, grid_of: Callable[[Episode], Grid]) -> Row:
    """Each picture's one image token becomes as many as `grid_of` its state has. Positions are as the model's own
    `get_rope_index` gives them: words count up, a picture's tokens stand where it begins, in time, plus their row and column,
    and what follows goes on after the longer side. Raises BadTrajectory."""
    _check(trajectory, image_token_id)
    ids = np.array(trajectory.token_ids)
    times, steps = np.ones_like(ids), np.ones_like(ids)
    images = np.flatnonzero(ids == image_token_id) if image_token_id is not None else np.empty(0, int)
    grids = [grid_of(state) for state in trajectory.pictured]
    times[images] = [time * rows * columns for time, rows, columns in grids]
    steps[images] = [max(rows, columns) for _, rows, columns in grids]
    begins = times.cumsum() - times
    positions_3l = np.repeat(np.stack([steps.cumsum() - steps] * 3), times, axis=1)
    for begin, grid in zip(begins[images], grids, strict=True):
        offsets = _offsets(grid)
        positions_3l[:, begin : begin + offsets.shape[1]] += offsets
    sampled = trajectory.prompt_tokens + np.flatnonzero(trajectory.loss_mask)
    return Row(
        group=group_of(trajectory),
        ids_l=torch.from_numpy(np.repeat(ids, times)),
        positions_3l=torch.from_numpy(positions_3l),
        pictured=trajectory.pictured,
        sampled_at=torch.from_numpy(begins[sampled]),
        log_probs=tuple(trajectory.log_probs[at - trajectory.prompt_tokens] for at in sampled),
        reward=trajectory.reward,
    )


@cache
def _offsets(grid: Grid) -> NDArray[np.int64]:
    """[3, N] of a picture's tokens, row by row."""
    return np.indices(grid).reshape(3, -1)


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


def micro_batch(rows: Sequence[Row], chosen: Sequence[int], pad_id: int) -> MicroBatch:
    """The rows `chosen` of a batch as tensors; without any, one row of padding without a sampled token, for a process that has
    nothing left to do while others have."""
    of_batch = [rows[at] for at in chosen]
    length, sampled = max(map(len, of_batch), default=1), max((len(row.sampled_at) for row in of_batch), default=1)
    count = max(len(of_batch), 1)
    input_ids_bl = torch.full((count, length), pad_id)
    positions_3bl = torch.zeros((3, count, length), dtype=torch.long)
    mask_bt = torch.zeros((count, sampled))
    for at, row in enumerate(of_batch):
        input_ids_bl[at, : len(row)] = row.ids_l
        positions_3bl[:, at, : len(row)] = row.positions_3l
        mask_bt[at, : len(row.sampled_at)] = 1
    none = torch.empty(0, dtype=torch.long)
    return MicroBatch(
        rows=tuple(chosen),
        input_ids_bl=input_ids_bl,
        positions_3bl=positions_3bl,
        before=torch.cat([none, *(at * length + row.sampled_at - 1 for at, row in enumerate(of_batch))]),
        targets=torch.cat([none, *(row.ids_l[row.sampled_at] for row in of_batch)]),
        mask_bt=mask_bt,
        pictured=tuple(state for row in of_batch for state in row.pictured),
    )


def padded_log_probs(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """The sampler's log-probs [B, T] of all rows, and the mask of what is sampled."""
    sampled = max((len(row.log_probs) for row in rows), default=1)
    log_probs_bt, mask_bt = torch.zeros(len(rows), sampled), torch.zeros(len(rows), sampled)
    for at, row in enumerate(rows):
        log_probs_bt[at, : len(row.log_probs)] = torch.tensor(row.log_probs)
        mask_bt[at, : len(row.log_probs)] = 1
    return log_probs_bt, mask_bt
