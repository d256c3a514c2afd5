"""Fixed sets of mazes that everybody can evaluate on, and mazes to train on that are in none of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from training.maze.grid import Maze, make_maze, oracle
from training.maze.spec import EASY, HARD

# Seeds of evaluation sets lie far from those that anybody begins with; which mazes they are is what counts, though.
FIRST_SEED = 3_000_000_000


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Mazes by their seeds, no two alike."""

    name: str
    size: int
    seeds: tuple[int, ...]

    def mazes(self) -> tuple[Maze, ...]:
        return tuple(make_maze(self.size, seed) for seed in self.seeds)

    def digest(self) -> str:
        """Of all its mazes in order: published, so that a set that changed is noticed."""
        return hashlib.sha256(" ".join(maze.digest() for maze in self.mazes()).encode()).hexdigest()[:16]

    def solvable_share(self, max_turns: int) -> float:
        """How many the oracle solves within the turns, stop among them."""
        needed = [len(oracle(maze)) for maze in self.mazes()]
        return sum(turns <= max_turns for turns in needed) / len(needed)


# Name, cells a side, how many: the walkthrough's 64, 512 more of that size, and larger ones that nothing was trained on.
HELD_OUT = {"easy-64": (EASY, 64), "easy-512": (EASY, 512), "hard-128": (HARD, 128)}


def evaluation_set(name: str) -> EvaluationSet:
    """Raises KeyError for a name that is none of HELD_OUT's."""
    return _sets()[name]


@cache
def _sets() -> dict[str, EvaluationSet]:
    """Seeds in order, of which a maze that is there already is left out, in whichever set."""
    taken: set[str] = set()
    sets, seed = {}, FIRST_SEED
    for name, (size, count) in HELD_OUT.items():
        seeds: list[int] = []
        while len(seeds) < count:
            digest = make_maze(size, seed).digest()
            if digest not in taken:
                taken.add(digest)
                seeds.append(seed)
            seed += 1
        sets[name] = EvaluationSet(name, size, tuple(seeds))
    return sets


@cache
def _held_out_digests() -> frozenset[str]:
    return frozenset(maze.digest() for one in _sets().values() for maze in one.mazes())


def is_held_out(maze: Maze) -> bool:
    """Whether a maze, as tree and corners, is one of an evaluation set: it is never to be trained on."""
    return maze.digest() in _held_out_digests()


def training_mazes(size: int, first_seed: int) -> Iterator[tuple[int, Maze]]:
    """Seeds and mazes from a seed on, without end, those of evaluation sets left out."""
    for seed in range(first_seed, FIRST_SEED):
        maze = make_maze(size, seed)
        if not is_held_out(maze):
            yield seed, maze
