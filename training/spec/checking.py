"""What a spec asks for that cannot be, on any backend or on the local one, and what it sets in vain. Nothing here has effects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from training.spec.errors import BadTrainSpec
from training.spec.sections import ENV_CLASS
from training.spec.train_spec import TrainSpec

REMOTE = ("s3://", "gs://", "gcs://", "abfss://", "azure://", "az://")


@dataclass(frozen=True, slots=True)
class Inert:
    """A key that is set and changes nothing, and why."""

    key: str
    value: Any
    why: str


def check(spec: TrainSpec) -> None:
    """The rules of both backends. Raises BadTrainSpec, which names every trouble."""
    _raise(_troubles(spec))


def check_local(spec: TrainSpec) -> None:
    """Those and the local backend's. Raises BadTrainSpec."""
    _raise([*_troubles(spec), *_not_local(spec), *_folders(spec)])


def _raise(troubles: list[str]) -> None:
    if troubles:
        raise BadTrainSpec(troubles)


def _troubles(spec: TrainSpec) -> list[str]:
    return [*_batches(spec), *_episodes(spec), *_intervals(spec), *_publishing(spec)]


def data_parallel_size(spec: TrainSpec) -> int:
    """How many learners share a mini-batch, as SkyRL counts them under FSDP."""
    place = spec.trainer.placement
    return place.policy_num_nodes * place.policy_num_gpus_per_node // spec.trainer.policy.sequence_parallel_size


def _batches(spec: TrainSpec) -> list[str]:
    """SkyRL's `validate_batch_sizes`: prompts divide into mini-batches, those among learners, each share into micro-batches."""
    trainer, samples, learners = spec.trainer, spec.generator.n_samples_per_prompt, data_parallel_size(spec)
    if learners < 1:
        size = spec.trainer.policy.sequence_parallel_size
        return [f"trainer.policy.sequence_parallel_size is {size}: at most the policy's GPUs"]
    troubles = []
    batch, mini = trainer.train_batch_size, trainer.policy_mini_batch_size
    if batch % mini:
        troubles.append(f"trainer.train_batch_size is {batch}: it has to be a multiple of policy_mini_batch_size, {mini}")
    if mini * samples % learners:
        troubles.append(
            f"trainer.policy_mini_batch_size is {mini}: times n_samples_per_prompt, {samples}, it has to be a multiple of "
            f"the policy's GPUs, {learners}"
        )
    for name in ("micro_train_batch_size_per_gpu", "micro_forward_batch_size_per_gpu"):
        micro, share = getattr(trainer, name), mini * samples // learners
        if share % micro:
            troubles.append(f"trainer.{name} is {micro}: a mini-batch's share of one GPU, {share} episodes, has to be a multiple")
    if not spec.data.train_data and (count := spec.loramux.training_mazes.count) < batch:
        troubles.append(f"loramux.training_mazes.count is {count}: at least trainer.train_batch_size, {batch}")
    return troubles


def _episodes(spec: TrainSpec) -> list[str]:
    troubles = []
    turns, maze_turns = spec.generator.max_turns, spec.loramux.maze.max_turns
    if turns != maze_turns:
        troubles.append(f"generator.max_turns is {turns}, loramux.maze.max_turns {maze_turns}: they have to be the same")
    longest, prompt = spec.generator.max_input_length, spec.trainer.max_prompt_length
    if longest < prompt or (turns == 1 and longest != prompt):
        troubles.append(
            f"generator.max_input_length is {longest}: at least trainer.max_prompt_length, {prompt}, and with one turn the same"
        )
    if spec.trainer.policy.model.path is None:
        troubles.append("trainer.policy.model.path is None: a folder with a base model is needed")
    return troubles


def _intervals(spec: TrainSpec) -> list[str]:
    trainer, troubles = spec.trainer, []
    for name in ("ckpt_interval", "hf_save_interval", "eval_interval", "max_ckpts_to_keep"):
        if (value := getattr(trainer, name)) == 0 or value < -1:
            troubles.append(f"trainer.{name} is {value}: -1 or from 1")
    if trainer.resume_mode == "from_path" and not trainer.resume_path:
        troubles.append("trainer.resume_path is None: resume_mode from_path needs it, a global_step_N folder")
    return troubles


def _publishing(spec: TrainSpec) -> list[str]:
    publish, measured, troubles = spec.loramux.publish, spec.loramux.evaluation.metrics(), []
    if publish.name is None:
        return []
    if publish.base is None:
        troubles.append("loramux.publish.base is None: publishing an adapter needs its base's name")
    if spec.trainer.policy.model.lora.rank == 0:
        troubles.append("trainer.policy.model.lora.rank is 0: without LoRA there is no adapter to publish")
    if publish.alias and publish.metric not in measured:
        troubles.append(
            f"loramux.publish.metric is {publish.metric!r}: to move an alias it has to be measured at every evaluation, "
            f"one of {', '.join(measured)}"
        )
    return troubles


# What the local backend can do of a key; SkyRL can do more.
ONLY_LOCALLY: dict[str, tuple[Any, ...]] = {
    "trainer.strategy": ("fsdp", "fsdp2"),
    "trainer.placement.policy_num_nodes": (1,),
    "trainer.policy.sequence_parallel_size": (1,),
    "trainer.policy.fsdp_config.cpu_offload": (False,),
    "trainer.policy.optimizer_config.scheduler": ("constant_with_warmup", "linear", "cosine"),
    "trainer.max_tokens_per_microbatch": (-1,),
    "generator.batched": (False,),
    "generator.step_wise_trajectories": (False,),
    "generator.use_conversation_multi_turn": (True,),
    "generator.zero_reward_on_non_stop": (False,),
    "generator.apply_overlong_filtering": (False,),
    "generator.inference_engine.run_engines_locally": (True,),
    "generator.inference_engine.tensor_parallel_size": (1,),
    "generator.inference_engine.pipeline_parallel_size": (1,),
    "generator.inference_engine.data_parallel_size": (1,),
    "environment.env_class": (ENV_CLASS,),
    "data.train_data": ((),),
    "data.val_data": ((),),
    **{
        f"generator.{params}.{name}": value
        for params in ("sampling_params", "eval_sampling_params")
        for name, value in {"repetition_penalty": (1.0,), "min_p": (0.0,), "stop": (None,)}.items()
    },
}


def _not_local(spec: TrainSpec) -> list[str]:
    values, troubles = spec.values(), []
    for key, allowed in ONLY_LOCALLY.items():
        if values[key] not in allowed:
            said = " or ".join(repr(one) for one in allowed)
            troubles.append(f"{key} is {values[key]!r}: the local backend can only do {said}")
    if spec.trainer.policy.model.lora.rank == 0:
        troubles.append("trainer.policy.model.lora.rank is 0: the local backend trains LoRA only, from rank 1")
    sampled_at, divided_by = spec.generator.sampling_params.temperature, spec.trainer.algorithm.temperature
    if sampled_at != divided_by:
        troubles.append(
            f"trainer.algorithm.temperature is {divided_by}: it has to be what is sampled at, "
            f"generator.sampling_params.temperature, {sampled_at}"
        )
    if spec.generator.sampling_params.logprobs is None:
        troubles.append("generator.sampling_params.logprobs is None: drift is measured from them, 0 or 1")
    return troubles


def _folders(spec: TrainSpec) -> list[str]:
    return [
        f"trainer.{name} is {path!r}: the local backend writes to folders of this machine"
        for name in ("ckpt_path", "export_path")
        if (path := getattr(spec.trainer, name)).startswith(REMOTE)
    ]


NO_REFERENCE = "there is no reference policy without trainer.algorithm.use_kl_loss"
ONE_PROCESS = "SkyRL's Ray cluster is not there"
INERT_LOCALLY: dict[str, str] = {
    "trainer.ref": "the reference is the policy with its adapter off, wherever that is",
    "trainer.placement.ref": "the reference is the policy with its adapter off, wherever that is",
    "trainer.placement.colocate_policy_ref": "the reference is the policy with its adapter off",
    "trainer.policy.model.lora.lora_sync_path": "engines are told of the run's own folder",
    "trainer.policy.model.lora.max_loras": "one adapter is sampled at a time",
    "trainer.policy.model.lora.max_cpu_loras": "one adapter is sampled at a time",
    "trainer.policy.optimizer_config.offload_after_step": "an adapter's optimizer is small and stays",
    "trainer.log_path": ONE_PROCESS,
    "trainer.enable_ray_gpu_monitor": ONE_PROCESS,
    "trainer.micro_forward_batch_size_per_gpu": "old log-probs are computed in the micro-batches of training",
    "trainer.remove_microbatch_padding": "images are never packed; micro-batches are padded",
    "trainer.flash_attn": "attention is torch's own",
    "trainer.project_name": "there is no tracker: events and reports are files of the run",
    "trainer.logger": "there is no tracker: events and reports are files of the run",
    "trainer.dump_eval_results": "results of each maze are always kept",
    "trainer.print_example_interval": "progress is shown in another way",
    "trainer.eval_batch_size": "an evaluation plays its set at once",
    "data.dataloader": "mazes are made of seeds, there is nothing to load",
    "environment.skyrl_gym": "mazes need no workers",
    "generator.inference_engine.weight_sync_backend": "adapters reach the engine as files",
    "generator.inference_engine.distributed_executor_backend": ONE_PROCESS,
    "generator.inference_engine.enable_ray_prometheus_stats": ONE_PROCESS,
    "generator.vision_language_generator": "loramux.maze.observation says whether there are images",
    "loramux.skyrl": "only the skyrl backend reads it",
}


DONE_ANYWAY = {"trainer.logger": "console"}


def inert_locally(spec: TrainSpec) -> tuple[Inert, ...]:
    """What a spec sets to something else than its default and the local backend pays no heed to."""
    found = []
    for key, (value, _) in spec.differences(TrainSpec()).items():
        why = next((why for inert, why in INERT_LOCALLY.items() if _within(key, inert)), None)
        if why and DONE_ANYWAY.get(key) != value:
            found.append(Inert(key, value, why if spec.trainer.algorithm.use_kl_loss or not _of_ref(key) else NO_REFERENCE))
    return tuple(found)


def _within(key: str, inert: str) -> bool:
    return key == inert or key.startswith((f"{inert}.", f"{inert}_"))


def _of_ref(key: str) -> bool:
    return key.startswith(("trainer.ref.", "trainer.placement.ref_"))
