"""How a batch is cut: into mini-batches of whole groups, those into shares of processes, and shares into micro-batches. Every
process knows the whole batch and cuts it alike, so nobody has to tell anybody, and all normalisers are global."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from training.grpo import Algorithm, group_advantages, reduced, zero_variance_filter


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """What one optimizer step learns from: `rows` are indices into the batch, in its order, and `micro_batches` those of one
    process that it has to compute, longest first; every process has as many, some of them empty."""

    rows: tuple[int, ...]
    micro_batches: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Credit:
    """`weights_bt` are advantages, reduced over their mini-batch so that the loss is a plain sum; `mask_bt` the sampled tokens
    that count; `filtered` how many groups teach nothing and were left out."""

    weights_bt: Tensor
    mask_bt: Tensor
    filtered: int


def mini_batches(groups: Sequence[Hashable], prompts: int) -> list[list[int]]:
    """Rows of at most `prompts` groups each, in the order in which groups appear."""
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    of_group = list(members.values())
    return [list(chain.from_iterable(of_group[at : at + prompts])) for at in range(0, len(of_group), prompts)]


def credit(
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    mask_bt: Tensor,
    minis: Sequence[Sequence[int]],
    algorithm: Algorithm,
    micro_batch_size: int = 1,
) -> Credit:
    """Advantages of the batch, weighted by `algorithm.loss_reduction` within each mini-batch. What the filter leaves out leaves
    the denominators too, as in SkyRL; `token_mean_legacy` takes its micro-batches in the batch's order, as SkyRL's."""
    filtered = 0
    if algorithm.zero_variance_filter:
        kept = zero_variance_filter(rewards, groups, mask_bt.any(-1).tolist(), algorithm.zero_variance_filter_tol)
        is_kept_b = torch.zeros(len(rewards))
        is_kept_b[kept] = 1
        mask_bt = mask_bt * is_kept_b.unsqueeze(-1)
        filtered = len(set(groups)) - len({groups[row] for row in kept})
    rewards_b1 = torch.tensor(rewards, dtype=torch.float32).unsqueeze(-1)
    advantages_bt = group_advantages(rewards_b1, mask_bt, groups, norm_by_std=algorithm.grpo_norm_by_std)
    weights_bt = torch.zeros_like(mask_bt)
    for rows in minis:
        spans = _spans([groups[row] for row in rows])
        of_mini = (advantages_bt[rows], mask_bt[rows], algorithm)
        weights_bt[rows] = reduced(*of_mini, micro_batch_size=micro_batch_size, prompts=spans)
    return Credit(weights_bt * mask_bt, mask_bt, filtered)


def _spans(groups: Sequence[Hashable]) -> list[tuple[int, int]]:
    """(begin, end) of each run of one group."""
    cuts = [at for at in range(len(groups)) if at == 0 or groups[at] != groups[at - 1]]
    return list(zip(cuts, [*cuts[1:], len(groups)], strict=True))


def is_live(found: Credit, algorithm: Algorithm) -> list[bool]:
    """Which rows can move the policy. One whose advantage is zero adds nothing to the gradient unless KL or entropy are in the
    loss, so that it need not be computed."""
    counts_b = found.mask_bt.any(-1)
    return (counts_b if algorithm.use_kl_loss or algorithm.use_entropy_loss else counts_b & found.weights_bt.any(-1)).tolist()


def shares(rows: Sequence[int], groups: Sequence[Hashable], lengths: Sequence[int], size: int) -> list[list[int]]:
    """Whole groups for each of `size` processes, since a group's answers share pictures: the longest group first, to whoever
    has least to do."""
    members: dict[Hashable, list[int]] = {}
    for row in rows:
        members.setdefault(groups[row], []).append(row)
    given: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for of_group in sorted(members.values(), key=lambda of: (-sum(lengths[row] for row in of), of[0])):
        least = loads.index(min(loads))
        given[least] += of_group
        loads[least] += sum(lengths[row] for row in of_group)
    return given


def cut(
    minis: Sequence[Sequence[int]],
    live: Sequence[bool],
    groups: Sequence[Hashable],
    lengths: Sequence[int],
    micro_batch_size: int,
    rank: int = 0,
    size: int = 1,
) -> list[MiniBatch]:
    """What process `rank` of `size` computes of each mini-batch: its live rows, alike in length together."""
    plans = []
    for rows in minis:
        given = shares([row for row in rows if live[row]], groups, lengths, size)
        parts = [_parts(sorted(share, key=lambda row: (-lengths[row], row)), micro_batch_size) for share in given]
        most = max(map(len, parts))
        plans.append(MiniBatch(tuple(rows), (*parts[rank], *[()] * (most - len(parts[rank])))))
    return plans


def _parts(rows: Sequence[int], micro_batch_size: int) -> list[tuple[int, ...]]:
    return [tuple(rows[at : at + micro_batch_size]) for at in range(0, len(rows), micro_batch_size)]
