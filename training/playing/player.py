"""A player: mazes through an OpenAI endpoint, many at once, each a conversation of its own with the messages of training.

What the endpoint could not answer was not played; it is never counted as unsolved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import openai
from openai.types.chat import ChatCompletion

from training.maze import Episode, MazeSpec, Turn, begin, messages, observe, step
from training.maze.observing import Message
from training.trajectory import Played, Sampling, Task, actions_of, turn_dice

LEAST_FAILURES = 8
ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class NotPlayed:
    """An episode that broke off after `turns`: `reason` is the endpoint's error code, `abandoned` for those that were not begun
    because nothing answered any more."""

    maze_seed: int
    size: int
    turns: int
    reason: str
    message: str


class Unanswerable(Exception):
    """The endpoint answers nobody who asks like this: no such model, a key that is none. Holds its `code` and words."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class BadAnswer(Exception):
    """A 200 that holds no completion."""


@dataclass(frozen=True, slots=True)
class Table:
    """How mazes are played: at which `model`, by which rules, how replies are decoded, how many `at_once`. A conversation that
    grows beyond `max_input_length` tokens gets no reply any more, as in training; None sets no limit."""

    model: str
    spec: MazeSpec
    sampling: Sampling
    at_once: int = 16
    max_input_length: int | None = None


@dataclass(slots=True)
class Seen:
    """What is seen meanwhile: `refs` are the models that answered, `failures` how many episodes in a row broke off."""

    refs: set[str] = field(default_factory=set)
    failures: int = 0


def ended_by(turn: Turn) -> str:
    """`done` where a reply ended the episode, `turns` where the limit did."""
    return "done" if turn.episode.solved or turn.outcome == "stopped" else "turns"


async def play(
    client: openai.AsyncOpenAI,
    table: Table,
    tasks: Sequence[Task],
    seen: Seen,
    heard: Callable[[Played | NotPlayed], None] = lambda one: None,
) -> list[Played | NotPlayed]:
    """In the order of tasks. `client` repeats what is worth it (429, 5xx, broken connections), with the server's own pauses.

    When as many episodes in a row broke off as are played at once (8 at least), the rest is not begun. Raises Unanswerable.
    """
    gate = asyncio.Semaphore(table.at_once)
    limit = max(LEAST_FAILURES, table.at_once)

    async def one(task: Task) -> Played | NotPlayed:
        async with gate:
            if seen.failures >= limit:
                gave_up = f"{seen.failures} episodes in a row broke off before it"
                result: Played | NotPlayed = NotPlayed(task.maze_seed, _size(table, task), 0, ABANDONED, gave_up)
            else:
                result = await play_one(client, table, task, seen)
                seen.failures = 0 if isinstance(result, Played) else seen.failures + 1
            heard(result)
            return result

    try:
        async with asyncio.TaskGroup() as group:
            playing = [group.create_task(one(task)) for task in tasks]
    except BaseExceptionGroup as failed:  # the first of them ended the others
        raise failed.exceptions[0] from None
    return [task.result() for task in playing]


async def play_one(
    client: openai.AsyncOpenAI,
    table: Table,
    task: Task,
    seen: Seen,
    watch: Callable[[str, Turn], None] = lambda reply, turn: None,
) -> Played | NotPlayed:
    """One episode; `watch` is told each reply and what it came to. Raises Unanswerable."""
    episode = begin(replace(table.spec, size=_size(table, task)), task.maze_seed)
    conversation, replies = messages(episode), []
    while True:
        try:
            reply, prompt_tokens = await _reply(client, table, task, conversation, seen)
        except (openai.NotFoundError, openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise Unanswerable(_code(error), _words(error)) from None
        except (openai.APIError, BadAnswer) as error:
            return NotPlayed(task.maze_seed, episode.spec.size, len(replies), _code(error), _words(error))
        if replies and table.max_input_length and prompt_tokens > table.max_input_length:
            return _played(task, episode, replies, "length")
        replies.append(reply)
        turn = step(episode, reply)
        episode = turn.episode
        watch(reply, turn)
        if episode.done:
            return _played(task, episode, replies, ended_by(turn))
        conversation += [{"role": "assistant", "content": reply}, *observe(turn)]


async def _reply(
    client: openai.AsyncOpenAI, table: Table, task: Task, conversation: list[Message], seen: Seen
) -> tuple[str, int]:
    """What it says, and how many tokens it read; 0 where it does not tell."""
    sampling = table.sampling
    body: dict[str, Any] = {
        "model": table.model,
        "messages": conversation,
        "max_tokens": sampling.max_generate_length,
        "temperature": sampling.temperature,
    }
    if sampling.temperature > 0:
        turn = sum(message["role"] == "assistant" for message in conversation)
        body |= {"top_p": sampling.top_p, "seed": turn_dice(task.dice, turn)}
        if sampling.top_k > 0:
            body["top_k"] = sampling.top_k
    try:
        # not `chat.completions.create`: it walks through every part of every message by its type, 10 ms for 15 pictures
        answer = await client.post("/chat/completions", cast_to=ChatCompletion, body=body)
    except ValueError as error:  # no JSON
        raise BadAnswer(f"the answer is no completion: {error}") from None
    if not isinstance(answer, ChatCompletion) or not answer.choices:
        raise BadAnswer("the answer is no completion")
    seen.refs.add(answer.model)
    return answer.choices[0].message.content or "", answer.usage.prompt_tokens if answer.usage else 0


def _played(task: Task, episode: Episode, replies: Sequence[str], stop_reason: str) -> Played:
    spec = episode.spec
    return Played(task.maze_seed, spec.size, episode.solved, episode.turns, actions_of(replies, spec), stop_reason)


def _size(table: Table, task: Task) -> int:
    return task.size or table.spec.size


def _code(error: openai.APIError | BadAnswer) -> str:
    if isinstance(error, BadAnswer):
        return "bad_answer"
    if isinstance(error, openai.APITimeoutError):
        return "timed_out"
    if isinstance(error, openai.APIConnectionError):
        return "no_connection"
    status = getattr(error, "status_code", None)
    return str(error.code or (f"http_{status}" if status else "bad_answer"))


def _words(error: openai.APIError | BadAnswer) -> str:
    body = getattr(error, "body", None)
    return str((body.get("message") if isinstance(body, dict) else None) or error)
