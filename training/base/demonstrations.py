"""Conversations of somebody who knows the way and errs on purpose: what the second lesson shows.

At each turn the oracle's action is what is to be learnt, also where another one was taken: so the base meets the places that
mistakes lead to, and what to do there (as DAgger does: Ross et al., AISTATS 2011), and can't just repeat what was done so far.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from training.maze import Episode, Maze, MazeSpec, Turn, begin, oracle, step
from training.maze.actions import as_text
from training.maze.grid import MOVES

SHORT_TURNS = 6


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One walk of T turns: the states that were pictured, what the oracle wanted in each, what was taken, and what came of it."""

    states: tuple[Episode, ...]
    wanted: tuple[str, ...]
    taken: tuple[str, ...]
    turns: tuple[Turn, ...]


def demonstrate(spec: MazeSpec, seed: int, mistakes: float, dice: random.Random, most_turns: int | None = None) -> Demonstration:
    """A walk through the maze of a seed; with the chance `mistakes` a turn takes any move, whatever it leads to. It is broken off
    after `most_turns`."""
    episode = begin(spec, seed)
    states, wanted, taken, turns = [], [], [], []
    while not episode.done and len(states) != most_turns:
        states.append(episode)
        wanted.append(oracle(episode.maze, episode.position)[0])
        taken.append(dice.choice(tuple(MOVES)) if dice.random() < mistakes else wanted[-1])
        turns.append(step(episode, as_text(taken[-1], spec.actions)))
        episode = turns[-1].episode
    return Demonstration(tuple(states), tuple(wanted), tuple(taken), tuple(turns))


def demonstrations(
    spec: MazeSpec, mazes: Sequence[tuple[int, Maze]], mistakes: float, seed: int, short: float = 0.0
) -> Iterator[Demonstration]:
    """Without end, mazes by chance; the share `short` of walks is broken off within SHORT_TURNS, for a lesson that costs less."""
    dice = random.Random(f"demonstrations-{seed}")
    while True:
        most_turns = dice.randint(1, SHORT_TURNS) if dice.random() < short else None
        yield demonstrate(spec, dice.choice(mazes)[0], mistakes, dice, most_turns)
