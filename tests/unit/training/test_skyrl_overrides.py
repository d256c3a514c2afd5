"""What SkyRL is told of a spec, and what would break there and is refused before a cluster is asked for."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from tests.repo.checkout import ROOT
from training.base.architecture import SHAPE, make_tokenizer
from training.skyrl.overrides import check_skyrl, inert_in_skyrl, overrides, ticket_files
from training.small_vlm import config_of, new_model
from training.spec import VISION_MODULES, BadTrainSpec, TrainSpec

HYPERPOD = ROOT / "training" / "specs" / "hyperpod.yaml"
SEED_KEYS = {
    "trainer.epochs": 20,
    "trainer.train_batch_size": 24,
    "trainer.policy_mini_batch_size": 12,
    "trainer.micro_forward_batch_size_per_gpu": 1,
    "trainer.micro_train_batch_size_per_gpu": 1,
    "trainer.update_epochs_per_batch": 1,
    "trainer.max_prompt_length": 2048,
    "generator.sampling_params.max_generate_length": 1024,
    "generator.sampling_params.temperature": 0.7,
    "generator.max_input_length": 8192,
    "generator.n_samples_per_prompt": 8,
    "generator.inference_engine.num_engines": 6,
    "generator.inference_engine.tensor_parallel_size": 1,
    "generator.inference_engine.gpu_memory_utilization": 0.45,
    "generator.inference_engine.engine_init_kwargs": {"max_model_len": 16000},
    "trainer.algorithm.advantage_estimator": "grpo",
    "trainer.policy.model.lora.rank": 32,
    "trainer.policy.model.lora.alpha": 32,
    "trainer.placement.colocate_all": True,
    "trainer.strategy": "fsdp",
    "trainer.placement.policy_num_nodes": 3,
    "trainer.placement.policy_num_gpus_per_node": 2,
    "trainer.placement.ref_num_nodes": 3,
    "trainer.placement.ref_num_gpus_per_node": 2,
    "trainer.ref.fsdp_config.cpu_offload": False,
    "trainer.eval_interval": 10,
    "trainer.eval_before_train": True,
    "trainer.ckpt_interval": 20,
    "trainer.hf_save_interval": 20,
    "trainer.resume_mode": "latest",
}


def told(*over: str) -> dict[str, Any]:
    rows = [one.partition("=") for one in overrides(TrainSpec.load(HYPERPOD, over))]
    return {key: json.loads(value) for key, _, value in rows}


def refusal(*over: str) -> str:
    with pytest.raises(BadTrainSpec) as refused:
        check_skyrl(TrainSpec.load(HYPERPOD, over))
    return str(refused.value)


def test_the_walkthroughs_run_is_told_with_all_its_keys():
    said = told()
    assert {key: said[key] for key in SEED_KEYS} == SEED_KEYS


def test_what_images_need_is_told_whatever_the_spec_says():
    said = told("trainer.remove_microbatch_padding=true", "generator.vision_language_generator=false")
    assert (said["generator.vision_language_generator"], said["generator.batched"]) == (True, False)
    assert said["trainer.remove_microbatch_padding"] is False
    assert told("loramux.maze.observation=text")["generator.vision_language_generator"] is False


def test_the_vision_tower_is_left_out_unless_a_spec_says_what_is():
    assert told("trainer.policy.model.lora.exclude_modules=null")["trainer.policy.model.lora.exclude_modules"] == VISION_MODULES
    assert told("trainer.policy.model.lora.exclude_modules=.*x")["trainer.policy.model.lora.exclude_modules"] == ".*x"


def test_what_is_left_out_is_the_whole_vision_tower_and_nothing_else():
    policy = get_peft_model(
        new_model(config_of(make_tokenizer(), SHAPE), 0),
        LoraConfig(target_modules="all-linear", exclude_modules=VISION_MODULES, r=2),
    )
    adapted = {name for name, _ in policy.named_modules() if name.endswith("lora_A")}
    assert adapted
    assert all(".language_model." in name for name in adapted)


def test_data_are_tickets_of_this_spec_alone():
    one, other = (ticket_files(TrainSpec.load(HYPERPOD, [over])) for over in ("trainer.seed=1", "trainer.seed=2"))
    assert told("trainer.seed=1")["data.train_data"] == [str(one["train"])]
    assert str(one["train"]).startswith("/shared/exports/maze-grpo/tickets/")
    assert one != other


def test_keys_that_a_spec_lacks_are_handed_on_after_all_others():
    spec = TrainSpec.load(HYPERPOD, ["loramux.skyrl.overrides=[trainer.fully_async.max_staleness_steps=2]"])
    assert overrides(spec)[-1] == "trainer.fully_async.max_staleness_steps=2"


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ("trainer.ckpt_path=s3://bucket/ckpts", "trainer.ckpt_path is 's3://bucket/ckpts': .* LoRA weights"),
        ("trainer.export_path=s3://bucket/exports", "trainer.export_path is 's3://bucket/exports': .* the publisher"),
        ("trainer.export_path=~/exports", "trainer.export_path is '~/exports': it has to be an absolute path"),
        ("trainer.policy.model.lora.lora_sync_path=/tmp/sync", "lora_sync_path is '/tmp/sync': .* every node mounts"),
        ("trainer.strategy=megatron", "trainer.strategy is 'megatron': not with images"),
        (
            "trainer.algorithm.zero_variance_filter=true",
            "zero_variance_filter is True: .* SkyRL does nothing of it",
        ),
        ("generator.inference_engine.num_engines=12", "num_engines is 12, of 1 GPU each: .* as many GPUs as the policy, 6"),
        ("generator.batched=true", "generator.batched is True"),
        ("trainer.policy.sequence_parallel_size=2", "sequence_parallel_size is 2: not with images"),
        ("data.train_data=[rows.jsonl]", r"data.train_data is \['rows.jsonl'\]: tickets are made"),
        ("environment.env_class=gsm8k", "environment.env_class is 'gsm8k': tickets are of loramux_maze"),
        ("generator.max_turns=15", "they have to be the same"),
        ("loramux.publish.name=maze", "loramux.publish.registry is None"),
    ],
)
def test_what_would_break_there_is_refused_with_the_reason(over: str, said: str):
    assert re.search(said, refusal(over))


def test_an_alias_moves_by_what_skyrl_evaluates_only():
    over = ("loramux.publish.name=maze", "loramux.publish.registry=s3://b/r", "loramux.evaluation.decodings=[sampled]")
    assert "which are greedy" in refusal(*over, "loramux.publish.metric=eval/easy-64/sampled/solve_rate")


def test_one_node_may_use_folders_of_its_own():
    check_skyrl(
        TrainSpec.load(
            HYPERPOD,
            [
                "trainer.placement.policy_num_nodes=1",
                "generator.inference_engine.num_engines=2",
                "trainer.policy.model.lora.lora_sync_path=/tmp/sync",
            ],
        )
    )


def test_what_skyrl_pays_no_heed_to_is_told():
    assert {one.key for one in inert_in_skyrl(TrainSpec.load(HYPERPOD))} == {
        "loramux.evaluation.final_sets",
        "loramux.evaluation.decodings",
    }
