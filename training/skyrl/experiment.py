"""The maze in SkyRL's trainer, from a spec: `python -m training.skyrl.experiment SPEC`, in SkyRL's own environment on a cluster.

The driver reads the spec and starts a task; the task registers the environment, writes the tickets and trains. Needs `skyrl`.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import initialize_ray, validate_cfg
from skyrl_gym.envs.registration import register, registry

from training.publishing.of_spec import publisher_of
from training.skyrl.callback import PublishCallback, PublisherLike
from training.skyrl.overrides import EVALUATION, TRAIN, evaluated_as, overrides, ticket_files
from training.skyrl.tickets import ENV_CLASS, evaluation_tickets, training_tickets, write
from training.spec import TrainSpec

log = logging.getLogger("loramux.skyrl")

ENTRY_POINT = "training.skyrl.environment:MazeEnv"


class MazeExperiment(BasePPOExp):
    """SkyRL's experiment with our tickets and, where the spec publishes, our callback. Made in the task that trains: each
    process has a registry of environments of its own."""

    def __init__(self, cfg: SkyRLTrainConfig, spec: TrainSpec, publisher: PublisherLike | None = None) -> None:
        register_maze()
        write_tickets(spec)
        self.spec = spec
        self.callback = None if publisher is None else _callback(spec, publisher)
        super().__init__(cfg)

    def get_trainer(self, *arguments: Any, **named: Any) -> Any:
        trainer = super().get_trainer(*arguments, **named)
        if self.callback is not None:
            trainer.add_callback(self.callback)
        return trainer

    def run(self) -> None:
        try:
            super().run()
        finally:
            if self.callback is not None:
                self.callback.close()


def register_maze() -> None:
    """Once for each process."""
    if ENV_CLASS not in registry:
        register(id=ENV_CLASS, entry_point=ENTRY_POINT)


def write_tickets(spec: TrainSpec) -> None:
    """A row for each training maze, and one for each maze of the sets that are evaluated."""
    mazes, files = spec.loramux.training_mazes, ticket_files(spec)
    write(training_tickets(spec.loramux.maze, mazes.count, mazes.first_seed), Path(files[TRAIN]))
    sets = (evaluation_tickets(spec.loramux.maze, name) for name in spec.loramux.evaluation.sets)
    write((ticket for one in sets for ticket in one), Path(files[EVALUATION]))


def configured(spec: TrainSpec) -> SkyRLTrainConfig:
    """What SkyRL makes of the spec. Raises BadTrainSpec, and whatever SkyRL raises of what it validates itself."""
    cfg = SkyRLTrainConfig.from_cli_overrides(overrides(spec))
    validate_cfg(cfg)
    return cfg


def _callback(spec: TrainSpec, publisher: PublisherLike) -> PublishCallback:
    return PublishCallback(
        publisher,
        spec.export_folder,
        spec_digest=spec.digest(),
        decoding=evaluated_as(spec),
        close_timeout_s=spec.loramux.publish.close_timeout_s,
    )


@ray.remote(num_cpus=1)
def train(cfg: SkyRLTrainConfig, spec: TrainSpec) -> None:
    MazeExperiment(cfg, spec, publisher_of(spec, spec.trainer.run_name, log.info)).run()


def main(file: str) -> None:
    spec = TrainSpec.load(Path(file))
    cfg = configured(spec)
    initialize_ray(cfg)
    ray.get(train.remote(cfg, spec))


if __name__ == "__main__":
    main(sys.argv[1])
