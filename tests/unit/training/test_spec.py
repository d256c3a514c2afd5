"""The training spec: what it takes, what it refuses and with which words, and what of it the local backend can do."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.repo.checkout import ROOT
from training.grpo import Algorithm
from training.maze import MazeSpec
from training.spec import BadTrainSpec, TrainSpec, check, check_local, inert_locally

SPECS = sorted((ROOT / "training" / "specs").glob("*.yaml"))
RUNNABLE = {"trainer.policy.model.path": "base", "trainer.policy.model.lora.rank": 8, "generator.max_turns": 21}
SMALL = {"trainer.train_batch_size": 8, "trainer.policy_mini_batch_size": 4}


def spec(**values: Any) -> TrainSpec:
    """One that runs, with `key__path=value` laid over."""
    over = RUNNABLE | SMALL | {key.replace("__", "."): value for key, value in values.items()}
    return TrainSpec.from_values({}, [f"{key}={json.dumps(value)}" for key, value in over.items()])


def refusal(*overrides: str) -> str:
    with pytest.raises(BadTrainSpec) as refused:
        TrainSpec.from_values({}, overrides)
    return str(refused.value)


def test_overrides_are_typed_and_the_last_one_holds(tmp_path: Path):
    file = tmp_path / "spec.yaml"
    file.write_text("trainer: {epochs: 3, policy: {optimizer_config: {lr: 3e-5}}}\n")
    one = TrainSpec.load(file, ["trainer.epochs=4", "trainer.epochs=5", "trainer.bf16=false", "trainer.run_name=a=b"])
    assert (one.trainer.epochs, one.trainer.bf16, one.trainer.run_name) == (5, False, "a=b")
    assert one.trainer.policy.optimizer_config.lr == 3e-5


def test_the_algorithm_and_the_maze_are_those_that_are_computed_with():
    one = TrainSpec.from_values({}, ["trainer.algorithm.eps_clip_high=0.28", "loramux.maze.cell_px=16"])
    assert one.trainer.algorithm == Algorithm(eps_clip_high=0.28)
    assert one.loramux.maze == MazeSpec(cell_px=16)


def test_what_skyrl_takes_from_other_keys_follows_them_unless_it_is_said():
    follows = TrainSpec.from_values({}, ["generator.sampling_params.temperature=0.7", "trainer.max_prompt_length=2048"])
    assert follows.trainer.algorithm.temperature == 0.7
    assert follows.generator.max_input_length == 2048
    said = TrainSpec.from_values({}, ["generator.max_input_length=8192", "generator.sampling_params.max_generate_length=8"])
    assert said.generator.max_input_length == 8192
    assert (said.generator.eval_sampling_params.temperature, said.generator.eval_sampling_params.max_generate_length) == (0, 8)


def test_free_dictionaries_take_any_key():
    one = TrainSpec.from_values({}, ["generator.inference_engine.engine_init_kwargs.max_model_len=16000"])
    assert one.generator.inference_engine.engine_init_kwargs == {"max_model_len": 16000}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.epoch=3", "there is no key trainer.epoch; near: trainer.epochs"),
        ("trainer.algorithm.clip_low=0.1", "there is no key trainer.algorithm.clip_low"),
        ("lora.rank=8", "near: trainer.policy.model.lora"),
        ("trainer.epochs=three", "trainer.epochs is 'three': it has to be a valid integer"),
        ("trainer.epochs=1.5", "trainer.epochs is 1.5"),
        ("trainer.epochs=true", "trainer.epochs is True"),
        ("trainer.bf16=1", "trainer.bf16 is 1: it has to be a valid boolean"),
        ("trainer.epochs=0", "trainer.epochs is 0: it has to be greater than or equal to 1"),
        ("trainer.policy.optimizer_config.lr=.nan", "lr is nan: it has to be a finite number"),
        ("trainer.resume_mode=newest", "it has to be 'none', 'latest' or 'from_path'"),
        ("trainer.algorithm.advantage_estimator=gae", "trainer.algorithm.advantage_estimator is 'gae'"),
        ("trainer.algorithm.temperature=0", "trainer.algorithm.temperature is 0.0: it has to be above 0"),
        ("loramux.maze.size=8", "loramux.maze: size is 8: it has to be odd"),
        ("loramux.evaluation.sets=[easy-65]", "'easy-65' is none of easy-64, easy-512, hard-128"),
        ("trainer=3", "trainer is 3: it has to be an object"),
        ("trainer.seed.x=3", "trainer.seed is {'x': 3}"),
        ("+trainer.seed=3", "'+trainer.seed=3' is no key.path=value"),
        ("trainer.seed", "'trainer.seed' is no key.path=value"),
        ("trainer.seed=[", "trainer.seed is no YAML"),
    ],
)
def test_what_cannot_be_is_refused_with_key_value_and_what_is_allowed(override: str, said: str):
    assert said in refusal(override)


def test_every_trouble_is_named_at_once():
    assert len(refusal("trainer.epoch=3", "trainer.seed=x").splitlines()) == 2


def test_a_file_that_is_not_there_or_no_mapping_is_refused_by_its_name(tmp_path: Path):
    (tmp_path / "list.yaml").write_text("- 1\n")
    for name, said in {"list.yaml": "is no mapping", "none.yaml": "cannot be read"}.items():
        with pytest.raises(BadTrainSpec, match=f"{name}.*{said}|{name} {said}"):
            TrainSpec.load(tmp_path / name)


def test_what_is_written_down_reads_as_an_equal_spec_with_the_same_digest():
    one = spec(generator__inference_engine__engine_init_kwargs={"max_model_len": 4096})
    again = TrainSpec.from_values(yaml.safe_load(one.to_yaml()))
    assert (again, again.digest()) == (one, one.digest())


def test_a_digest_is_the_same_in_another_process_and_another_for_another_value():
    script = "from training.spec import TrainSpec; print(TrainSpec.from_values({}, ['trainer.epochs=7']).digest())"
    told = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert told == TrainSpec.from_values({"trainer": {"epochs": 7}}).digest() != TrainSpec().digest()


def test_a_spec_travels_between_processes_whole():
    one = spec(trainer__algorithm__eps_clip_high=0.28)
    assert pickle.loads(pickle.dumps(one)) == one


def test_differences_are_by_key_with_both_values():
    assert spec(trainer__epochs=2).differences(spec(trainer__epochs=3)) == {"trainer.epochs": (2, 3)}


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"trainer__policy_mini_batch_size": 3}, "train_batch_size is 8: it has to be a multiple of policy_mini_batch_size, 3"),
        ({"trainer__policy_mini_batch_size": 16}, "train_batch_size is 8"),
        (
            {"trainer__micro_train_batch_size_per_gpu": 3},
            "micro_train_batch_size_per_gpu is 3: a mini-batch's share of one GPU, ",
        ),
        ({"trainer__placement__policy_num_gpus_per_node": 3}, "policy_mini_batch_size is 4: times n_samples_per_prompt, 5"),
        ({"loramux__training_mazes__count": 7}, "loramux.training_mazes.count is 7: at least trainer.train_batch_size, 8"),
        ({"generator__max_turns": 15}, "generator.max_turns is 15, loramux.maze.max_turns 21: they have to be the same"),
        ({"generator__max_input_length": 100}, "max_input_length is 100: at least trainer.max_prompt_length, 512"),
        ({"trainer__policy__model__path": None}, "trainer.policy.model.path is None"),
        ({"trainer__ckpt_interval": 0}, "trainer.ckpt_interval is 0: -1 or from 1"),
        ({"trainer__resume_mode": "from_path"}, "trainer.resume_path is None"),
        ({"loramux__publish__name": "maze"}, "loramux.publish.base is None"),
        (
            {"loramux__publish__name": "maze", "loramux__publish__base": "b", "loramux__evaluation__sets": []},
            "loramux.publish.metric is 'eval/easy-64/sampled/solve_rate': to move an alias it has to be measured",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_for_any_backend(over: dict[str, Any], said: str):
    with pytest.raises(BadTrainSpec) as refused:
        check(spec(**over))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"trainer__strategy": "megatron"}, "trainer.strategy is 'megatron': the local backend can only do 'fsdp' or 'fsdp2'"),
        (
            {"generator__inference_engine__tensor_parallel_size": 2, "trainer__placement__colocate_all": False},
            "tensor_parallel_size is 2: the local backend can only do 1",
        ),
        ({"environment__env_class": "gsm8k"}, "env_class is 'gsm8k'"),
        ({"trainer__policy__model__lora__rank": 0}, "lora.rank is 0: the local backend trains LoRA only"),
        ({"trainer__algorithm__temperature": 0.5}, "trainer.algorithm.temperature is 0.5: it has to be what is sampled at"),
        ({"trainer__ckpt_path": "s3://bucket/x"}, "trainer.ckpt_path is 's3://bucket/x'"),
        ({"generator__sampling_params__min_p": 0.1}, "sampling_params.min_p is 0.1"),
    ],
)
def test_what_only_skyrl_can_do_is_refused_locally(over: dict[str, Any], said: str):
    check(spec(**over))
    with pytest.raises(BadTrainSpec) as refused:
        check_local(spec(**over))
    assert said in str(refused.value)


def test_several_local_engines_may_share_a_gpu():
    check_local(spec(generator__inference_engine__num_engines=8))


def test_what_is_set_in_vain_is_told_with_the_reason():
    over = {"trainer__placement__ref_num_nodes": 3, "trainer__algorithm__use_kl_loss": False, "trainer__flash_attn": False}
    told = {one.key: one.why for one in inert_locally(spec(**over))}
    assert set(told) == {"trainer.placement.ref_num_nodes", "trainer.flash_attn"}
    assert "use_kl_loss" in told["trainer.placement.ref_num_nodes"]


@pytest.mark.parametrize("file", SPECS, ids=lambda file: file.stem)
def test_the_spec_files_that_come_along_can_be_run(file: Path):
    one = TrainSpec.load(file)
    (check if one.trainer.placement.policy_num_nodes > 1 else check_local)(one)
