"""Conversations of somebody who knows the way and errs on purpose: what the second lesson shows.

At each turn the oracle's action is what is to be learnt, also where another one was taken: so the base meets the places that
mistakes lead to, and what to do there (as DAgger does: Ross et al., AISTATS 2011), and can't just repeat what was done so far.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from training.maze import Episode, Maze, MazeSpec, begin, oracle, step
from training.maze.actions import as_text
from training.maze.grid import MOVES

SHORT_TURNS = 6


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One walk: the T states that were pictured, what was taken in each and what the oracle wanted, and the T - 1 feedbacks."""

    states: tuple[Episode, ...]
    taken: tuple[str, ...]
    wanted: tuple[str, ...]
    feedbacks: tuple[str, ...]


def demonstrate(spec: MazeSpec, seed: int, mistakes: float, dice: random.Random, most_turns: int | None = None) -> Demonstration:
    """A walk through the maze of a seed; with the chance `mistakes` a turn takes any move, whatever it leads to. It is broken off
    after `most_turns`."""
    episode = begin(spec, seed)
    states, taken, wanted, feedbacks = [], [], [], []
    while not episode.done and len(states) != most_turns:
        right = oracle(episode.maze, episode.position)[0]
        action = dice.choice(tuple(MOVES)) if dice.random() < mistakes else right
        turn = step(episode, as_text(action, spec.actions))
        states.append(episode)
        taken.append(action)
        wanted.append(right)
        if not turn.episode.done:
            feedbacks.append(turn.feedback)
        episode = turn.episode
    return Demonstration(tuple(states), tuple(taken), tuple(wanted), tuple(feedbacks[: len(states) - 1]))


def demonstrations(
    spec: MazeSpec, mazes: Sequence[tuple[int, Maze]], mistakes: float, seed: int, short: float = 0.0
) -> Iterator[Demonstration]:
    """Without end, mazes by chance; the share `short` of walks is broken off within SHORT_TURNS, for a lesson that costs less."""
    dice = random.Random(f"demonstrations-{seed}")
    while True:
        most_turns = dice.randint(1, SHORT_TURNS) if dice.random() < short else None
        yield demonstrate(spec, dice.choice(mazes)[0], mistakes, dice, most_turns)
