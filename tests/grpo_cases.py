"""Random batches for comparing losses: ragged masks, an answer without tokens, groups of one, equal rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SIZES = (8, 12)  # answers, tokens
PROMPTS = [(0, 4), (4, 7), (7, 8)]

REDUCTIONS: tuple[dict[str, Any], ...] = (
    {"loss_reduction": "token_mean"},
    {"loss_reduction": "token_mean_legacy"},
    {"loss_reduction": "sequence_mean"},
    {"loss_reduction": "seq_mean_token_sum_norm", "max_seq_len": 16},
    {"loss_reduction": "prompt_mean"},
)
CLIPS: tuple[dict[str, Any], ...] = (
    {},
    {"eps_clip_low": 0.1, "eps_clip_high": 0.28},
    {"policy_loss_type": "dual_clip", "clip_ratio_c": 1.5},
)
SETTINGS = [reduction | clip for reduction in REDUCTIONS for clip in CLIPS]
ESTIMATORS = ("k1", "k2", "k3", "abs")
SEEDS = range(3)


@dataclass(frozen=True)
class Case:
    rewards: Tensor  # [B, T]: each answer's reward at its last token
    mask: Tensor  # [B, T]
    groups: list[str]
    logprobs: Tensor
    old_logprobs: Tensor
    reference: Tensor


def case(seed: int) -> Case:
    dice = torch.Generator().manual_seed(seed)
    answers, tokens = SIZES
    lengths = [0 if row == 5 else int(torch.randint(1, tokens + 1, (), generator=dice)) for row in range(answers)]
    mask = torch.zeros(SIZES, dtype=torch.float64)
    rewards = torch.zeros(SIZES, dtype=torch.float64)
    for row, length in enumerate(lengths):
        mask[row, tokens - length :] = 1
        holes = torch.rand(tokens, generator=dice) < 0.2  # what the environment said
        mask[row, holes] = 0
        rewards[row, -1] = 1.0 if row in (4, 5, 6) else torch.rand((), generator=dice).double()

    def logprobs() -> Tensor:
        return -torch.rand(SIZES, generator=dice, dtype=torch.float64) * 3

    old = logprobs()
    new = old + torch.randn(SIZES, generator=dice, dtype=torch.float64) * 0.4
    return Case(rewards, mask, ["a"] * 4 + ["b"] * 3 + ["alone"], new, old, logprobs())
