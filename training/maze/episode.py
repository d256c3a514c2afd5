"""An episode as a value, and one step of it: the same episode and the same reply always give the same next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from training.maze.actions import STOP, Mistake, is_well_formed, parse
from training.maze.grid import MOVES, Cell, Maze, make_maze
from training.maze.spec import MazeSpec

STATE_VERSION = 1
FEEDBACK = {
    "unreadable": "No action could be read from the reply.",
    "not_a_pair": "An action is a pair of a name and a value.",
    "unknown_name": "There is no action of that name.",
    "bad_direction": "A direction is a number from 0 to 3.",
    "bad_stop": "Stop takes a word of at most four letters.",
    "bump": "A wall is in the way; nothing moved.",
    "moved": "Moved.",
    "stopped": "Stopped.",
}


@dataclass(frozen=True, slots=True)
class Episode:
    """`turns` is how many replies were taken, `well_formed` how many of them had the three tags, `left_goal` whether the agent
    once stood on the goal and walked off it, which the picture shows. Solved is what the maze says, never a reward."""

    spec: MazeSpec
    maze: Maze
    seed: int
    position: Cell
    turns: int = 0
    well_formed: int = 0
    left_goal: bool = False
    done: bool = False
    solved: bool = False

    @property
    def turns_left(self) -> int:
        return self.spec.max_turns - self.turns

    def to_state(self) -> dict[str, Any]:
        """JSON that `from_state` makes the same episode of, in any process."""
        return {
            "version": STATE_VERSION,
            "spec": self.spec.as_dict(),
            "seed": self.seed,
            "position": list(self.position),
            "turns": self.turns,
            "well_formed": self.well_formed,
            "left_goal": self.left_goal,
            "done": self.done,
            "solved": self.solved,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Episode:
        """Raises ValueError for a state of another version."""
        if state["version"] != STATE_VERSION:
            raise ValueError(f"a maze's state of version {state['version']}: only {STATE_VERSION} is known")
        spec = MazeSpec(**state["spec"])
        row, column = state["position"]
        rest = {name: state[name] for name in ("turns", "well_formed", "left_goal", "done", "solved")}
        return cls(spec, make_maze(spec.size, state["seed"]), state["seed"], (row, column), **rest)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a reply came to: the episode after it, what it did (a key of FEEDBACK), and what it paid."""

    episode: Episode
    outcome: str
    reward: float

    @property
    def feedback(self) -> str:
        return FEEDBACK[self.outcome]


def begin(spec: MazeSpec, seed: int) -> Episode:
    maze = make_maze(spec.size, seed)
    return Episode(spec, maze, seed, maze.start)


def step(episode: Episode, reply: str) -> Turn:
    """One reply: whatever it says costs a turn, only a move onto floor moves. Raises ValueError once the episode is over."""
    if episode.done:
        raise ValueError(f"the episode of seed {episode.seed} is over after {episode.turns} turns")
    spec = episode.spec
    taken = replace(episode, turns=episode.turns + 1, well_formed=episode.well_formed + is_well_formed(reply))
    action = parse(reply, spec.actions, spec.prompt)
    if isinstance(action, Mistake):
        return _ended(taken, action.kind)
    if action.name == STOP:
        return _ended(replace(taken, done=True, solved=taken.position == taken.maze.goal), "stopped")
    down, right = MOVES[action.name]
    there = (taken.position[0] + down, taken.position[1] + right)
    if not taken.maze.is_floor(there):
        return _ended(taken, "bump")
    arrived = there == taken.maze.goal and not spec.stop_required
    left = taken.left_goal or taken.position == taken.maze.goal
    return _ended(replace(taken, position=there, left_goal=left, done=arrived, solved=arrived), "moved")


def _ended(episode: Episode, outcome: str) -> Turn:
    """The turn limit ends what nothing else has ended; the last turn pays."""
    if episode.turns_left <= 0:
        episode = replace(episode, done=True)
    return Turn(episode, outcome, _reward(episode) if episode.done else 0.0)


def _reward(episode: Episode) -> float:
    if episode.spec.reward == "sparse":
        return float(episode.solved)
    return 0.8 * episode.solved + 0.2 * episode.well_formed / episode.turns
