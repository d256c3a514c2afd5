"""Advantages, reductions, clip and KL against SkyRL's own functions, from its wheel: values and gradients within 1e-6."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import grpo_cases
from tests.skyrl_apart import run_with_skyrl
from training.grpo import Algorithm, approx_kl, group_advantages, policy_loss, reduced, zero_variance_filter

NEAR = {"rtol": 0.0, "atol": 1e-6}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("skyrl") / "truth.pt"
    run_with_skyrl("tests.skyrl_truth", str(out))
    return torch.load(out)


@pytest.mark.parametrize("seed", grpo_cases.SEEDS)
@pytest.mark.parametrize("by_std", [True, False])
def test_advantages_are_skyrls(truth: dict[str, Any], seed: int, by_std: bool):
    case = grpo_cases.case(seed)
    ours = group_advantages(case.rewards, case.mask, case.groups, norm_by_std=by_std)
    torch.testing.assert_close(ours, truth[f"advantages-{seed}-{by_std}"], **NEAR)


@pytest.mark.parametrize("seed", grpo_cases.SEEDS)
@pytest.mark.parametrize("number", range(len(grpo_cases.SETTINGS)))
def test_losses_and_their_gradients_are_skyrls(truth: dict[str, Any], seed: int, number: int):
    case, algorithm = grpo_cases.case(seed), Algorithm(**grpo_cases.SETTINGS[number])
    advantages = group_advantages(case.rewards, case.mask, case.groups)
    advantages = reduced(advantages, case.mask, algorithm, micro_batch_size=2, prompts=grpo_cases.PROMPTS)
    logprobs = case.logprobs.clone().requires_grad_()
    loss, held = policy_loss(logprobs, case.old_logprobs, advantages, case.mask, algorithm)
    loss.backward()
    theirs, gradient, clip_ratio = truth[f"loss-{seed}-{number}"]
    torch.testing.assert_close(loss.detach(), theirs, **NEAR)
    torch.testing.assert_close(logprobs.grad, gradient, **NEAR)
    assert float(held) == pytest.approx(clip_ratio, abs=1e-6)


@pytest.mark.parametrize("seed", grpo_cases.SEEDS)
@pytest.mark.parametrize("estimator", grpo_cases.ESTIMATORS)
def test_kl_and_its_gradient_are_skyrls(truth: dict[str, Any], seed: int, estimator):
    case = grpo_cases.case(seed)
    logprobs = case.logprobs.clone().requires_grad_()
    kl = approx_kl(logprobs, case.reference, case.mask, estimator)
    kl.sum().backward()
    theirs, gradient = truth[f"kl-{seed}-{estimator}"]
    torch.testing.assert_close(kl.detach(), theirs, **NEAR)
    torch.testing.assert_close(logprobs.grad, gradient, **NEAR)


@pytest.mark.parametrize("seed", grpo_cases.SEEDS)
def test_the_same_groups_teach_nothing(truth: dict[str, Any], seed: int):
    case = grpo_cases.case(seed)
    rewards = [round(float(reward)) for reward in case.rewards.sum(-1)]
    assert zero_variance_filter(rewards, case.groups, (case.mask.sum(-1) > 0).tolist()) == truth[f"kept-{seed}"]
