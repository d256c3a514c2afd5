"""What a spec says of engines, as vLLM's own arguments, and where each engine runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from training.rollouts.playing import Rules
from training.spec import TrainSpec

# vLLM's; an adapter's rank is rounded up to the next.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
CPU_BLOCK_TOKENS = 32  # its CPU kernels want multiples; the default, 128, would read up to 127 tokens of each turn again
CPU_CACHE_BYTES = 1 << 30
# Whoever starts engines may be one of several learners: an engine is none of them.
NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`arguments` are vLLM's. `can_sleep`: it gives its memory back while others need it."""

    arguments: Mapping[str, Any]
    rules: Rules
    template_kwargs: Mapping[str, Any]
    device: str
    can_sleep: bool


def engine_settings(spec: TrainSpec, device: str) -> EngineSettings:
    """`device` is `cpu` or `cuda`. Raises ValueError for a rank that vLLM takes no adapters of."""
    engine, can_sleep = spec.generator.inference_engine, device == "cuda" and spec.trainer.placement.colocate_all
    arguments = {
        "model": spec.trainer.policy.model.path,
        "dtype": engine.model_dtype,
        "seed": spec.trainer.seed,
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": _max_lora_rank(spec.trainer.policy.model.lora.rank),
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "enable_chunked_prefill": engine.enable_chunked_prefill,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "enforce_eager": engine.enforce_eager or device == "cpu",
        "enable_sleep_mode": can_sleep,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        **_pictures(spec),
        **(_on_cpu() if device == "cpu" else {}),
        **engine.engine_init_kwargs,
    }
    rules = Rules(spec.loramux.maze, spec.trainer.max_prompt_length, spec.generator.max_input_length)
    return EngineSettings(arguments, rules, spec.generator.chat_template_kwargs, device, can_sleep)


def _max_lora_rank(rank: int) -> int:
    fitting = [one for one in RANKS if one >= rank]
    if not fitting:
        raise ValueError(f"trainer.policy.model.lora.rank is {rank}: engines take adapters up to rank {RANKS[-1]}")
    return fitting[0]


def _pictures(spec: TrainSpec) -> dict[str, Any]:
    """An episode shows one picture before each turn."""
    if spec.loramux.maze.observation != "image":
        return {}
    return {"limit_mm_per_prompt": {"image": spec.loramux.maze.max_turns, "video": 0}}


def _on_cpu() -> dict[str, Any]:
    return {"block_size": CPU_BLOCK_TOKENS, "kv_cache_memory_bytes": CPU_CACHE_BYTES}


def engine_environment(spec: TrainSpec, index: int, device: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of engine `index`: its share of the cores, or its GPU. No plugins of vLLM's: what this project's server
    has there is for servers, and what others have there is unknown."""
    environment = {name: value for name, value in inherited.items() if name not in NOT_INHERITED}
    environment |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PLUGINS": "",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": inherited.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cuda":
        return environment | {"CUDA_VISIBLE_DEVICES": _gpu(spec, index, inherited.get("CUDA_VISIBLE_DEVICES"))}
    cores = spec.loramux.threads or len(os.sched_getaffinity(0))
    return environment | {"OMP_NUM_THREADS": str(max(1, cores // spec.generator.inference_engine.num_engines))}


def _gpu(spec: TrainSpec, index: int, visible: str | None) -> str:
    """Colocated engines sit on the learners' GPUs, dealt out in turn; others on those after them, one on each."""
    place = spec.trainer.placement
    learners = place.policy_num_nodes * place.policy_num_gpus_per_node
    at = index % learners if place.colocate_all else learners + index
    if visible is None:
        return str(at)
    names = visible.split(",")
    if at >= len(names):
        raise ValueError(f"CUDA_VISIBLE_DEVICES is {visible!r}: engine {index} needs GPU number {at}, counted from 0")
    return names[at]
