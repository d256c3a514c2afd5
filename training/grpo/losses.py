"""The loss of a micro-batch. Sums, not means: how tokens weigh is in the advantages already (`advantages.reduced`).

Axes: B answers, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training.grpo.algorithm import Algorithm, Estimator

MOST_EXPONENT = 20.0
MOST_KL = 10.0


def policy_loss(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, algorithm: Algorithm
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate's masked sum, and the share of masked tokens that the clip held (PPO, 1707.06347, equation 7, with a
    bound for each side as in DAPO, 2503.14476, section 3.1). `dual_clip` bounds what a negative advantage may cost too
    (1912.09729, equation 5)."""
    ratio_BT = _exp(logprobs_BT - old_logprobs_BT)
    free_BT = ratio_BT * advantages_BT
    clipped_BT = ratio_BT.clamp(1 - algorithm.eps_clip_low, 1 + algorithm.eps_clip_high) * advantages_BT
    loss_BT = -torch.min(free_BT, clipped_BT)
    held = masked_mean((clipped_BT < free_BT).to(loss_BT.dtype), mask_BT).detach()
    if algorithm.policy_loss_type == "dual_clip":
        bounded_BT = torch.min(-advantages_BT * algorithm.clip_ratio_c, loss_BT)
        loss_BT = torch.where(advantages_BT < 0, bounded_BT, loss_BT)
    return _masked(loss_BT, mask_BT).sum(), held


def approx_kl(logprobs_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor, estimator: Estimator = "k3") -> Tensor:
    """[B, T]: an estimate of KL(policy, reference) from each sampled token (Schulman, "Approximating KL divergence", 2020)."""
    over_BT = logprobs_BT - reference_BT
    match estimator:
        case "k1":
            kl_BT = over_BT
        case "abs":
            kl_BT = over_BT.abs()
        case "k2":
            kl_BT = over_BT.square() / 2
        case "k3":
            under_BT = (-over_BT).clamp(-MOST_EXPONENT, MOST_EXPONENT)
            kl_BT = (under_BT.exp() - under_BT - 1).clamp(-MOST_KL, MOST_KL)
    return _masked(kl_BT, mask_BT)


def total_loss(
    policy: Tensor, kl_BT: Tensor | None, entropy_BT: Tensor | None, mask_BT: Tensor, weight: float, algorithm: Algorithm
) -> Tensor:
    """Policy loss and what is added to it. KL and entropy are means over each answer's tokens, then over answers, whatever the
    reduction, as in SkyRL; `weight` is this micro-batch's share of the mini-batch, since the policy loss is a sum already."""
    added = policy.new_zeros(())
    if algorithm.use_kl_loss and kl_BT is not None:
        added = added + algorithm.kl_loss_coef * masked_mean(kl_BT, mask_BT, -1).mean()
    if algorithm.use_entropy_loss and entropy_BT is not None:
        added = added - algorithm.entropy_loss_coef * masked_mean(entropy_BT, mask_BT, -1).mean()
    return policy + added * weight


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    return _masked(values, mask).sum(dim) / mask.sum(dim).clamp(min=1)


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """Nothing of what the mask leaves out, not even a NaN."""
    return torch.where(mask.bool(), values * mask, values.new_zeros(()))


def _exp(delta: Tensor) -> Tensor:
    """In float32, as SkyRL has it, with an exponent that cannot overflow."""
    return delta.float().clamp(-MOST_EXPONENT, MOST_EXPONENT).exp().to(delta.dtype)
