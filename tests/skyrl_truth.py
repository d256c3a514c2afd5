"""What SkyRL's own functions make of the cases, into a file of tensors: a process of its own, with SkyRL on its path."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests import grpo_cases
from tests.skyrl_apart import as_on_python_312


def main(out: Path) -> None:
    as_on_python_312()
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.train.config import AlgorithmConfig
    from skyrl.train.utils.trainer_utils import zero_variance_filter

    truth: dict[str, Any] = {}
    for seed in grpo_cases.SEEDS:
        case = grpo_cases.case(seed)
        for by_std in (True, False):
            truth[f"advantages-{seed}-{by_std}"] = ppo_utils.compute_grpo_outcome_advantage(
                case.rewards.clone(), case.mask, np.array(case.groups), grpo_norm_by_std=by_std
            )[0]
        for number, setting in enumerate(grpo_cases.SETTINGS):
            config = AlgorithmConfig(**setting)
            longest = setting.get("max_seq_len", 0)
            advantages = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
                truth[f"advantages-{seed}-True"], case.mask, config.loss_reduction, 2, longest, grpo_cases.PROMPTS
            )
            logprobs = case.logprobs.clone().requires_grad_()
            loss, metrics = ppo_utils.ppo_policy_loss(logprobs, case.old_logprobs, advantages, config, case.mask)
            loss.backward()
            truth[f"loss-{seed}-{number}"] = (loss.detach(), logprobs.grad, metrics["clip_ratio"])
        for estimator in grpo_cases.ESTIMATORS:
            logprobs = case.logprobs.clone().requires_grad_()
            kl = ppo_utils.compute_approx_kl(logprobs, case.reference, case.mask, estimator)
            kl.sum().backward()
            truth[f"kl-{seed}-{estimator}"] = (kl.detach(), logprobs.grad)
        rewards = [round(float(reward)) for reward in case.rewards.sum(-1)]
        truth[f"kept-{seed}"] = zero_variance_filter(rewards, case.groups, case.mask.int().tolist())
    torch.save(truth, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
