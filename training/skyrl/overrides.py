"""What SkyRL is told: every key of a spec that it has, as `key.path=value`, with what would go wrong put right or refused."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

from training.spec import VISION_MODULES, BadTrainSpec, TrainSpec, check
from training.spec.checking import REMOTE, Inert
from training.spec.sections import ENV_CLASS

OWN = "loramux."
TRAIN, EVALUATION = "train", "evaluation"

# What an image policy cannot have in SkyRL, and why.
NOT_WITH_IMAGES: dict[str, tuple[Any, str]] = {
    "trainer.strategy": ("megatron", "SkyRL trains image policies under FSDP only"),
    "trainer.policy.sequence_parallel_size": (None, "images are not spread over a sequence's GPUs"),
    "generator.batched": (True, "SkyRL plays episodes with images one by one"),
    "generator.step_wise_trajectories": (True, "an episode with images is one trajectory"),
    "trainer.algorithm.zero_variance_filter": (True, "SkyRL does nothing of it where rewards are per token, as with images"),
}


def overrides(spec: TrainSpec) -> list[str]:
    """For `SkyRLTrainConfig.from_cli_overrides`: all of a spec's keys, so that a run does not hang on the defaults of a release.
    Raises BadTrainSpec for what would break there (`check_skyrl`)."""
    check_skyrl(spec)
    values = {key: value for key, value in spec.values().items() if not key.startswith(OWN)} | put_right(spec)
    return [f"{key}={json.dumps(value)}" for key, value in values.items()] + list(spec.loramux.skyrl.overrides)


def put_right(spec: TrainSpec) -> dict[str, Any]:
    """Keys whose value follows from what is trained, whatever the spec says.

    With images: the generator that can show them; no packing, which models with images cannot do; and no LoRA on the vision
    tower, which vLLM would leave out, so that another policy than the one that learns would be sampled and served. Data are
    tickets with a seed in each row, so that a group's samples get the same maze."""
    right: dict[str, Any] = {"environment.env_class": ENV_CLASS, "generator.vision_language_generator": _sees(spec)}
    right |= {f"data.{name}": [path] for name, path in _data(spec).items()}
    if _sees(spec):
        right["trainer.remove_microbatch_padding"] = False
        right["trainer.policy.model.lora.exclude_modules"] = spec.trainer.policy.model.lora.exclude_modules or VISION_MODULES
    return right


def ticket_files(spec: TrainSpec) -> dict[str, PurePosixPath]:
    """`train` and `evaluation`: where the run's tickets lie, one folder for each spec so that a new one never finds old ones."""
    folder = PurePosixPath(spec.loramux.skyrl.tickets_path or f"{spec.trainer.export_path}/tickets") / spec.digest()
    return {name: folder / f"{name}.jsonl" for name in (TRAIN, EVALUATION)}


def _data(spec: TrainSpec) -> dict[str, str]:
    files = ticket_files(spec)
    return {"train_data": str(files[TRAIN]), "val_data": str(files[EVALUATION])}


def _sees(spec: TrainSpec) -> bool:
    return spec.loramux.maze.observation == "image"


def check_skyrl(spec: TrainSpec) -> None:
    """The rules of both backends and SkyRL's. Raises BadTrainSpec."""
    try:
        check(spec)
        troubles: list[str] = []
    except BadTrainSpec as bad:
        troubles = list(bad.troubles)
    if troubles := [*troubles, *_places(spec), *_paths(spec), *_images(spec), *_data_troubles(spec), *_published(spec)]:
        raise BadTrainSpec(troubles)


def _places(spec: TrainSpec) -> list[str]:
    """Ray gives each GPU to one engine; the local backend may have several on one."""
    place, engine = spec.trainer.placement, spec.generator.inference_engine
    gpus = place.policy_num_nodes * place.policy_num_gpus_per_node
    of_each = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    if place.colocate_all and engine.num_engines * of_each != gpus:
        return [
            f"generator.inference_engine.num_engines is {engine.num_engines}, of {of_each} GPU each: with "
            f"trainer.placement.colocate_all they have to be on as many GPUs as the policy, {gpus}"
        ]
    return []


def _paths(spec: TrainSpec) -> list[str]:
    """Trainer, engines and publisher are on other machines than each other and have to see the same files."""
    lora = spec.trainer.policy.model.lora
    paths = {
        "trainer.ckpt_path": (
            spec.trainer.ckpt_path,
            "a checkpoint's LoRA weights are written with what only knows local files",
        ),
        "trainer.export_path": (spec.trainer.export_path, "dumps of evaluations and the publisher need local files"),
    }
    if lora.rank:
        paths["trainer.policy.model.lora.lora_sync_path"] = (lora.lora_sync_path, "engines read each step's adapter there")
    if spec.loramux.skyrl.tickets_path:
        paths["loramux.skyrl.tickets_path"] = (spec.loramux.skyrl.tickets_path, "the trainer reads its tickets there")
    return [
        f"{key} is {path!r}: it has to be an absolute path on a file system that every node mounts; {why}"
        for key, (path, why) in paths.items()
        if path.startswith(REMOTE) or not path.startswith("/") or (spec.trainer.placement.policy_num_nodes > 1 and _own(path))
    ]


def _own(path: str) -> bool:
    """Whether each node has a folder of this name of its own."""
    return PurePosixPath(path).is_relative_to("/tmp")


def _images(spec: TrainSpec) -> list[str]:
    if not _sees(spec):
        return []
    values, troubles = spec.values(), []
    for key, (forbidden, why) in NOT_WITH_IMAGES.items():
        value = values[key]
        if value == forbidden or (forbidden is None and value != 1):
            troubles.append(f"{key} is {value!r}: not with images; {why}")
    return troubles


def _data_troubles(spec: TrainSpec) -> list[str]:
    data, env_class = spec.data, spec.environment.env_class
    troubles = [
        f"data.{name} is {list(value)!r}: tickets are made of loramux.training_mazes and loramux.evaluation, with a seed in each"
        for name, value in (("train_data", data.train_data), ("val_data", data.val_data))
        if value
    ]
    if env_class != ENV_CLASS:
        troubles.append(f"environment.env_class is {env_class!r}: tickets are of {ENV_CLASS}")
    return troubles


def evaluated_as(spec: TrainSpec) -> str:
    """The decoding that SkyRL evaluates with: it has one, `generator.eval_sampling_params`."""
    return "greedy" if spec.generator.eval_sampling_params.temperature == 0 else "sampled"


def _published(spec: TrainSpec) -> list[str]:
    publish = spec.loramux.publish
    if publish.name is None:
        return []
    troubles = []
    if publish.registry is None:
        troubles.append("loramux.publish.registry is None: the cluster has no settings file, so its URL is needed")
    if spec.trainer.hf_save_interval < 1:
        troubles.append(f"trainer.hf_save_interval is {spec.trainer.hf_save_interval}: only exports are published, from 1")
    if publish.alias and f"/{evaluated_as(spec)}/" not in publish.metric:
        troubles.append(
            f"loramux.publish.metric is {publish.metric!r}: SkyRL evaluates with generator.eval_sampling_params only, which are "
            f"{evaluated_as(spec)}"
        )
    return troubles


INERT: dict[str, str] = {
    "loramux.evaluation.final_sets": "SkyRL plays the same sets at every evaluation",
    "loramux.evaluation.decodings": "SkyRL evaluates with generator.eval_sampling_params only",
    "loramux.evaluation.seed": "SkyRL gives evaluations no dice",
    "loramux.device": "SkyRL needs GPUs",
    "loramux.dtype": "trainer.bf16 and generator.inference_engine.model_dtype say it",
    "loramux.threads": "SkyRL's workers decide",
    "data": "tickets are made of loramux.training_mazes and loramux.evaluation",
}


def inert_in_skyrl(spec: TrainSpec) -> tuple[Inert, ...]:
    """What a spec sets to something else than its default and SkyRL pays no heed to."""
    different = spec.differences(TrainSpec())
    return tuple(Inert(key, value, INERT[key]) for key, (value, _) in different.items() if key in INERT)
