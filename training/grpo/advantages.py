"""What each token of an answer is to be made likelier or less likely by, and how answers weigh against each other.

Axes: B answers of a mini-batch, T tokens of an answer, right-aligned or not, as the mask says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from training.grpo.algorithm import Algorithm

STD_FLOOR = 1e-6


def group_advantages(rewards_BT: Tensor, mask_BT: Tensor, groups: Sequence[Hashable], *, norm_by_std: bool = True) -> Tensor:
    """advantages [B, T]: an answer's reward (its row's sum) less its group's mean, over the group's deviation if `norm_by_std`
    (DeepSeekMath, 2402.03300, section 4.1.2: outcome supervision; without the deviation Dr. GRPO, 2503.20783, section 3.2), the
    same for every token of its mask. The deviation is that of a sample, as in SkyRL. Who is alone in a group keeps its reward."""
    rewards_B = rewards_BT.sum(-1)
    members: dict[Hashable, list[int]] = defaultdict(list)
    for row, group in enumerate(groups):
        members[group].append(row)
    advantages_B = rewards_B.clone()
    for rows in members.values():
        of_group = rewards_B[rows]
        mean, std = (of_group.mean(), of_group.std()) if len(rows) > 1 else (of_group.new_zeros(()), of_group.new_ones(()))
        advantages_B[rows] = (of_group - mean) / (std + STD_FLOOR) if norm_by_std else of_group - mean
    return advantages_B.unsqueeze(-1) * mask_BT


def reduced(
    advantages_BT: Tensor,
    mask_BT: Tensor,
    algorithm: Algorithm,
    *,
    micro_batch_size: int = 1,
    prompts: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """advantages [B, T] of a mini-batch, weighted so that the plain sum of the masked loss is the reduction that was asked for:
    gradients of micro-batches, on however many processes, then only have to be added.

    `token_mean`: over all tokens of the mini-batch; `token_mean_legacy`: of each micro-batch, then of those; `sequence_mean`: of
    each answer, then of those; `seq_mean_token_sum_norm`: sums of answers over `max_seq_len`; `prompt_mean`: over all tokens of a
    prompt's answers, then of prompts, whose rows `prompts` tells as (begin, end).
    """
    count = advantages_BT.shape[0]
    match algorithm.loss_reduction:
        case "token_mean":
            return advantages_BT / _tokens(mask_BT)
        case "token_mean_legacy":
            parts = count // micro_batch_size
            return _by_part(advantages_BT, mask_BT, [(k * micro_batch_size, (k + 1) * micro_batch_size) for k in range(parts)])
        case "sequence_mean":
            return advantages_BT / (count * mask_BT.sum(-1, keepdim=True).clamp(min=1))
        case "seq_mean_token_sum_norm":
            assert algorithm.max_seq_len
            return advantages_BT / (count * algorithm.max_seq_len)
        case "prompt_mean":
            if prompts is None:
                raise ValueError("prompt_mean needs to know which rows are of one prompt")
            return _by_part(advantages_BT, mask_BT, prompts)


def _by_part(advantages_BT: Tensor, mask_BT: Tensor, parts: Sequence[tuple[int, int]]) -> Tensor:
    """The mean over the tokens of each part, then over the parts; rows of no part weigh nothing."""
    weighted_BT = torch.zeros_like(advantages_BT)
    for begin, end in parts:
        weighted_BT[begin:end] = advantages_BT[begin:end] / (_tokens(mask_BT[begin:end]) * len(parts))
    return weighted_BT


def _tokens(mask_BT: Tensor) -> Tensor:
    return mask_BT.sum().clamp(min=1)


def zero_variance_filter(
    rewards: Sequence[float], groups: Sequence[Hashable], live: Sequence[bool] | None = None, tol: float = 0.0
) -> list[int]:
    """The answers to keep: all but those of groups in which more than one is live and the live ones' rewards lie within `tol`,
    which teach nothing (DAPO, 2503.14476, section 3.2)."""
    live = live if live is not None else [True] * len(rewards)
    of_group: dict[Hashable, list[float]] = defaultdict(list)
    for reward, group, is_live in zip(rewards, groups, live, strict=True):
        if is_live:
            of_group[group].append(reward)
    dull = {group for group, found in of_group.items() if len(found) > 1 and max(found) - min(found) <= tol}
    return [row for row, group in enumerate(groups) if group not in dull]
