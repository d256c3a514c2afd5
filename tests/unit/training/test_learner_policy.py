"""Rows, pictures and log-probs against the model's own way of doing it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, Qwen3Config, Qwen3ForCausalLM, Qwen3VLForConditionalGeneration, Qwen3VLModel

from tests.unit.training.learner_data import MAZES, make_base, play, spec_of
from training.learner import BadPolicy, BadTrajectory
from training.learner.pictures import looks
from training.learner.policy import Policy, Precision, load_policy
from training.learner.rows import MicroBatch, micro_batch, row_of
from training.maze.rendering import picture
from training.spec import Lora

CPU = torch.device("cpu")
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("learner") / "base")


@pytest.fixture(scope="module")
def loaded(base: Path) -> tuple[Policy, Any]:
    return load_policy(base, spec_of(base).trainer.policy.model.lora, Precision(), CPU, seed=1)


@pytest.fixture(scope="module")
def own(base: Path) -> Any:
    """The model as transformers has it, with its own tower."""
    return Qwen3VLForConditionalGeneration.from_pretrained(base, dtype=torch.float32).eval()


def collated(loaded: tuple[Policy, Any], played: list[Any]) -> MicroBatch:
    policy, eye = loaded
    rows = [row_of(trajectory, policy.image_token_id, eye.grid) for trajectory in played]
    return micro_batch(rows, range(len(rows)), 0)


def test_an_image_token_becomes_as_many_as_the_tower_sees(base, loaded):
    policy, eye = loaded
    (trajectory,) = play(base, 1, 1)
    row = row_of(trajectory, policy.image_token_id, eye.grid)
    assert len(row) == len(trajectory.token_ids) + 80 * len(trajectory.pictured)
    assert (row.ids_l == policy.image_token_id).sum() == 81 * len(trajectory.pictured)


def test_sampled_tokens_keep_their_ids_and_log_probs_where_they_moved_to(base, loaded):
    policy, eye = loaded
    (trajectory,) = play(base, 1, 1)
    row = row_of(trajectory, policy.image_token_id, eye.grid)
    answer = trajectory.token_ids[trajectory.prompt_tokens :]
    sampled = [token for token, is_sampled in zip(answer, trajectory.loss_mask, strict=True) if is_sampled]
    assert row.ids_l[row.sampled_at].tolist() == sampled
    assert len(row.log_probs) == len(sampled)


@pytest.mark.parametrize("field", ["loss_mask", "log_probs", "pictured"])
def test_a_trajectory_whose_parts_do_not_fit_is_refused_by_name(base, loaded, field):
    (trajectory,) = play(base, 1, 1)
    short = replace(trajectory, **{field: getattr(trajectory, field)[:-1]})
    with pytest.raises(BadTrajectory, match=f"maze_seed=.*{field} has"):
        row_of(short, loaded[0].image_token_id, loaded[1].grid)


@pytest.mark.parametrize("merge", [1, 2])
def test_positions_are_the_models_own_also_in_a_padded_batch(base, loaded, own, monkeypatch, merge):
    monkeypatch.setattr(own.model.config.vision_config, "spatial_merge_size", merge)
    image = loaded[0].image_token_id
    rows = [row_of(played, image, lambda _: (1, 2, 3)) for played in play(base, 2, 2)]
    micro = micro_batch(rows, range(len(rows)), 0)
    attended = torch.stack([torch.arange(micro.input_ids_bl.shape[1]) < len(row) for row in rows]).int()
    grids = torch.tensor([(1, 2 * merge, 3 * merge)] * len(micro.pictured))
    kinds = (micro.input_ids_bl == image).int()
    expected, _ = own.model.get_rope_index(micro.input_ids_bl, kinds, image_grid_thw=grids, attention_mask=attended)
    assert torch.equal(micro.positions_3bl, expected)


def test_what_is_seen_at_once_is_what_the_tower_sees_in_each_picture(base, loaded, own):
    states = list(dict.fromkeys(looks(state) for played in play(base, 3, 2) for state in played.pictured))
    seen = loaded[1].see(states)
    processor = AutoImageProcessor.from_pretrained(base)
    for state in states:
        out = processor(images=[picture(state)], return_tensors="pt")
        with torch.no_grad():
            expected = own.model.visual(out["pixel_values"], grid_thw=out["image_grid_thw"])
        torch.testing.assert_close(seen[state].embeds_nh, expected.pooler_output, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(seen[state].deepstack_dnh, torch.stack(expected.deepstack_features), atol=1e-5, rtol=1e-5)


def test_pictures_of_two_sizes_are_seen_in_one_call(base, loaded):
    small, large = play(base, 1, 1), play(base, 1, 1, mazes=replace(MAZES, size=11))
    seen = loaded[1].see([*small[0].pictured, *large[0].pictured])
    assert {one.embeds_nh.shape[0] for one in seen.values()} == {81, 121}


def test_a_tower_that_attends_at_once_still_takes_pictures_of_several_sizes(base, loaded, own):
    states = [play(base, 1, 1, mazes=replace(MAZES, size=size))[0].pictured[0] for size in (9, 11)]
    out = AutoImageProcessor.from_pretrained(base)(images=[picture(state) for state in states], return_tensors="pt")
    with torch.no_grad():
        found, expected = (
            tower(out["pixel_values"], grid_thw=out["image_grid_thw"]) for tower in (loaded[1].tower, own.model.visual)
        )
    torch.testing.assert_close(found.pooler_output, expected.pooler_output)


def test_states_that_look_alike_have_the_same_picture_and_are_seen_once(base, loaded):
    states = [state for played in play(base, 2, 4, seed=3) for state in played.pictured]
    pictures: dict[Any, bytes] = {}
    for state in states:
        assert pictures.setdefault(looks(state), picture(state).tobytes()) == picture(state).tobytes()
    assert len(pictures) == len(set(pictures.values())) == len(loaded[1].see(states)) < len(states)


def test_log_probs_and_entropy_are_the_whole_models_over_all_tokens_but_those_of_pictures(base, loaded, own):
    policy, eye = loaded
    played = play(base, 2, 2)
    micro = collated(loaded, played)
    with torch.no_grad():
        found, entropy = policy(micro, eye.see(micro.pictured), TEMPERATURE)
    processor = AutoImageProcessor.from_pretrained(base)
    for at, trajectory in enumerate(played):
        row = row_of(trajectory, policy.image_token_id, eye.grid)
        ids = row.ids_l.unsqueeze(0)
        images = processor(images=[picture(state) for state in trajectory.pictured], return_tensors="pt")
        kinds = (ids == policy.image_token_id).int()
        with torch.no_grad():
            logits = own(input_ids=ids, mm_token_type_ids=kinds, **images).logits[0] / TEMPERATURE
        logits[:, [own.config.image_token_id, own.config.video_token_id]] = -1e9
        before = row.sampled_at - 1
        expected = logits.log_softmax(-1)[before]
        targets = row.ids_l[row.sampled_at]
        taken = expected.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(found[at, : len(taken)], taken, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(entropy[at, : len(taken)], -(expected.exp() * expected).sum(-1), atol=2e-5, rtol=1e-5)
        assert not found[at, len(taken) :].any()


def test_the_reference_is_the_base_whatever_the_adapter_has_become(base):
    policy, eye = load_policy(base, spec_of(base).trainer.policy.model.lora, Precision(), CPU, seed=1)
    micro = collated((policy, eye), play(base, 1, 2))
    seen = eye.see(micro.pictured)
    with torch.no_grad():
        before, _ = policy(micro, seen, 1.0)
        for name, weight in policy.trained().items():
            weight.add_(0.05 if "lora_B" in name else 0)
        after, _ = policy(micro, seen, 1.0)
    with policy.as_reference():
        reference, _ = policy(micro, seen, 1.0)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(reference, before)


def test_only_language_modules_have_a_lora(loaded):
    assert loaded[0].trained()
    assert all(".language_model.layers." in name for name in loaded[0].trained())


def test_a_lora_on_the_tower_is_refused_with_what_keeps_it_out(base):
    with pytest.raises(BadPolicy, match=r"target_modules is 'all-linear'.*vision tower.*exclude_modules"):
        load_policy(base, Lora(rank=4), Precision(), CPU, seed=1)


def test_a_lora_on_nothing_is_refused(base):
    with pytest.raises(BadPolicy, match=r"target_modules is 'no_such_thing'"):
        load_policy(base, Lora(rank=4, target_modules="no_such_thing"), Precision(), CPU, seed=1)


def test_an_init_that_changes_the_base_is_refused(base):
    lora = spec_of(base, "trainer.policy.model.lora.init_method=pissa").trainer.policy.model.lora
    with pytest.raises(BadPolicy, match=r"init_method is 'pissa': one that keeps the base"):
        load_policy(base, lora, Precision(), CPU, seed=1)


def test_a_base_of_text_is_a_policy_without_an_eye(base, tmp_path):
    config = Qwen3Config(
        vocab_size=2560, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    policy, eye = load_policy(tmp_path, Lora(rank=2), Precision(), CPU, seed=1)
    assert eye is None
    played = play(base, 1, 2, mazes=replace(MAZES, observation="text"))
    rows = [row_of(trajectory, policy.image_token_id, lambda _: (1, 1, 1)) for trajectory in played]
    micro = micro_batch(rows, [0, 1], 0)
    log_probs, _ = policy(micro, {}, 1.0)
    assert (log_probs < 0).sum() == micro.mask_bt.sum()


def test_a_micro_batch_of_nothing_gives_gradients_of_zero(base, loaded):
    policy, _ = loaded
    log_probs, _ = policy(micro_batch([], [], 0), {}, 1.0)
    log_probs.sum().backward()
    assert not any(weight.grad is not None and weight.grad.any() for weight in policy.trained().values())
    policy.zero_grad()


@pytest.mark.parametrize(
    ("dtype", "device", "bf16", "expected"),
    [
        ("auto", "cpu", True, Precision()),
        ("auto", "cuda", True, Precision(torch.bfloat16, autocast=True)),
        ("auto", "cuda", False, Precision()),
        ("bfloat16", "cpu", True, Precision(torch.bfloat16, autocast=True)),
        ("float32", "cuda", True, Precision()),
    ],
)
def test_gpus_compute_in_bfloat16_where_the_spec_has_it(dtype, device, bf16, expected):
    assert Precision.of(dtype, device, bf16) == expected


def test_a_transformers_that_would_leave_the_policy_blind_is_refused(base, monkeypatch):
    monkeypatch.setattr(Qwen3VLModel, "forward", lambda self, input_ids, **others: None)
    with pytest.raises(BadPolicy, match="takes no features of a tower"):
        load_policy(base, spec_of(base).trainer.policy.model.lora, Precision(), CPU, seed=1)
