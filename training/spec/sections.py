"""The parts of a training spec that SkyRL has too: its key names, its defaults (0.3.0 and 0.4.0), its nesting.

What a key means is SkyRL's documentation; here stands what is particular. Not all of SkyRL's keys are here: what only its own
backend knows goes there by `loramux.skyrl.overrides`. Three defaults are not SkyRL's: `data` is empty (tickets are made of
`loramux.training_mazes` and `loramux.evaluation`), `environment.env_class` is the maze, and no model is the default model.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from training.grpo import Algorithm

ENV_CLASS = "loramux_maze"


class Part(BaseModel):
    """A frozen part of a spec. An unknown key is an error, and nothing is converted but whole numbers where a fraction may be."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class DataLoader(Part):
    num_workers: int | None = Field(default=8, ge=0)
    persistent_workers: bool = False


class Data(Part):
    train_data: tuple[str, ...] = ()
    val_data: tuple[str, ...] = ()
    dataloader: DataLoader = DataLoader()


class Lora(Part):
    """`exclude_modules` is a pattern for whole module names, as PEFT has it; for an image policy it has to keep the vision tower
    out (`training.spec.VISION_MODULES` does), or vLLM would sample another policy than the one that learns."""

    rank: int = Field(default=0, ge=0)
    alpha: int = Field(default=16, ge=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    lora_sync_path: str = "/tmp/skyrl_lora_sync"
    target_modules: str = "all-linear"
    exclude_modules: str | None = None
    init_method: str = "kaiming"
    max_loras: int = Field(default=1, ge=1)
    max_cpu_loras: int | None = Field(default=None, ge=1)


class Model(Part):
    path: str | None = None
    lora: Lora = Lora()


class Optimizer(Part):
    """AdamW. `num_warmup_steps` counts mini-batches."""

    lr: float = Field(default=1e-6, ge=0)
    adam_betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(default=1e-2, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    offload_after_step: bool = True
    num_warmup_steps: int = Field(default=0, ge=0)
    scheduler: str = "constant_with_warmup"


class Fsdp(Part):
    cpu_offload: bool = False
    reshard_after_forward: bool = True
    fsdp_size: int = -1


class Policy(Part):
    model: Model = Model()
    optimizer_config: Optimizer = Optimizer()
    fsdp_config: Fsdp = Fsdp()
    sequence_parallel_size: int = Field(default=1, ge=1)


class Ref(Part):
    """The frozen policy that KL is measured from; it exists only with `trainer.algorithm.use_kl_loss`."""

    fsdp_config: Fsdp = Fsdp()
    sequence_parallel_size: int = Field(default=1, ge=1)


class Placement(Part):
    """How many GPUs learn (on a machine without one: how many processes). With `colocate_all` the engines have the same ones: in
    SkyRL each its own, on the local backend several may share one."""

    colocate_all: bool = True
    colocate_policy_ref: bool = True
    policy_num_nodes: int = Field(default=1, ge=1)
    policy_num_gpus_per_node: int = Field(default=1, ge=1)
    ref_num_nodes: int = Field(default=1, ge=1)
    ref_num_gpus_per_node: int = Field(default=1, ge=1)


class Trainer(Part):
    """Batch sizes count prompts (mazes), each of which is played `generator.n_samples_per_prompt` times; micro-batches count
    episodes. Intervals count steps, -1 is never; checkpoints and exports come at the end of every epoch too, as in SkyRL."""

    placement: Placement = Placement()
    strategy: Literal["fsdp", "fsdp2", "megatron"] = "fsdp"
    policy: Policy = Policy()
    ref: Ref = Ref()
    algorithm: Algorithm = Algorithm()
    gradient_checkpointing: bool = True
    seed: int = Field(default=42, ge=0, lt=2**31)
    resume_mode: Literal["none", "latest", "from_path"] | None = "latest"
    resume_path: str | None = None
    log_path: str = "/tmp/skyrl-logs"
    ckpt_path: str = "~/ckpts/"
    max_ckpts_to_keep: int = -1
    ckpt_interval: int = 10
    hf_save_interval: int = -1
    export_path: str = "~/exports/"
    bf16: bool = True
    epochs: int = Field(default=1, ge=1)
    max_training_steps: int | None = Field(default=None, ge=1)
    update_epochs_per_batch: int = Field(default=1, ge=1)
    train_batch_size: int = Field(default=1024, ge=1)
    policy_mini_batch_size: int = Field(default=256, ge=1)
    micro_train_batch_size_per_gpu: int = Field(default=1, ge=1)
    micro_forward_batch_size_per_gpu: int = Field(default=1, ge=1)
    max_tokens_per_microbatch: int = -1
    remove_microbatch_padding: bool = True
    eval_batch_size: int = Field(default=1024, ge=1)
    eval_before_train: bool = True
    eval_interval: int = 5
    max_prompt_length: int = Field(default=512, ge=1)
    flash_attn: bool = True
    project_name: str = "skyrl"
    run_name: str = "test_run"
    logger: str = "wandb"
    enable_ray_gpu_monitor: bool = True
    dump_eval_results: bool = True
    print_example_interval: int = 1


class SamplingParams(Part):
    """How tokens are chosen; `temperature` 0 is greedy, `top_k` -1 leaves all in."""

    max_generate_length: int = Field(default=1024, ge=1)
    repetition_penalty: float = Field(default=1.0, gt=0)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    logprobs: int | None = Field(default=1, ge=0, le=1)
    stop: tuple[str, ...] | None = None


class InferenceEngine(Part):
    """`engine_init_kwargs` are vLLM's own arguments by their names, `max_model_len` say, whatever else is in here."""

    model_dtype: str = "bfloat16"
    run_engines_locally: bool = True
    num_engines: int = Field(default=1, ge=1)
    backend: Literal["vllm"] = "vllm"
    weight_sync_backend: str = "nccl"
    tensor_parallel_size: int = Field(default=1, ge=1)
    pipeline_parallel_size: int = Field(default=1, ge=1)
    data_parallel_size: int = Field(default=1, ge=1)
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    max_num_batched_tokens: int = Field(default=8192, ge=1)
    enforce_eager: bool = False
    enable_ray_prometheus_stats: bool = True
    gpu_memory_utilization: float = Field(default=0.8, gt=0, le=1)
    max_num_seqs: int = Field(default=1024, ge=1)
    distributed_executor_backend: Literal["ray", "mp"] = "ray"
    engine_init_kwargs: dict[str, Any] = {}


class Generator(Part):
    """`max_input_length` follows `trainer.max_prompt_length` and `eval_sampling_params` is greedy with the training's
    `max_generate_length` where a spec says nothing else."""

    inference_engine: InferenceEngine = InferenceEngine()
    n_samples_per_prompt: int = Field(default=5, ge=1)
    batched: bool = False
    max_turns: int = Field(default=1, ge=1)
    max_input_length: int = Field(default=512, ge=1)
    chat_template_kwargs: dict[str, Any] = {}
    sampling_params: SamplingParams = SamplingParams()
    eval_sampling_params: SamplingParams = SamplingParams(temperature=0.0)
    eval_n_samples_per_prompt: int = Field(default=1, ge=1)
    use_conversation_multi_turn: bool = True
    zero_reward_on_non_stop: bool = False
    apply_overlong_filtering: bool = False
    step_wise_trajectories: bool = False
    vision_language_generator: bool = False


class SkyrlGym(Part):
    max_env_workers: int = Field(default=32, ge=0)


class Environment(Part):
    env_class: str = ENV_CLASS
    skyrl_gym: SkyrlGym = SkyrlGym()
