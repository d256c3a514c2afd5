"""A run without an engine and without a model: a sampler that plays by dice and a learner that adds up, bit by bit the same."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from training.maze import MazeSpec, evaluation_set
from training.runs.plan import DataOrder, Evaluation, Plan
from training.trajectory import Sampling, Task, Trajectory

FIRST_SET = replace(evaluation_set("easy-64"), seeds=evaluation_set("easy-64").seeds[:4])
LARGE_SET = replace(evaluation_set("hard-128"), seeds=evaluation_set("hard-128").seeds[:3])
DECODINGS = {"sampled": Sampling(temperature=0.7), "greedy": Sampling(temperature=0.0)}
SPEC = {"trainer.policy.optimizer_config.lr": 0.001, "trainer.epochs": 2, "trainer.seed": 1}


def plan_in(folder: Path, **changed) -> Plan:
    """Six steps: two epochs of three batches of two mazes, two samples each."""
    plan = Plan(
        order=DataOrder((11, 12, 13, 14, 15, 16, 17), train_batch_size=2, epochs=2, seed=1),
        maze=MazeSpec(cell_px=16, actions="keyword"),
        n_samples_per_prompt=2,
        sampling=Sampling(temperature=0.7),
        evaluation=Evaluation((FIRST_SET,), (LARGE_SET,), DECODINGS, interval=2, before_train=True),
        ckpt_interval=2,
        hf_save_interval=2,
        max_ckpts_to_keep=2,
        ckpt_path=folder / "ckpts",
        export_path=folder / "exports",
        run_path=folder,
        adapter_paths=(folder / "adapters",),
        spec=SPEC,
        spec_digest="d1",
    )
    return replace(plan, **changed)


class ScriptedSampler:
    """What it samples depends on policy, task and sampling; `calls` says what it was told, `on_play` may get in between."""

    def __init__(self, on_play: Callable[[int], None] = lambda step: None):
        self.calls: list[str] = []
        self.policy = b"base"
        self.policy_step = 0
        self._on_play = on_play

    def use_adapter(self, folder: Path, policy_step: int) -> None:
        self.policy, self.policy_step = (folder / "adapter_model.safetensors").read_bytes(), policy_step
        self.calls.append(f"adapter {policy_step}")

    def use_base(self) -> None:
        self.policy, self.policy_step = b"base", 0
        self.calls.append("base")

    def play(self, tasks: Sequence[Task], sampling: Sampling) -> list[Trajectory]:
        self._on_play(self.policy_step)
        self.calls.append(f"play {len(tasks)} at {sampling.temperature:g}")
        return [self._played(task, sampling) for task in tasks]

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")

    def close(self) -> None:
        self.calls.append("close")

    def _played(self, task: Task, sampling: Sampling) -> Trajectory:
        seed = f"{self.policy!r} {task} {sampling if sampling.temperature else 'greedy'}"
        solved = random.Random(seed).random() < 0.5
        return trajectory(task, self.policy_step, solved)


def trajectory(
    task: Task, policy_step: int, solved: bool, replies: tuple[str, ...] = ("<action>up</action>", "hm")
) -> Trajectory:
    tokens = 4 * len(replies)
    return Trajectory(
        task=task,
        policy_step=policy_step,
        token_ids=tuple(range(3 + tokens)),
        prompt_tokens=3,
        loss_mask=(1,) * tokens,
        log_probs=(-0.5,) * tokens,
        pictured=(),
        replies=replies,
        outcomes=("moved",) * len(replies),
        reward=float(solved),
        solved=solved,
        stop_reason="done" if solved else "turns",
    )


class ScriptedLearner:
    """Its policy is a digest of all that it ever learned from, and of the dice of its own that it rolled meanwhile."""

    def __init__(self, seed: int = 1):
        self.policy = f"init {seed}"
        self.random = random.Random(seed)
        self.refuse: Callable[[str], None] = lambda what: None

    def update(self, trajectories: Sequence[Trajectory], *, step: int) -> dict[str, float]:
        assert {one.policy_step for one in trajectories} == {step - 1}, "stale"
        learned = f"{self.policy} {self.random.random()} {[(one.task, one.solved) for one in trajectories]}"
        self.policy = hashlib.sha256(learned.encode()).hexdigest()
        return {"loss": 0.1, "grad_norm": 1.0}

    def save_adapter(self, folder: Path) -> None:
        self.refuse("adapter")
        staging = folder.with_name(f"{folder.name}.staging")
        staging.mkdir(exist_ok=True)
        (staging / "adapter_model.safetensors").write_text(self.policy)
        (staging / "adapter_config.json").write_text("{}")
        staging.rename(folder)

    def save_state(self, folder: Path) -> None:
        self.refuse("state")
        with (folder / "policy.json").open("w") as out:
            for part in json.dumps([self.policy, self.random.getstate()]).partition(","):
                out.write(part)
                out.flush()
                sys.audit("scripted.part-written")

    def load_state(self, folder: Path) -> None:
        self.policy, (version, state, gauss) = json.loads((folder / "policy.json").read_text())
        self.random.setstate((version, tuple(state), gauss))
