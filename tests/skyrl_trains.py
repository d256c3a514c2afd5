"""A spec in SkyRL's own hands, as far as they go without a GPU, told as JSON. Runs with SkyRL on its path.

What stands in for GPUs: an oracle in the place of the engines, and nothing in the place of the workers. Configuration, data sets,
environments by their registry, the training loop, evaluation and callbacks are SkyRL's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock, patch

from tests.adapter_folders import plain
from tests.skyrl_apart import as_on_python_312
from training.maze import oracle
from training.maze.actions import as_text
from training.spec import TrainSpec

HALF_WRITTEN, STEPS_LATE = 2, 1
AT_THE_END = (
    "trainer.hf_save_interval=100",
    "trainer.max_training_steps=3",
    "trainer.epochs=4",
    "loramux.training_mazes.count=8",
)


def main(specs: Path, out: Path) -> None:
    as_on_python_312()
    told: dict[str, Any] = {"defaults": defaults()}
    for file in sorted(specs.glob("*.yaml")):
        told[file.stem] = parsed(TrainSpec.load(file))
    small, paths = specs / "small.yaml", "trainer.export_path={0}"
    told["trained"] = trained(TrainSpec.load(small), Recorder())
    told["exported_at_the_end"] = trained(TrainSpec.load(small, [paths.format(out.parent / "end"), *AT_THE_END]), Recorder())
    told["in_trouble"] = trained(TrainSpec.load(small, [paths.format(out.parent / "trouble")]), Broken())
    told["failed"] = failed(TrainSpec.load(small), Recorder())
    out.write_text(json.dumps(told, default=str))


def defaults() -> dict[str, Any]:
    from skyrl.train.config import SkyRLTrainConfig

    return flat(SkyRLTrainConfig())


def parsed(spec: TrainSpec) -> dict[str, Any]:
    """What SkyRL understood; it validates what it got as it does before a run."""
    from training.skyrl.experiment import configured

    return flat(configured(spec))


def flat(part: Any, prefix: str = "") -> dict[str, Any]:
    if not dataclasses.is_dataclass(part):
        return {prefix.removesuffix("."): part}
    found: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        found |= flat(getattr(part, field.name), f"{prefix}{field.name}.")
    return found


class Recorder:
    """A publisher that notes what it is asked, among what else happens."""

    def __init__(self) -> None:
        self.happened: list[list[Any]] = []
        self.offered: dict[int, dict[str, float]] = {}
        self.digests: set[str] = set()

    def offer(self, saved: Any) -> None:
        self._note("offer", saved.step)
        self.offered[saved.step] = dict(saved.metrics)
        self.digests.add(saved.spec_digest)

    def scan(self, export_path: Any) -> None:
        self._note("scan", str(export_path))

    def close(self, timeout_s: float) -> None:
        self._note("close", timeout_s)

    def _note(self, name: str, what: Any) -> None:
        self.happened.append([name, what])


class Broken(Recorder):
    """One that fails whatever it is asked."""

    def _note(self, name: str, what: Any) -> None:
        super()._note(name, what)
        raise RuntimeError("no publisher today")


def experiment_of(spec: TrainSpec, publisher: Recorder) -> Any:
    from skyrl.train.dataset import PromptDataset
    from skyrl.train.entrypoints import main_base

    from training.skyrl.experiment import MazeExperiment, configured

    in_process = patch.object(main_base, "PromptDataset", lambda **named: PromptDataset(**(named | {"num_workers": 1})))
    no_gpus = patch.object(MazeExperiment, "get_colocate_pg", lambda self: None)
    with in_process, no_gpus:
        return MazeExperiment(configured(spec), spec, publisher)


def failed(spec: TrainSpec, publisher: Recorder) -> list[list[Any]]:
    """What the publisher is asked where the training does not even begin: here there are no GPUs."""
    experiment = experiment_of(spec, publisher)
    try:
        with patch.object(experiment, "_setup_trainer", side_effect=RuntimeError("no GPUs")):
            experiment.run()
    except RuntimeError as error:
        publisher.happened.append(["raised", str(error)])
    return publisher.happened


def trained(spec: TrainSpec, publisher: Recorder) -> dict[str, Any]:
    """SkyRL's own loop over our experiment: in which order it calls back, and what reaches the publisher."""
    experiment = experiment_of(spec, publisher)
    tracker = MagicMock()
    trainer = experiment.get_trainer(
        cfg=experiment.cfg,
        tracker=tracker,
        tokenizer=experiment.tokenizer,
        train_dataset=experiment.train_dataset,
        eval_dataset=experiment.eval_dataset,
        inference_engine_client=AsyncMock(),
        generator=Oracle(),
        colocate_pg=None,
    )
    without_gpus(trainer, publisher.happened)
    asyncio.run(trainer.train())
    experiment.callback.close()
    logged = [call.args[0] for call in tracker.log.call_args_list]
    return {
        "rows": [row["seed"] for row in experiment.train_dataset.dataframe],
        "happened": publisher.happened,
        "offered": publisher.offered,
        "digests": sorted(publisher.digests),
        "logged": [{key: value for key, value in one.items() if key.startswith("eval/")} for one in logged],
        "finished": tracker.finish.called,
    }


class Oracle:
    """In the place of SkyRL's generator and its engines: walks the oracle's way through SkyRL's registry of environments."""

    async def generate(self, generator_input: Any, disable_tqdm: bool = False) -> dict[str, Any]:
        import skyrl_gym
        from skyrl.train.generators.utils import get_rollout_metrics

        classes, rewards, metrics = generator_input["env_classes"], [], []
        for prompt, name, extras in zip(generator_input["prompts"], classes, generator_input["env_extras"], strict=True):
            env = skyrl_gym.make(name, env_config={}, extras=extras | {"max_turns": extras["maze"]["max_turns"]})
            env.init(prompt)
            done, reward, way = False, 0.0, [as_text(action, "keyword") for action in oracle(env.episode.maze)]
            while not done and way:
                step = env.step(way.pop(0))
                done, reward = step["done"], reward + step["reward"]
            rewards.append(reward)
            metrics.append(env.get_metrics())
        responses = [[1, 2] for _ in rewards]
        return {
            "prompt_token_ids": [[1] for _ in rewards],
            "response_ids": responses,
            "rewards": rewards,
            "loss_masks": [[1, 1] for _ in rewards],
            "stop_reasons": ["stop" for _ in rewards],
            "rollout_logprobs": None,
            "rollout_metrics": get_rollout_metrics(responses, rewards, metrics, classes),
        }


class Batch(dict):
    """As much of SkyRL's batch as its loop touches where workers are not there."""

    def __init__(self) -> None:
        super().__init__(rewards=None)
        self.metadata: dict[str, Any] = {"uids": []}


def without_gpus(trainer: Any, happened: list[list[Any]]) -> None:
    """Puts nothing in the place of the workers, and notes what happens in which order."""
    from skyrl.train.utils.callbacks import TrainingCallback

    def note(name: str) -> Any:
        return lambda *arguments: happened.append([name, trainer.global_step])

    events = [name for name in dir(TrainingCallback) if name.startswith("on_")]
    trainer.add_callback(type("Noted", (TrainingCallback,), {name: note(name) for name in events})())
    for name in ("convert_to_training_input", "fwd_logprobs_values_reward", "compute_advantages_and_returns"):
        setattr(trainer, name, lambda *arguments: Batch())
    trainer.train_critic_and_policy = lambda training_input: {"policy_loss": 0.5}
    trainer.postprocess_generator_output = lambda output, uids: (output, uids)
    trainer.init_weight_sync_state = lambda: None
    trainer.save_checkpoints = lambda: "checkpoint"
    trainer.dispatch = MagicMock()
    trainer.dispatch.get_lcm_dp_size.return_value = 1
    trainer.dispatch.save_weights_for_sampler = AsyncMock()
    trainer.dispatch.save_hf_model = lambda model, folder, tokenizer: export(Path(folder), trainer.global_step, happened)


def export(folder: Path, step: int, happened: list[list[Any]]) -> None:
    """As SkyRL 0.3.0: in place. One export is found half written, and whole a step later."""
    happened.append(["export", step])
    plain().write(folder)
    weights = folder / "adapter_model.safetensors"
    if step == HALF_WRITTEN:
        weights.rename(folder / "whole")
        weights.write_bytes((folder / "whole").read_bytes()[:100])
    if step == HALF_WRITTEN + STEPS_LATE:
        late = folder.parents[1] / f"global_step_{HALF_WRITTEN}" / "policy"
        if late.exists():
            (late / "whole").replace(late / "adapter_model.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
