"""What is played when: the order of mazes, dice, and how often to write checkpoints."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from tests.scripted_run import FIRST_SET, plan_in
from training.runs.events import CheckpointSaved, Line, StepEvent
from training.runs.interval import Costs, NothingMeasured, measured, suggestions
from training.runs.plan import BadPlan, DataOrder, evaluation_tasks, training_tasks
from training.trajectory import dice

ORDER = DataOrder(tuple(range(10)), train_batch_size=3, epochs=4, seed=5)


def seeds_of_epoch(order: DataOrder, epoch: int) -> list[int]:
    first = (epoch - 1) * order.steps_per_epoch + 1
    return [seed for step in range(first, first + order.steps_per_epoch) for seed in order.maze_seeds_at(step)]


def test_an_epoch_plays_no_maze_twice_and_leaves_out_what_fills_no_batch():
    assert ORDER.steps_per_epoch == 3 and ORDER.total_steps == 12
    assert len(set(seeds_of_epoch(ORDER, 1))) == 9


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [seeds_of_epoch(ORDER, 1), seeds_of_epoch(ORDER, 2), seeds_of_epoch(replace(ORDER, seed=6), 1)]
    assert len({tuple(order) for order in orders}) == 3


def test_an_epoch_ends_with_its_last_step():
    assert [step for step in range(1, 13) if ORDER.ends_epoch(step)] == [3, 6, 9, 12]
    assert [ORDER.epoch_of(step) for step in (1, 3, 4, 12)] == [1, 1, 2, 4]


@pytest.mark.parametrize("size", [0, 11])
def test_a_batch_larger_than_all_mazes_is_refused_with_the_limit(size):
    with pytest.raises(BadPlan, match=rf"trainer\.train_batch_size is {size}: from 1 to .*10"):
        replace(ORDER, train_batch_size=size)


def test_dice_are_the_same_in_every_process_and_differ_by_all_that_they_are_of():
    code = "from training.trajectory import dice; print(dice(1, 2, 3, 4))"
    elsewhere = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert int(elsewhere) == dice(1, 2, 3, 4)
    assert len({dice(1, 2, 3, 4), dice(12, 3, 4), dice(1, 23, 4), dice(1, 2, 3, 5)}) == 4


def test_a_groups_samples_share_a_maze_and_not_their_dice(tmp_path):
    tasks = training_tasks(ORDER, 1, 4)
    assert [task.maze_seed for task in tasks[:4]] == [tasks[0].maze_seed] * 4
    assert len({task.dice for task in tasks}) == 12


def test_evaluation_rolls_the_same_dice_at_every_step_of_every_run():
    assert evaluation_tasks(FIRST_SET) == evaluation_tasks(FIRST_SET)
    assert {task.size for task in evaluation_tasks(FIRST_SET)} == {9}


def test_nothing_is_evaluated_before_the_first_step_if_not_asked_for(tmp_path):
    evaluation = replace(plan_in(tmp_path).evaluation, before_train=False)
    assert evaluation.due(0, 6) == () and evaluation.due(2, 6) and not evaluation.due(3, 6)


def test_a_checkpoint_interval_is_a_third_of_the_time_to_failure_or_youngs_optimum():
    by_thirds, youngs = suggestions(Costs(step_s=10, write_s=2), failure_every_s=3600)
    assert (by_thirds.interval_s, by_thirds.ckpt_interval) == (1200, 120)
    assert (youngs.interval_s, youngs.ckpt_interval) == (120, 12)
    assert youngs.lost_share == pytest.approx(2 / 122 + 60 / 3600)
    assert youngs.lost_share < by_thirds.lost_share


def test_an_interval_is_never_below_a_step():
    assert suggestions(Costs(step_s=100, write_s=0.1), failure_every_s=10)[1].ckpt_interval == 1


def test_costs_are_means_over_what_a_run_told():
    step = StepEvent(1, 1, 0.5, 0.5, 1.0, 3.0, 4.0, 0.0, 4, 48, {"play": 3.0, "learn": 1.0})
    lines = [Line(0, step), Line(1, CheckpointSaved(1, "", 10, 0.5)), Line(2, CheckpointSaved(2, "", 10, 1.5))]
    assert measured(lines) == Costs(step_s=4.0, write_s=1.0)
    with pytest.raises(NothingMeasured, match="1 steps and 0 checkpoints"):
        measured(lines[:1])
