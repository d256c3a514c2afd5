"""What is played and what came of it, as values between rollouts, learner and evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from training.maze import Episode


@dataclass(frozen=True, slots=True)
class Task:
    """One episode to play: a maze by its seed, which of the group's samples it is, and the seed of its dice (0 to 2^63 - 1)."""

    maze_seed: int
    sample: int = 0
    dice: int = 0


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
