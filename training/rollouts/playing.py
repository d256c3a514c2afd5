"""Episodes in lock-step: all that are not over take one turn with each call of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from training.maze import Episode, MazeSpec, begin, messages, observe, step
from training.rollouts.conversation import Wording
from training.rollouts.errors import BadRollout
from training.trajectory import Sampling, Task, Trajectory, turn_dice


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be answered: ids with one image token per picture, the states that are pictured, the seed of the dice."""

    token_ids: tuple[int, ...]
    pictured: tuple[Episode, ...]
    dice: int


@dataclass(frozen=True, slots=True)
class Reply:
    """`prompt_tokens` is how many the engine read, image tokens in full. `token_ids` were sampled, the end of the turn among
    them, each with its log-prob at the sampling temperature. `text` is what a client would get."""

    prompt_tokens: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    text: str


class Engine(Protocol):
    """`room` is how many episodes it keeps in mind at once, `max_model_len` how many tokens of one, the reply among them."""

    room: int
    max_model_len: int

    def forget(self) -> None:
        """As new: what is answered from here on does not depend on anything before."""

    def reply(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Reply]: ...


@dataclass(frozen=True, slots=True)
class Rules:
    """`maze` is what tasks have that name no size of their own. Lengths are in tokens, image tokens in full: of the first
    prompt, and of a conversation that still gets a reply."""

    maze: MazeSpec
    max_prompt_length: int
    max_input_length: int

    def longest(self, sampling: Sampling, max_model_len: int) -> int:
        """The longest conversation that still gets a reply. Raises BadRollout where a prompt may not fit."""
        longest = min(self.max_input_length, max_model_len - sampling.max_generate_length)
        if longest < self.max_prompt_length:
            raise BadRollout(
                f"trainer.max_prompt_length is {self.max_prompt_length}: at most {longest}, the least of "
                f"generator.max_input_length ({self.max_input_length}) and of what the engine's max_model_len "
                f"({max_model_len}) leaves beside max_generate_length ({sampling.max_generate_length})"
            )
        return longest


def waves(tasks: Sequence[Task], room: int) -> list[list[int]]:
    """Places in `tasks`, in waves of at most `room` that are played one after the other. Tasks of one maze stay together where
    a whole group fits."""
    found: list[list[int]] = []
    for group in groups(tasks):
        for at in range(0, len(group), room):
            part = group[at : at + room]
            if not found or len(found[-1]) + len(part) > room:
                found.append([])
            found[-1] += part
    return found


def groups(tasks: Sequence[Task]) -> list[list[int]]:
    """Places in `tasks` by maze, in the order in which the mazes come."""
    found: dict[tuple[int | None, int], list[int]] = {}
    for place, task in enumerate(tasks):
        found.setdefault((task.size, task.maze_seed), []).append(place)
    return list(found.values())


def play(
    engine: Engine, wording: Wording, rules: Rules, tasks: Sequence[Task], sampling: Sampling, policy_step: int
) -> list[Trajectory]:
    """Plays each task to its end, in the order of `tasks`. Equal arguments, and an engine with the same policy, give equal
    trajectories. Raises BadRollout."""
    longest = rules.longest(sampling, engine.max_model_len)
    played: dict[int, Trajectory] = {}
    for wave in waves(tasks, engine.room):
        engine.forget()
        talks = [_Talk.begin(rules.maze, tasks[place], wording) for place in wave]
        _to_the_end(engine, wording, rules, talks, sampling, longest)
        played |= {place: talk.trajectory(policy_step) for place, talk in zip(wave, talks, strict=True)}
    return [played[place] for place in range(len(tasks))]


def _to_the_end(engine: Engine, wording: Wording, rules: Rules, talks: Sequence[_Talk], sampling: Sampling, longest: int) -> None:
    live = list(talks)
    while live:
        for talk, reply in zip(live, engine.reply([talk.prompt() for talk in live], sampling), strict=True):
            if not talk.replies and reply.prompt_tokens > rules.max_prompt_length:
                raise BadRollout(
                    f"the prompt of {talk.task} has {reply.prompt_tokens} tokens: trainer.max_prompt_length is "
                    f"{rules.max_prompt_length}"
                )
            talk.take(reply, wording, longest)
        live = [talk for talk in live if not talk.stop_reason]


@dataclass(slots=True)
class _Talk:
    """An episode that is being played."""

    task: Task
    episode: Episode
    token_ids: list[int]
    prompt_tokens: int
    pictured: list[Episode]
    loss_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    reward: float = 0.0
    stop_reason: str = ""

    @classmethod
    def begin(cls, maze: MazeSpec, task: Task, wording: Wording) -> _Talk:
        episode = begin(maze if task.size is None else replace(maze, size=task.size), task.maze_seed)
        ids = wording.prompt(messages(episode, with_pictures=False))
        return cls(task, episode, list(ids), len(ids), list(_pictured(episode)))

    def prompt(self) -> Prompt:
        return Prompt(tuple(self.token_ids), tuple(self.pictured), turn_dice(self.task.dice, len(self.replies)))

    def take(self, reply: Reply, wording: Wording, longest: int) -> None:
        """One turn: what was sampled stays as it is; what was seen next follows unless that is the end."""
        shown = len(self.pictured)
        tokens_of_picture = (reply.prompt_tokens - len(self.token_ids)) // shown + 1 if shown else 0
        turn = step(self.episode, reply.text)
        self._add(reply.token_ids, reply.log_probs, sampled=True)
        self.episode, self.reward = turn.episode, self.reward + turn.reward
        self.replies.append(reply.text)
        self.outcomes.append(turn.outcome)
        if turn.episode.done:
            self.stop_reason = "done" if turn.outcome == "stopped" or turn.episode.solved else "turns"
            return
        between = wording.between(reply.token_ids, observe(turn, with_pictures=False))
        seen = list(_pictured(turn.episode))
        length = reply.prompt_tokens + len(reply.token_ids) + len(between) + (tokens_of_picture - 1) * len(seen)
        if length > longest:
            self.stop_reason = "length"
            return
        self._add(between, (0.0,) * len(between), sampled=False)
        self.pictured += seen

    def _add(self, ids: Sequence[int], log_probs: Sequence[float], *, sampled: bool) -> None:
        self.token_ids += ids
        self.log_probs += log_probs
        self.loss_mask += [int(sampled)] * len(ids)

    def trajectory(self, policy_step: int) -> Trajectory:
        return Trajectory(
            task=self.task,
            policy_step=policy_step,
            token_ids=tuple(self.token_ids),
            prompt_tokens=self.prompt_tokens,
            loss_mask=tuple(self.loss_mask),
            log_probs=tuple(self.log_probs),
            pictured=tuple(self.pictured),
            replies=tuple(self.replies),
            outcomes=tuple(self.outcomes),
            reward=self.reward,
            solved=self.episode.solved,
            stop_reason=self.stop_reason,
        )


def _pictured(episode: Episode) -> Iterator[Episode]:
    if episode.spec.observation == "image":
        yield episode
