"""What is played and what came of it, as values between rollouts, learner and evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from training.maze import Action, Episode, MazeSpec, parse


def dice(*of: int | str) -> int:
    """A seed (0 to 2^63 - 1) that depends on all that it is of; the same in every process."""
    digest = hashlib.blake2b("\0".join(map(str, of)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def turn_dice(of_episode: int, turn: int) -> int:
    """The seed of one turn, so that a turn's dice don't depend on how many tokens came before."""
    return dice(of_episode, turn)


@dataclass(frozen=True, slots=True)
class Task:
    """One episode to play: a maze by its seed, which of the group's samples it is, and the seed of its dice (0 to 2^63 - 1).
    `size` is the maze's cells a side where that is not what the run's rules say: evaluation sets have sizes of their own."""

    maze_seed: int
    sample: int = 0
    dice: int = 0
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; `temperature` 0 is greedy. `top_k` -1 and `top_p` 1 leave all tokens in."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_generate_length: int = 1024


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One played episode, token by token as the engine saw and sampled it; nothing of it is ever tokenised again.

    `token_ids` is the whole conversation with one image token per picture, not yet expanded; the first `prompt_tokens` of them
    are the first prompt, the T that follow are replies and observations. `loss_mask` (T) is 1 where the engine sampled the token;
    `log_probs` (T) are the engine's at the sampling temperature there, 0 elsewhere. `pictured` are the states whose pictures the
    image tokens stand for, in order. `policy_step` says which policy sampled. `stop_reason` is `done`, `turns` or `length`.
    """

    task: Task
    policy_step: int
    token_ids: tuple[int, ...]
    prompt_tokens: int
    loss_mask: tuple[int, ...]
    log_probs: tuple[float, ...]
    pictured: tuple[Episode, ...]
    replies: tuple[str, ...]
    outcomes: tuple[str, ...]
    reward: float
    solved: bool
    stop_reason: str

    @property
    def turns(self) -> int:
        return len(self.replies)

    @property
    def sampled_tokens(self) -> int:
        return sum(self.loss_mask)


@dataclass(frozen=True, slots=True)
class Played:
    """What is kept of an episode of an evaluation, whoever played it, the trainer or a client of the gateway: one JSON line.

    `actions` names what each reply asked for, a mistake as `?` and its kind; `solved` is what the environment says.
    """

    maze_seed: int
    size: int
    solved: bool
    turns: int
    actions: tuple[str, ...]
    stop_reason: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"actions": list(self.actions)}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Played:
        """Raises KeyError for a row that lacks a field; what it has beside them is left out."""
        return cls(**{name: row[name] for name in cls.__slots__} | {"actions": tuple(row["actions"])})


def actions_of(replies: Sequence[str], spec: MazeSpec) -> tuple[str, ...]:
    found = [parse(reply, spec.actions, spec.prompt) for reply in replies]
    return tuple(one.name if isinstance(one, Action) else f"?{one.kind}" for one in found)
