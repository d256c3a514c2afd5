"""One process of a learner: `python -m tests.integration.learner_program BASE OUT LAST [--after N]`.

Makes steps up to LAST, from the state that OUT holds of step N or from the start; leaves states and adapters by step in OUT.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from tests.unit.training.learner_data import play, spec_of
from training.learner import Learner, join, leave

GROUPS = 3  # with mini-batches of two, some processes have nothing to do now and then
SETTINGS = (
    "trainer.algorithm.use_kl_loss=true",
    "trainer.algorithm.loss_reduction=sequence_mean",
    "trainer.micro_train_batch_size_per_gpu=1",
    "trainer.policy.optimizer_config.lr=1.0e-4",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("last", type=int)
    parser.add_argument("--after", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = join("cpu")
    learner = Learner(spec_of(options.base, *SETTINGS), world)
    if options.after:
        learner.load_state(options.out / f"state-{options.after}")
    for step in range(options.after + 1, options.last + 1):
        metrics = learner.update(play(options.base, GROUPS, policy_step=step - 1, seed=step), step=step)
        learner.save_state(options.out / f"state-{step}")
        learner.save_adapter(options.out / f"adapter-{step}-after-{options.after}")
        if world.rank == 0:
            (options.out / f"metrics-{step}-after-{options.after}.json").write_text(json.dumps(metrics))
    leave()


if __name__ == "__main__":
    main()
