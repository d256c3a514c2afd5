"""The learning rate: transformers' own schedules, which SkyRL takes."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from training.learner.rate import planned_steps, rate
from training.runs.resuming import OtherSpec, check_may_resume
from training.spec import TrainSpec
from training.spec.sections import Optimizer

PLANNED = 24


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize("scheduler", ["constant_with_warmup", "linear", "cosine"])
def test_rates_are_those_of_transformers_schedules(scheduler, warmup):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    theirs = get_scheduler(scheduler, optimizer, num_warmup_steps=warmup, num_training_steps=PLANNED)
    optimizing = Optimizer(lr=1e-3, num_warmup_steps=warmup, scheduler=scheduler)
    for place in range(PLANNED):
        assert rate(optimizing, place, place, PLANNED) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_a_run_plans_an_optimizer_step_for_each_mini_batch():
    values = {
        "trainer": {"epochs": 3, "train_batch_size": 8, "policy_mini_batch_size": 4, "update_epochs_per_batch": 2},
        "loramux": {"training_mazes": {"count": 20}},
    }
    assert planned_steps(TrainSpec.from_values(values)) == 3 * 2 * 2 * 2
    assert planned_steps(TrainSpec.from_values(values, ["trainer.max_training_steps=5"])) == 5 * 2 * 2


def test_a_run_whose_rate_falls_goes_on_only_to_the_same_end():
    key = "trainer.policy.optimizer_config.scheduler"
    check_may_resume({key: "constant_with_warmup", "trainer.epochs": 1}, {key: "constant_with_warmup", "trainer.epochs": 2}, "it")
    with pytest.raises(OtherSpec, match=r"trainer\.epochs was 1, is 2"):
        check_may_resume({key: "linear", "trainer.epochs": 1}, {key: "linear", "trainer.epochs": 2}, "it")
