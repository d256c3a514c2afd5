"""How a batch is cut and what each token weighs."""

from __future__ import annotations

import pytest
import torch

from training.grpo import Algorithm, group_advantages, reduced
from training.learner.plan import credit, cut, is_live, mini_batches, shares

GROUPS = ["a", "a", "b", "b", "c", "c"]
REWARDS = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
MASK = torch.tensor([[1.0, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]])
LENGTHS = [5, 9, 7, 3, 8, 8]
WITHOUT_KL = Algorithm(use_kl_loss=False)


def test_a_mini_batch_is_whole_groups_in_the_order_in_which_they_appear():
    assert mini_batches(["x", "y", "x", "z"], prompts=2) == [[0, 2, 1], [3]]


@pytest.mark.parametrize(
    "reduction", ["token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"]
)
def test_weights_are_advantages_reduced_over_each_mini_batch(reduction):
    algorithm = Algorithm(loss_reduction=reduction, max_seq_len=8)
    minis = [[0, 1, 2, 3], [4, 5]]
    found = credit(REWARDS, GROUPS, MASK, minis, algorithm, micro_batch_size=2)
    advantages = group_advantages(torch.tensor(REWARDS).unsqueeze(-1), MASK, GROUPS)
    spans = [[(0, 2), (2, 4)], [(0, 2)]]
    for rows, prompts in zip(minis, spans, strict=True):
        expected = reduced(advantages[rows], MASK[rows], algorithm, micro_batch_size=2, prompts=prompts)
        torch.testing.assert_close(found.weights_bt[rows], expected)


def test_what_the_filter_leaves_out_leaves_the_denominators_too():
    filtering = Algorithm(zero_variance_filter=True, use_kl_loss=False)
    found = credit(REWARDS, GROUPS, MASK, [[0, 1, 2, 3]], filtering)
    assert found.filtered == 1
    assert not found.mask_bt[2:4].any()
    alone = credit(REWARDS[:2], GROUPS[:2], MASK[:2], [[0, 1]], filtering)
    torch.testing.assert_close(found.weights_bt[:2], alone.weights_bt)


def test_answers_without_an_advantage_are_computed_only_where_kl_or_entropy_want_them():
    found = credit(REWARDS, GROUPS, MASK, [[0, 1, 2, 3, 4, 5]], WITHOUT_KL)
    assert is_live(found, WITHOUT_KL) == [True, True, False, False, True, True]
    assert all(is_live(found, Algorithm(use_kl_loss=True)))
    assert all(is_live(found, Algorithm(use_kl_loss=False, use_entropy_loss=True)))


def test_a_process_gets_whole_groups_and_about_as_much_as_the_others():
    assert shares(range(6), GROUPS, LENGTHS, 2) == [[4, 5], [0, 1, 2, 3]]


def test_every_process_has_as_many_micro_batches_and_all_rows_are_computed_once():
    minis = mini_batches(GROUPS, 3)
    plans = [cut(minis, [True] * 6, GROUPS, LENGTHS, 1, rank, 2) for rank in range(2)]
    assert [len(plan[0].micro_batches) for plan in plans] == [4, 4]
    computed = [row for plan in plans for micro in plan[0].micro_batches for row in micro]
    assert sorted(computed) == list(range(6))


def test_micro_batches_hold_rows_alike_in_length():
    (mini,) = cut([list(range(6))], [True] * 6, GROUPS, LENGTHS, 2)
    assert mini.micro_batches == ((1, 4), (5, 2), (0, 3))


def test_a_mini_batch_without_anything_to_learn_from_has_no_micro_batches():
    (mini,) = cut([[2, 3]], [False] * 6, GROUPS, LENGTHS, 2)
    assert mini.rows == (2, 3)
    assert mini.micro_batches == ()
