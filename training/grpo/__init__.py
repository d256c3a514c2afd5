"""Group relative policy optimization: from rewards to a loss. Names and defaults are SkyRL's; tensors in, tensors out."""

from training.grpo.advantages import group_advantages, reduced, zero_variance_filter
from training.grpo.algorithm import Algorithm, BadAlgorithm
from training.grpo.losses import approx_kl, masked_mean, policy_loss, total_loss

__all__ = [
    "Algorithm",
    "BadAlgorithm",
    "approx_kl",
    "group_advantages",
    "masked_mean",
    "policy_loss",
    "reduced",
    "total_loss",
    "zero_variance_filter",
]
