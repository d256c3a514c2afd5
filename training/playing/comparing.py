"""What was played through an endpoint beside what the trainer's own evaluation says of the same mazes. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from adapters.errors import InvalidRequest
from training.trajectory import Played

Maze = tuple[int, int]  # size, seed


@dataclass(frozen=True, slots=True)
class Difference:
    """A maze that went otherwise: `first_move` counts from 1 and is where the moves part, None where they are the same."""

    maze_seed: int
    size: int
    solved: bool
    solved_there: bool
    first_move: int | None
    move: str | None
    move_there: str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Over the mazes that both played: `solved` and `solved_there` of them, and those that went otherwise. `missing` were played
    there alone, `extra` here alone."""

    mazes: int
    solved: int
    solved_there: int
    differences: tuple[Difference, ...]
    missing: tuple[Maze, ...] = ()
    extra: tuple[Maze, ...] = ()

    @property
    def same_solves(self) -> bool:
        return not self.missing and all(one.solved == one.solved_there for one in self.differences)

    @property
    def same_moves(self) -> bool:
        return not self.missing and not self.differences

    def holds(self, *, greedy: bool) -> bool:
        """Greedy moves have to be the same. Sampled ones come of an engine's own dice: there, that all mazes were played."""
        return self.same_moves if greedy else not self.missing


def compared(here: Iterable[Played], there: Iterable[Played]) -> Comparison:
    ours = {(one.size, one.maze_seed): one for one in here}
    theirs = {(one.size, one.maze_seed): one for one in there}
    both = [maze for maze in theirs if maze in ours]
    pairs = [(ours[maze], theirs[maze]) for maze in both]
    return Comparison(
        mazes=len(both),
        solved=sum(one.solved for one, _ in pairs),
        solved_there=sum(other.solved for _, other in pairs),
        differences=tuple(_difference(one, other) for one, other in pairs if _outcome(one) != _outcome(other)),
        missing=tuple(maze for maze in theirs if maze not in ours),
        extra=tuple(maze for maze in ours if maze not in theirs),
    )


def read_played(file: Path) -> list[Played]:
    """The lines of an evaluation file. Raises InvalidRequest that names the line."""
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise InvalidRequest(f"the evaluation file can't be read: {error.strerror}", value=str(file), param="beside") from None
    return [_played(line, number, file) for number, line in enumerate(lines, 1) if line.strip()]


def as_lines(played: Sequence[Played]) -> str:
    return "".join(f"{json.dumps(one.as_dict())}\n" for one in played)


def _played(line: str, number: int, file: Path) -> Played:
    try:
        return Played.from_dict(json.loads(line))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"line {number} of {file.name} is no played maze: {error}", value=line[:80], param="beside"
        ) from None


def _outcome(one: Played) -> tuple[bool, tuple[str, ...]]:
    return one.solved, one.actions


def _difference(one: Played, other: Played) -> Difference:
    moves = enumerate(zip_longest(one.actions, other.actions), 1)
    parted = next(((number, here, there) for number, (here, there) in moves if here != there), (None, None, None))
    return Difference(one.maze_seed, one.size, one.solved, other.solved, *parted)
