"""One GRPO step of the learner, and what it keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from adapters.contract import prepare
from adapters.types import BaseContract, ModuleShape
from tests.unit.training.learner_data import make_base, play, spec_of
from training.learner import BadState, Learner, StaleData
from training.trajectory import Trajectory

# Adam divides by what it multiplies: a gradient near nothing comes out as large as any, and its rounding with it.
CLOSE = {"atol": 1e-5, "rtol": 0.0}
SLOW = "trainer.policy.optimizer_config.lr=1.0e-4"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("learner") / "base")


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in learner.weights.items()}


def trained(base: Path, *overrides: str, steps: int = 1) -> Learner:
    learner = Learner(spec_of(base, *overrides))
    for step in range(1, steps + 1):
        learner.update(play(base, policy_step=step - 1, seed=step), step=step)
    return learner


def assert_same(one: Learner, other: Learner) -> None:
    for name, weight in weights(one).items():
        torch.testing.assert_close(weight, weights(other)[name], **CLOSE)


def advantage_of_rewarded(learner: Learner, played: list[Trajectory]) -> float:
    """How much likelier answers with a reward are than those without, in nats a token."""
    batch = learner._batch(played)
    seen = learner._seen(batch)
    rewards = {index: row.reward for index, row in enumerate(batch.rows)}
    apart = {0.0: [], 1.0: []}
    for works in batch.works:
        for work in works:
            with torch.no_grad():
                log_probs, _ = learner.policy(work.micro, seen, 1.0)
            for at, row in enumerate(work.micro.rows):
                apart[rewards[row]].append((log_probs[at].sum() / work.mask_bt[at].sum()).item())
    return sum(apart[1.0]) / len(apart[1.0]) - sum(apart[0.0]) / len(apart[0.0])


def test_steps_make_rewarded_answers_likelier_than_others(base):
    learner, played = Learner(spec_of(base, "trainer.policy.optimizer_config.lr=0.01")), play(base)
    before = advantage_of_rewarded(learner, played)
    for step in range(1, 4):
        learner.update([replace(one, policy_step=step - 1) for one in played], step=step)
    assert advantage_of_rewarded(learner, played) > before + 0.01


def test_trajectories_of_another_policy_are_refused_and_change_nothing(base):
    learner = Learner(spec_of(base))
    before = weights(learner)
    with pytest.raises(StaleData, match="sampled by the policy of step 3: not of step 0"):
        learner.update([*play(base, 1), *play(base, 1, policy_step=3)], step=1)
    assert learner.policy_step == 0
    assert all(torch.equal(weight, before[name]) for name, weight in weights(learner).items())


@pytest.mark.parametrize("step", [0, 2])
def test_only_the_next_step_can_be_made(base, step):
    with pytest.raises(StaleData, match=f"step is {step}: the learner holds the policy of step 0"):
        Learner(spec_of(base)).update(play(base, 1), step=step)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_how_a_mini_batch_is_cut_into_micro_batches_changes_nothing(base, reduction):
    settings = (f"trainer.algorithm.loss_reduction={reduction}", "trainer.algorithm.use_kl_loss=true", SLOW)
    whole = trained(base, *settings, "trainer.micro_train_batch_size_per_gpu=6", steps=2)
    apart = trained(base, *settings, "trainer.micro_train_batch_size_per_gpu=1", steps=2)
    assert_same(whole, apart)


def test_gradient_checkpointing_changes_nothing(base):
    assert_same(trained(base, SLOW), trained(base, SLOW, "trainer.gradient_checkpointing=true"))


def test_leaving_out_answers_without_an_advantage_changes_nothing(base):
    """With a KL of no weight all rows are computed, without KL only those that can move the policy."""
    played = [replace(one, reward=1.0 if one.task.maze_seed % 2 else one.reward) for one in play(base)]
    some, every = (
        Learner(spec_of(base)),
        Learner(spec_of(base, "trainer.algorithm.use_kl_loss=true", "trainer.algorithm.kl_loss_coef=0.0")),
    )
    assert some.update(played, step=1)["policy/trained_rows"] < every.update(played, step=1)["policy/trained_rows"]
    assert_same(some, every)


def test_groups_without_spread_are_filtered_and_counted(base):
    played = [replace(one, reward=1.0 if one.task.maze_seed % 2 else one.reward) for one in play(base)]
    metrics = Learner(spec_of(base, "trainer.algorithm.zero_variance_filter=true")).update(played, step=1)
    assert metrics["reward/num_zero_variance_filtered"] == 2


def test_a_batch_with_nothing_to_learn_from_makes_no_optimizer_step(base):
    learner = Learner(spec_of(base, "trainer.algorithm.zero_variance_filter=true"))
    before = weights(learner)
    metrics = learner.update([replace(one, reward=1.0) for one in play(base)], step=1)
    assert metrics["policy/optimizer_steps"] == 0
    assert learner.policy_step == 1
    assert all(torch.equal(weight, before[name]) for name, weight in weights(learner).items())


def test_with_one_optimizer_step_old_log_probs_are_the_passes_own_and_nothing_is_clipped(base, monkeypatch):
    learner = Learner(spec_of(base, "trainer.policy_mini_batch_size=4", "trainer.micro_train_batch_size_per_gpu=8"))
    passes = []
    learner.policy.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    assert learner.update(play(base), step=1)["policy/loss_metrics/clip_ratio"] == 0
    assert passes == [True]


def test_old_log_probs_are_of_the_policy_that_sampled_also_after_the_first_mini_batch(base):
    """So the first epoch's second mini-batch has ratios other than 1 already."""
    rate = "trainer.policy.optimizer_config.lr=0.05"
    metrics = Learner(spec_of(base, rate)).update(play(base), step=1)
    assert metrics["policy/optimizer_steps"] == 2
    assert metrics["policy/loss_metrics/clip_ratio"] > 0


def test_drift_is_measured_against_the_samplers_log_probs_before_the_first_step(base):
    learner, played = (
        Learner(spec_of(base, "trainer.policy.optimizer_config.lr=0.05", "trainer.algorithm.use_kl_loss=true")),
        play(base),
    )
    batch = learner._batch(played)
    seen = learner._seen(batch)
    own = {}
    for works in batch.works:
        for work in works:
            with torch.no_grad():
                log_probs, _ = learner.policy(work.micro, seen, 1.0)
            own |= {row: log_probs[at].tolist() for at, row in enumerate(work.micro.rows)}
    exact = []
    for index, one in enumerate(played):
        sampled = iter(own[index])
        exact.append(replace(one, log_probs=tuple(next(sampled) if is_sampled else 0.0 for is_sampled in one.loss_mask)))
    metrics = learner.update(exact, step=1)
    assert metrics["policy/rollout_train_logprobs_abs_diff_max"] < 1e-5
    assert metrics["policy/rollout_train_kl_k3"] < 1e-9


def test_a_gradient_that_is_no_number_makes_no_step(base):
    learner = Learner(spec_of(base))
    before = weights(learner)
    first = next(iter(learner.weights.values()))
    first.register_hook(lambda gradient: gradient * float("nan"))
    metrics = learner.update(play(base), step=1)
    assert metrics["policy/skipped_steps"] == 2
    assert all(torch.equal(weight, before[name]) for name, weight in weights(learner).items())


def test_the_rate_rises_over_the_warm_up_steps(base):
    learner = Learner(spec_of(base, "trainer.policy.optimizer_config.num_warmup_steps=4"))
    rates = [learner.update(play(base, policy_step=step - 1), step=step)["policy/policy_lr"] for step in (1, 2, 3)]
    assert rates == pytest.approx([0.25e-3, 0.75e-3, 1e-3])


def test_the_start_of_a_lora_depends_on_the_seed_alone(base):
    one, same, other = (weights(Learner(spec_of(base, f"trainer.seed={seed}"))) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_a_saved_adapter_is_pefts_and_names_no_path_of_this_machine(base, tmp_path):
    learner = trained(base)
    learner.save_adapter(tmp_path / "policy")
    assert sorted(file.name for file in (tmp_path / "policy").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((tmp_path / "policy" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, base.name)
    assert config["target_modules"] == sorted(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    tensors = load_file(tmp_path / "policy" / "adapter_model.safetensors")
    assert {values.dtype for values in tensors.values()} == {torch.float32}
    assert sum(values.numel() for values in tensors.values()) == sum(values.numel() for values in learner.weights.values())


def test_the_publish_contract_takes_a_saved_adapter_as_it_is(base, tmp_path):
    learner = trained(base)
    learner.save_adapter(tmp_path / "policy")
    linear = {
        name: layer
        for name, layer in AutoModelForImageTextToText.from_pretrained(base).named_modules()
        if isinstance(layer, torch.nn.Linear)
    }
    modules = {name: ModuleShape(layer.in_features, layer.out_features) for name, layer in linear.items()}
    contract = BaseContract("maze", "f" * 64, modules, max_rank=8, tower="model.language_model")
    found = prepare(tmp_path / "policy", contract, workdir=tmp_path / "prepared")
    assert (found.rank, len(found.modules)) == (4, 7)


def test_saving_again_replaces_the_adapter_and_leaves_nothing_beside_it(base, tmp_path):
    learner = trained(base)
    learner.save_adapter(tmp_path / "policy")
    before = (tmp_path / "policy" / "adapter_model.safetensors").read_bytes()
    learner.update(play(base, policy_step=1), step=2)
    learner.save_adapter(tmp_path / "policy")
    assert (tmp_path / "policy" / "adapter_model.safetensors").read_bytes() != before
    assert [file.name for file in tmp_path.iterdir()] == ["policy"]


def test_a_state_goes_on_as_the_learner_that_saved_it(base, tmp_path):
    with_dice = "trainer.policy.model.lora.dropout=0.1"
    learner = trained(base, with_dice)
    learner.save_state(tmp_path)
    learner.update(play(base, policy_step=1, seed=2), step=2)
    other = Learner(spec_of(base, with_dice, "trainer.seed=7"))
    other.load_state(tmp_path)
    other.update(play(base, policy_step=1, seed=2), step=2)
    assert all(torch.equal(weight, weights(other)[name]) for name, weight in weights(learner).items())


def test_a_state_of_another_lora_is_refused_by_the_weight_that_differs(base, tmp_path):
    trained(base).save_state(tmp_path)
    with pytest.raises(BadState, match=r"lora_A.* is \(4, 512\): the learner's is \(8, 512\)"):
        Learner(spec_of(base, "trainer.policy.model.lora.rank=8")).load_state(tmp_path)


def test_a_state_of_more_processes_is_not_found(base, tmp_path):
    (tmp_path / "learner_rank_0_of_2.pt").touch()
    with pytest.raises(BadState, match=r"learner_rank_0_of_1\.pt is not there"):
        Learner(spec_of(base)).load_state(tmp_path)
