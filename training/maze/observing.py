"""What an agent is told: the task first, then after each reply what it did, each time with a picture. OpenAI's messages."""

from __future__ import annotations

from typing import Any

from training.maze.actions import as_text
from training.maze.episode import Episode, Turn
from training.maze.rendering import data_uri, picture, text_picture

Message = dict[str, Any]


def messages(episode: Episode, *, with_pictures: bool = True) -> list[Message]:
    """The conversation's begin: one user message with the task and the picture. Without pictures a part `{"type": "image"}`
    stands where each would be, which is all that chat templates look for."""
    return [_message(episode, task(episode), with_pictures)]


def observe(turn: Turn, *, with_pictures: bool = True) -> list[Message]:
    """What follows a reply: nothing when the episode is over."""
    return [] if turn.episode.done else [_message(turn.episode, turn.feedback, with_pictures)]


def task(episode: Episode) -> str:
    """The rules in words, with one example of each action."""
    spec = episode.spec
    size = spec.size
    colours = (
        "Walls are grey, floor is white, you are the blue disc and the goal is the red square."
        if spec.observation == "image"
        else "Walls are #, floor is blank, you are A and the goal is T."
    )
    ends = (
        "The maze is solved when you say stop on the goal; stop anywhere else ends it unsolved."
        if spec.stop_required
        else "The maze is solved when you reach the goal."
    )
    how = (
        "Name right, up, left or down as your action."
        if spec.actions == "keyword"
        else "A move is ('move', d) with d 0 for right, 1 for up, 2 for left, 3 for down."
    )
    examples = f"For example {as_text('up', spec.actions)}, or {as_text('stop', spec.actions)}."
    return (
        f"This is a maze of {size} by {size} cells. {colours} Each reply moves you by one cell or stops. {ends} "
        f"{how} {examples} You have {spec.max_turns} turns. Reply with exactly one action."
    )


def _message(episode: Episode, text: str, with_pictures: bool) -> Message:
    """`skyrl` puts the text first; `visgym` the picture, and says after the text how many turns are left."""
    if episode.spec.prompt == "visgym":
        text = f"{text}\nTurn {episode.turns + 1}, {episode.turns_left} left."
    if episode.spec.observation == "text":
        return {"role": "user", "content": f"{text}\n{text_picture(episode)}"}
    words = {"type": "text", "text": text}
    image: Message = {"type": "image"}
    if with_pictures:
        image = {"type": "image_url", "image_url": {"url": data_uri(picture(episode))}}
    return {"role": "user", "content": [image, words] if episode.spec.prompt == "visgym" else [words, image]}
