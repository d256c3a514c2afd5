"""What a step's or an evaluation's trajectories come to. A solve is what the environment says, never a reward."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean

from training.maze import MazeSpec
from training.runs.events import EvalEvent, Line, StepEvent
from training.trajectory import Played, Trajectory, actions_of


def step_event(
    step: int, epoch: int, trajectories: Sequence[Trajectory], seconds: Mapping[str, float], learner: Mapping[str, float]
) -> StepEvent:
    replies = sum(one.turns for one in trajectories)
    return StepEvent(
        step=step,
        epoch=epoch,
        solve_rate=mean(float(one.solved) for one in trajectories),
        reward_mean=mean(one.reward for one in trajectories),
        mixed_groups=_mixed(trajectories),
        turns_mean=replies / len(trajectories),
        reply_tokens_mean=sum(one.sampled_tokens for one in trajectories) / max(1, replies),
        cut_short=mean(float(one.stop_reason == "length") for one in trajectories),
        episodes=len(trajectories),
        sampled_tokens=sum(one.sampled_tokens for one in trajectories),
        seconds=dict(seconds),
        learner=dict(learner),
    )


def eval_event(
    step: int, held_out: str, decoding: str, trajectories: Sequence[Trajectory], seconds: float, file: str
) -> EvalEvent:
    return EvalEvent(
        step=step,
        set=held_out,
        decoding=decoding,
        mazes=len(trajectories),
        solved=sum(one.solved for one in trajectories),
        turns_mean=mean(one.turns for one in trajectories),
        sampled_tokens=sum(one.sampled_tokens for one in trajectories),
        seconds=seconds,
        file=file,
    )


def played(trajectory: Trajectory, spec: MazeSpec) -> Played:
    """`spec` is the run's, whose way of writing actions the replies keep to."""
    return Played(
        maze_seed=trajectory.task.maze_seed,
        size=trajectory.task.size or spec.size,
        solved=trajectory.solved,
        turns=trajectory.turns,
        actions=actions_of(trajectory.replies, spec),
        stop_reason=trajectory.stop_reason,
    )


def played_by(file: Path) -> dict[int, Played]:
    """An evaluation's file by the mazes' seeds; empty where there is none."""
    if not file.exists():
        return {}
    rows = [Played.from_dict(json.loads(line)) for line in file.read_text().splitlines()]
    return {row.maze_seed: row for row in rows}


def metrics_at(lines: Iterable[Line], step: int) -> dict[str, float]:
    """What is known of the adapter of a step, by names that go into its manifest."""
    found: dict[str, float] = {}
    for event in (line.event for line in lines):
        if isinstance(event, StepEvent) and event.step == step:
            found |= {"train/solve_rate": event.solve_rate, "train/reward_mean": event.reward_mean}
        elif isinstance(event, EvalEvent) and event.step == step:
            of = f"eval/{event.set}/{event.decoding}"
            found |= {f"{of}/solve_rate": event.solve_rate, f"{of}/solved": event.solved, f"{of}/mazes": event.mazes}
    return found


def _mixed(trajectories: Sequence[Trajectory]) -> float:
    rewards: dict[int, set[float]] = {}
    for one in trajectories:
        rewards.setdefault(one.task.maze_seed, set()).add(one.reward)
    return mean(float(len(found) > 1) for found in rewards.values())
