"""Plays tickets through SkyRL's own registry, the oracle's way, and prints what came as JSON. Runs with SkyRL on its path."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import skyrl_gym
from skyrl_gym.envs import register

from training.maze import oracle
from training.maze.actions import as_text
from training.skyrl.tickets import ENV_CLASS


def main(file: Path) -> None:
    register(id=ENV_CLASS, entry_point="training.skyrl.environment:MazeEnv")
    played = []
    for line in file.read_text().splitlines():
        extras = json.loads(line)
        env = skyrl_gym.make(ENV_CLASS, env_config={}, extras=extras | {"max_turns": extras["maze"]["max_turns"]})
        conversation, _ = env.init(extras["prompt"])
        replies = [as_text(action, "tuple") for action in oracle(env.episode.maze)]
        steps = []
        for reply in replies:
            steps.append(env.step(reply))
            if steps[-1]["done"]:
                break
        played.append(
            {
                "first": [part["type"] for part in conversation[0]["content"]],
                "shown": [len(one["observations"]) for one in steps],
                "rewards": [one["reward"] for one in steps],
                "metrics": env.get_metrics(),
                "digest": env.episode.maze.digest(),
            }
        )
    both = type(env).aggregate_metrics([one["metrics"] for one in played])
    refused = []
    for extras in ({"maze": {}}, {"seed": 1, "maze": {}, "max_turns": 15}):
        try:
            skyrl_gym.make(ENV_CLASS, env_config={}, extras=extras)
        except Exception as error:  # noqa: BLE001 - what it says is what is looked at
            refused.append(str(error))
    print(json.dumps({"played": played, "together": both, "refused": refused}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
