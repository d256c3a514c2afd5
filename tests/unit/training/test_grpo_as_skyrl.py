"""Advantages, reductions, clip and KL against SkyRL's own functions, from its wheel: values and gradients within 1e-6."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import grpo_cases
from tests.repo.checkout import ROOT
from training.grpo import Algorithm, approx_kl, group_advantages, policy_loss, reduced, zero_variance_filter

LOCK = ROOT / "training" / "skyrl-0.3.0.lock"
HERE = ROOT / ".loramux" / "tests" / "skyrl-0.3.0"
NEAR = {"rtol": 0.0, "atol": 1e-6}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("skyrl") / "truth.pt"
    environment = os.environ | {"PYTHONPATH": str(installed())}
    command = [sys.executable, "-m", "tests.skyrl_truth", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(out)


def installed() -> Path:
    """SkyRL without its dependencies, once for each lock file."""
    HERE.parent.mkdir(parents=True, exist_ok=True)
    whole = HERE / "whole"
    with (HERE.parent / "skyrl.making").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not whole.exists() or whole.read_text() != LOCK.read_text():
            shutil.rmtree(HERE, ignore_errors=True)
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(HERE), "-r", str(LOCK)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            whole.write_text(LOCK.read_text())
    return HERE


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
