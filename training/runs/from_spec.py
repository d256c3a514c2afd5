"""A specification as the plan of a run, and where its files go."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from training.maze import evaluation_set, training_mazes
from training.runs.plan import BadPlan, DataOrder, Decoding, Evaluation, Plan
from training.spec import SamplingParams, TrainSpec
from training.trajectory import Sampling

SHARED_MEMORY = Path("/dev/shm")


def seeded(spec: TrainSpec, seed: int) -> TrainSpec:
    return TrainSpec.from_values(spec.as_dict(), [f"trainer.seed={seed}"])


def plan_of(spec: TrainSpec, folder: Path, *, keep_paths: bool = False) -> Plan:
    """Of a spec that `check_local` has let pass. All files go below `folder`, or with `keep_paths` checkpoints and exports to
    where the spec says, if it says so. Raises BadPlan."""
    trainer, mazes = spec.trainer, spec.loramux.training_mazes
    seeds = tuple(seed for seed, _ in islice(training_mazes(spec.loramux.maze.size, mazes.first_seed), mazes.count))
    return Plan(
        order=DataOrder(seeds, trainer.train_batch_size, trainer.epochs, trainer.seed, trainer.max_training_steps),
        maze=spec.loramux.maze,
        n_samples_per_prompt=spec.generator.n_samples_per_prompt,
        sampling=sampling_of(spec.generator.sampling_params),
        evaluation=_evaluation(spec),
        ckpt_interval=trainer.ckpt_interval,
        hf_save_interval=trainer.hf_save_interval,
        max_ckpts_to_keep=trainer.max_ckpts_to_keep,
        ckpt_path=_place(spec, "ckpt_path", spec.ckpt_folder, folder / "ckpts", keep_paths),
        export_path=_place(spec, "export_path", spec.export_folder, folder / "exports", keep_paths),
        run_path=folder,
        adapter_paths=adapter_paths(folder),
        resume_mode=trainer.resume_mode or "none",
        resume_path=Path(trainer.resume_path) if trainer.resume_path else None,
        spec=plain(spec),
        spec_digest=spec.digest(),
    )


def decodings_of(spec: TrainSpec) -> Mapping[Decoding, Sampling]:
    """Raises BadPlan for a `greedy` that rolls dice."""
    greedy = sampling_of(spec.generator.eval_sampling_params)
    if greedy.temperature and "greedy" in spec.loramux.evaluation.decodings:
        raise BadPlan(
            f"generator.eval_sampling_params.temperature is {greedy.temperature}: 0 while greedy is one of "
            "loramux.evaluation.decodings"
        )
    known: dict[Decoding, Sampling] = {"sampled": sampling_of(spec.generator.sampling_params), "greedy": greedy}
    return {name: known[name] for name in spec.loramux.evaluation.decodings}


def sampling_of(params: SamplingParams) -> Sampling:
    return Sampling(params.temperature, params.top_p, params.top_k, params.max_generate_length)


def adapter_paths(folder: Path) -> tuple[Path, ...]:
    """For adapters on their way to the sampler: in memory, else in the run's folder. The same for a run that is resumed."""
    run = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
    in_memory = (SHARED_MEMORY / f"loramux-{os.getuid()}-{run}",) if os.access(SHARED_MEMORY, os.W_OK) else ()
    return (*in_memory, folder / "adapters")


def plain(spec: TrainSpec) -> dict[str, Any]:
    """Dotted keys and values as they are read from JSON again."""
    values: dict[str, Any] = json.loads(json.dumps(spec.values()))
    return values


def _evaluation(spec: TrainSpec) -> Evaluation:
    ours = spec.loramux.evaluation
    return Evaluation(
        sets=tuple(evaluation_set(name) for name in ours.sets),
        final_sets=tuple(evaluation_set(name) for name in ours.final_sets),
        decodings=decodings_of(spec),
        interval=spec.trainer.eval_interval,
        before_train=spec.trainer.eval_before_train,
        seed=ours.seed,
    )


def _place(spec: TrainSpec, key: str, said: Path, below: Path, keep_paths: bool) -> Path:
    is_said = getattr(spec.trainer, key) != getattr(TrainSpec().trainer, key)
    return said if keep_paths and is_said else below
