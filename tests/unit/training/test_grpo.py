"""Advantages and losses by the papers' formulas, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from training.grpo import (
    Algorithm,
    BadAlgorithm,
    approx_kl,
    group_advantages,
    policy_loss,
    reduced,
    total_loss,
    zero_variance_filter,
)


def advantages_of(rewards: list[float], groups: list[int] | None = None, norm_by_std: bool = True) -> list[float]:
    column = torch.tensor(rewards, dtype=torch.float64).unsqueeze(-1)
    found = group_advantages(column, torch.ones_like(column), groups or [0] * len(rewards), norm_by_std=norm_by_std)
    return found.squeeze(-1).tolist()


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 0], [1.499997, -0.499999, -0.499999, -0.499999]),
        ([1, 1, 0, 0, 0, 0, 0, 0], [1.620182] * 2 + [-0.540061] * 6),
        ([0.8, 0.2, 0, 1], [0.630125, -0.630125, -1.050208, 1.050208]),
        ([1, 1, 1], [0, 0, 0]),
        ([0.7], [0.699999]),
    ],
)
def test_an_advantage_is_the_reward_less_its_groups_mean_over_the_samples_deviation(rewards, expected):
    assert advantages_of(rewards) == pytest.approx(expected, abs=1e-5)


def test_without_the_deviation_it_is_dr_grpos():
    assert advantages_of([1, 0, 0, 0], norm_by_std=False) == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_groups_know_nothing_of_each_other():
    assert advantages_of([1, 0, 5, 5], [0, 0, 1, 1]) == pytest.approx([*advantages_of([1, 0]), 0, 0])


def test_an_advantage_lies_on_every_token_of_the_answer_and_on_no_other():
    mask = torch.tensor([[0.0, 1, 1], [1, 1, 0]])
    rewards = torch.tensor([[0.0, 0, 1], [0, 0, 0]])
    assert (group_advantages(rewards, mask, [0, 0]) != 0).tolist() == mask.bool().tolist()


@pytest.mark.parametrize(
    ("setting", "micro", "prompts", "expected"),
    [
        ({"loss_reduction": "token_mean"}, 1, None, 1 / 3),
        ({"loss_reduction": "sequence_mean"}, 1, None, 0.0),
        ({"loss_reduction": "seq_mean_token_sum_norm", "max_seq_len": 8}, 1, None, 0.125),
        ({"loss_reduction": "token_mean_legacy"}, 1, None, 0.0),
        ({"loss_reduction": "token_mean_legacy"}, 2, None, 1 / 3),
        ({"loss_reduction": "prompt_mean"}, 1, [(0, 1), (1, 2)], 0.0),
    ],
)
def test_reductions_weigh_a_short_good_and_a_long_bad_answer(setting, micro, prompts, expected):
    """Two tokens of advantage +1, four of -1, nothing moved yet."""
    mask = torch.tensor([[0.0, 0, 1, 1], [1, 1, 1, 1]])
    advantages = torch.tensor([[1.0], [-1.0]]) * mask
    algorithm = Algorithm(**setting)
    weighted = reduced(advantages, mask, algorithm, micro_batch_size=micro, prompts=prompts)
    still = torch.zeros_like(mask)
    assert policy_loss(still, still, weighted, mask, algorithm)[0].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("ratio", "advantage", "expected"), [(1.5, 1.0, -1.2), (0.5, -1.0, 0.8), (1.5, -1.0, 1.5)])
def test_the_clip_holds_what_would_gain_and_not_what_would_lose(ratio, advantage, expected):
    now, mask = torch.tensor([[ratio]]).log(), torch.ones(1, 1)
    loss, _ = policy_loss(now, torch.zeros(1, 1), torch.tensor([[advantage]]), mask, Algorithm())
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_dual_clip_bounds_what_a_bad_answer_may_cost():
    now, mask = torch.tensor([[5.0]]).log(), torch.ones(1, 1)
    bad = torch.tensor([[-1.0]])
    assert policy_loss(now, torch.zeros(1, 1), bad, mask, Algorithm())[0].item() == pytest.approx(5)
    assert policy_loss(now, torch.zeros(1, 1), bad, mask, Algorithm(policy_loss_type="dual_clip"))[0].item() == pytest.approx(3)


def test_k3_is_never_negative_and_nothing_where_nothing_differs():
    one, other = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]])
    assert approx_kl(one, other, torch.ones(1, 2))[0].tolist() == pytest.approx([0.106531, 0], abs=1e-6)


def test_what_the_mask_leaves_out_counts_for_nothing_even_if_it_is_no_number():
    mask, hole = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, float("nan")]])
    loss, held = policy_loss(hole, torch.zeros(1, 2), torch.ones(1, 2), mask, Algorithm())
    kl = approx_kl(hole, torch.zeros(1, 2), mask)
    assert torch.isfinite(total_loss(loss, kl, None, mask, 1.0, Algorithm())) and torch.isfinite(held)


def test_micro_batches_add_up_to_the_mini_batch():
    """However a mini-batch is cut, and KL with it: the sum of the parts' gradients is the whole's."""
    torch.manual_seed(0)
    mask = (torch.rand(4, 6) < 0.7).double()
    advantages, old, reference = torch.randn(4, 6).double() * mask, -torch.rand(4, 6).double(), -torch.rand(4, 6).double()
    algorithm = Algorithm(kl_loss_coef=0.1)
    weighted = reduced(advantages, mask, algorithm)

    def gradient(size: int) -> torch.Tensor:
        now = (old + 0.1).requires_grad_()
        for begin in range(0, 4, size):
            part = slice(begin, begin + size)
            loss, _ = policy_loss(now[part], old[part], weighted[part], mask[part], algorithm)
            kl = approx_kl(now[part], reference[part], mask[part])
            total_loss(loss, kl, None, mask[part], size / 4, algorithm).backward()
        assert now.grad is not None
        return now.grad

    for size in (1, 2):
        torch.testing.assert_close(gradient(size), gradient(4))


def test_a_group_whose_rewards_are_equal_is_left_out_unless_one_alone_is_live():
    rewards, groups = [1.0, 1.0, 0.0, 1.0, 2.0], ["a", "a", "b", "b", "c"]
    assert zero_variance_filter(rewards, groups) == [2, 3, 4]
    assert zero_variance_filter(rewards, groups, [True, False, True, True, True]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"loss_reduction": "mean"}, "loss_reduction is 'mean': one of token_mean"),
        ({"loss_reduction": "seq_mean_token_sum_norm"}, "max_seq_len has to be set"),
        ({"eps_clip_low": 1.0}, "eps_clip_low is 1.0"),
        ({"temperature": 0}, "temperature is 0"),
    ],
)
def test_settings_that_no_loss_can_be_made_of_are_refused(setting, said):
    with pytest.raises(BadAlgorithm, match=said):
        Algorithm(**setting)
