"""`trainer.algorithm` as SkyRL has it: the fields that the local trainer knows, with SkyRL's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Reduction = Literal["token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"]
PolicyLoss = Literal["regular", "dual_clip"]
Estimator = Literal["k1", "k2", "k3", "abs"]


class BadAlgorithm(ValueError):
    """A setting that no loss can be made of; names the field, the value and what there is."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How to get each paper: DeepSeekMath's GRPO (2402.03300) is `sequence_mean` with `grpo_norm_by_std` and `use_kl_loss`; Dr.
    GRPO (2503.20783) has no `grpo_norm_by_std` and `seq_mean_token_sum_norm` with `max_seq_len` the generation's budget; DAPO
    (2503.14476) is `token_mean`, `eps_clip_high` 0.28, `zero_variance_filter`, no `use_kl_loss`. `temperature` divides the
    logits before their softmax; it is the one that was sampled at. Raises BadAlgorithm."""

    advantage_estimator: Literal["grpo"] = "grpo"
    grpo_norm_by_std: bool = True
    loss_reduction: Reduction = "token_mean"
    max_seq_len: int | None = None
    policy_loss_type: PolicyLoss = "regular"
    eps_clip_low: float = 0.2
    eps_clip_high: float = 0.2
    clip_ratio_c: float = 3.0
    use_kl_loss: bool = True
    kl_loss_coef: float = 0.001
    kl_estimator_type: Estimator = "k3"
    use_entropy_loss: bool = False
    entropy_loss_coef: float = 0.01
    zero_variance_filter: bool = False
    zero_variance_filter_tol: float = 1e-6
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise BadAlgorithm(f"trainer.algorithm.{name} is {value!r}: one of {', '.join(allowed)}")
        if self.loss_reduction == "seq_mean_token_sum_norm" and not self.max_seq_len:
            raise BadAlgorithm("trainer.algorithm.max_seq_len has to be set for loss_reduction seq_mean_token_sum_norm")
        if not 0 <= self.eps_clip_low < 1 or self.eps_clip_high < 0:
            raise BadAlgorithm(
                f"trainer.algorithm.eps_clip_low is {self.eps_clip_low}, eps_clip_high {self.eps_clip_high}: "
                "the lower from 0 to less than 1, the higher from 0"
            )
        if self.temperature <= 0:
            raise BadAlgorithm(f"trainer.algorithm.temperature is {self.temperature}: it has to be above 0")


CHOICES: dict[str, tuple[str, ...]] = {
    "advantage_estimator": ("grpo",),
    "loss_reduction": get_args(Reduction),
    "policy_loss_type": get_args(PolicyLoss),
    "kl_estimator_type": get_args(Estimator),
}
