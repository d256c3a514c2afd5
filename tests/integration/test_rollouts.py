"""vLLM plays mazes: with the policy that it was told to use and no other, the same again in any process, and its log-probs are
those of the model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from training.base.untrained import make_untrained
from training.maze import picture
from training.rollouts import BadAdapter, Rollouts
from training.spec import TrainSpec
from training.trajectory import Sampling, Task, Trajectory

RANK, TURNS = 4, 3
TASKS = [Task(seed, sample, dice=10 * seed + sample) for seed in (5, 6) for sample in range(3)]
SAMPLING = Sampling(temperature=0.7, max_generate_length=4)
LANGUAGE = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_untrained(tmp_path_factory.mktemp("rollouts") / "base")


@pytest.fixture(scope="module")
def adapters(base) -> list[Path]:
    """Two that change a lot."""
    return [make_adapter(base, base.with_name(f"adapter-{seed}"), seed) for seed in range(2)]


def make_adapter(base: Path, out: Path, seed: int, rank: int = RANK) -> Path:
    torch.manual_seed(seed)
    lora = LoraConfig(r=rank, lora_alpha=8 * rank, target_modules=LANGUAGE, init_lora_weights=False)
    get_peft_model(Qwen3VLForConditionalGeneration.from_pretrained(base, dtype=torch.float32), lora).save_pretrained(str(out))
    return out


def start(base: Path) -> Rollouts:
    engine = {"model_dtype": "float32", "engine_init_kwargs": {"max_model_len": 1024, "kv_cache_memory_bytes": 1 << 27}}
    spec = TrainSpec.from_values(
        {
            "trainer": {"policy": {"model": {"path": str(base), "lora": {"rank": RANK}}}},
            "generator": {"max_turns": TURNS, "max_input_length": 1000, "inference_engine": engine},
            "loramux": {"device": "cpu", "threads": 1, "maze": {"cell_px": 16, "actions": "keyword", "max_turns": TURNS}},
        }
    )
    return Rollouts(spec)


@pytest.fixture(scope="module")
def rollouts(base):
    started = start(base)
    yield started
    started.close()


@pytest.fixture(scope="module")
def played(rollouts, adapters) -> dict[str, list[Trajectory]]:
    """What an engine that had other policies in between played with each: with the first adapter and the base twice."""
    found = {"base": rollouts.play(TASKS, SAMPLING)}
    for name, folder in (("first", adapters[0]), ("second", adapters[1]), ("first again", adapters[0])):
        rollouts.use_adapter(folder, 1)
        found[name] = rollouts.play(TASKS, SAMPLING)
    rollouts.use_base()
    return found | {"base again": rollouts.play(TASKS, SAMPLING)}


def test_another_adapter_answers_as_itself(played):
    sampled = [tuple(one.log_probs for one in played[name]) for name in ("base", "first", "second")]
    assert len(set(sampled)) == 3


def test_an_adapter_plays_the_same_again_whatever_played_in_between(played):
    assert played["first again"] == played["first"]


def test_the_base_plays_as_if_no_adapter_had_been_there(played):
    assert played["base again"] == played["base"]


def test_a_fresh_process_plays_the_same(base, adapters, played):
    fresh = start(base)
    try:
        fresh.use_adapter(adapters[0], 1)
        assert fresh.play(TASKS, SAMPLING) == played["first"]
    finally:
        fresh.close()


def test_samples_of_a_maze_differ_by_their_dice(played):
    assert len({one.token_ids for one in played["first"] if one.task.maze_seed == 5}) > 1


def test_one_dice_is_one_episode(rollouts, adapters):
    rollouts.use_adapter(adapters[0], 1)
    twins = rollouts.play([replace(TASKS[0], sample=sample) for sample in range(2)], SAMPLING)
    assert twins[0].token_ids == twins[1].token_ids


@pytest.mark.parametrize("policy", ["base", "first"])
def test_log_probs_are_those_of_the_model_at_the_sampling_temperature(base, adapters, played, policy):
    model: Any = Qwen3VLForConditionalGeneration.from_pretrained(base, dtype=torch.float32).eval()
    if policy != "base":
        model = PeftModel.from_pretrained(model, str(adapters[0])).eval()
    processor = AutoProcessor.from_pretrained(base)
    for one in played[policy]:
        sampled = torch.tensor(one.loss_mask).bool()
        expected = log_probs_of(model, processor, one)[-len(one.loss_mask) :][sampled]
        assert torch.allclose(torch.tensor(one.log_probs)[sampled], expected, atol=1e-4)


def log_probs_of(model: Any, processor: Any, one: Trajectory) -> torch.Tensor:
    """Of each token after the first, given those before it, at the sampling temperature, among those that are no pictures'."""
    image_token, video_token = processor.tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
    pictures = processor.image_processor(images=[picture(state) for state in one.pictured], return_tensors="pt")
    cells = pictures["image_grid_thw"][0].prod().item()
    ids = torch.tensor([[token for one_id in one.token_ids for token in [one_id] * (cells if one_id == image_token else 1)]])
    is_image = ids == image_token
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=is_image.long(), **pictures).logits[0, :-1] / SAMPLING.temperature
    logits[:, [image_token, video_token]] = float("-inf")
    found = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return found[keep_one_of_each_picture(is_image[0])[1:]]


def keep_one_of_each_picture(is_image: torch.Tensor) -> torch.Tensor:
    before = torch.cat([torch.tensor([False]), is_image[:-1]])
    return ~(is_image & before)


@pytest.mark.parametrize("trouble", ["no weights", "no config", "not JSON", "too large a rank"])
def test_an_adapter_that_the_engine_cannot_take_is_refused_and_the_base_plays(
    base, adapters, rollouts, played, tmp_path, trouble
):
    bad = make_adapter(base, tmp_path / "bad", 3, rank=16 if trouble == "too large a rank" else RANK)
    if trouble == "no weights":
        (bad / "adapter_model.safetensors").unlink()
    if trouble == "no config":
        (bad / "adapter_config.json").unlink()
    if trouble == "not JSON":
        (bad / "adapter_config.json").write_text(json.dumps({"r": RANK})[:-1])
    rollouts.use_adapter(adapters[0], 1)
    with pytest.raises(BadAdapter, match=str(bad)):
        rollouts.use_adapter(bad, 2)
    assert rollouts.play(TASKS, SAMPLING) == played["base"]
