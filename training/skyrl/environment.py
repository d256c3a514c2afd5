"""The maze as an environment of SkyRL's gym. Only this module needs `skyrl_gym`; it runs in SkyRL's own environment.

    skyrl_gym.envs.register(id="loramux_maze", entry_point="training.skyrl.environment:MazeEnv")

is said in the task that trains: each process has a registry of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from training.maze import MazeSpec, begin, messages, observe, step
from training.maze.spec import BadSpec


class MazeEnv(BaseTextEnv):
    """`extras` is a ticket's columns: `seed` and `maze` (the spec's fields). SkyRL adds `max_turns` from `generator.max_turns`;
    it has to be the maze's, or episodes would end unseen. Raises BadSpec. Instances share nothing: any thread may step one."""

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        extras = extras or {}
        if extras.get("seed") is None:
            raise BadSpec("a ticket has no seed: without one the samples of a group would each get another maze")
        spec = MazeSpec(**extras.get("maze", {}))
        self.max_turns = int(extras.get("max_turns", spec.max_turns))
        if self.max_turns != spec.max_turns:
            raise BadSpec(f"generator.max_turns is {self.max_turns}, the maze's is {spec.max_turns}: they have to be the same")
        self.source = str(extras.get("data_source", "unknown"))
        self.episode = begin(spec, int(extras["seed"]))

    def init(self, prompt: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The ticket's prompt is a placeholder: what is asked is the maze's own task, with its picture."""
        return messages(self.episode), {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        turn = step(self.episode, action)
        self.episode = turn.episode
        self.turns = turn.episode.turns
        return BaseTextEnvStepOutput(
            observations=observe(turn),
            reward=turn.reward,
            done=turn.episode.done,
            metadata={"outcome": turn.outcome, "solved": turn.episode.solved},
        )

    def get_metrics(self) -> dict[str, Any]:
        """Solved is what the maze says, so that a reward that pays for form is never counted as a solved maze."""
        return {"source": self.source, "solved": float(self.episode.solved), "turns": float(self.episode.turns)}

    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Of each source (a set, or `train`) how many mazes and how many of them solved: counts, since SkyRL adds up what several
        batches of an evaluation tell, unless the name says that it is a mean."""
        told: dict[str, float] = defaultdict(float)
        for one in metrics:
            told[f"{one['source']}/mazes"] += 1
            told[f"{one['source']}/solved"] += one["solved"]
        if metrics:
            told["turns_mean"] = sum(one["turns"] for one in metrics) / len(metrics)
        return dict(told)
