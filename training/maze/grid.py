"""Mazes as values: a uniform spanning tree over rooms, two opposite corners, and the shortest way between cells."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

Cell = tuple[int, int]  # row, column; the outer wall's corner is (0, 0)

WALL, FLOOR = "#", " "
# What a move's number means, in VisGym's order.
MOVES: dict[str, Cell] = {"right": (0, 1), "up": (-1, 0), "left": (0, -1), "down": (1, 0)}


@dataclass(frozen=True, slots=True)
class Maze:
    """`rows` are lines of WALL and FLOOR, as many as each has characters."""

    rows: tuple[str, ...]
    start: Cell
    goal: Cell

    @property
    def size(self) -> int:
        return len(self.rows)

    def is_floor(self, cell: Cell) -> bool:
        row, column = cell
        return 0 <= row < self.size and 0 <= column < self.size and self.rows[row][column] == FLOOR

    def digest(self) -> str:
        """Of tree and corners: two mazes are the same task exactly when it is the same."""
        text = "\n".join((*self.rows, f"{self.start} {self.goal}"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_maze(size: int, seed: int) -> Maze:
    """The maze of a seed (0 to 2^32 - 1), the same wherever and whenever it is made.

    As in VisGym: the seed's dice first draw the tree's seed, then which of the four ordered pairs of opposite corners it is.
    """
    # RandomState and not Generator: numpy promises that its streams never change, and evaluation sets are seeds.
    dice = np.random.RandomState(seed)
    tree_seed = int(dice.randint(0, 2**32, dtype=np.uint32))
    rows = _carve(size, np.random.RandomState(tree_seed))
    near, far = 1, size - 2
    corners: list[tuple[Cell, Cell]] = [
        ((near, near), (far, far)),
        ((far, far), (near, near)),
        ((near, far), (far, near)),
        ((far, near), (near, far)),
    ]
    start, goal = corners[int(dice.randint(4))]
    return Maze(rows, start, goal)


def _carve(size: int, dice: np.random.RandomState) -> tuple[str, ...]:
    """A uniform spanning tree over the rooms, by loop-erased random walks (Wilson, STOC 1996, section 2)."""
    side = (size - 1) // 2
    rooms = [(row, column) for row in range(side) for column in range(side)]
    grid = [[WALL] * size for _ in range(size)]
    for row, column in rooms:
        grid[2 * row + 1][2 * column + 1] = FLOOR
    joined = {rooms[int(dice.randint(len(rooms)))]}
    for room in rooms:
        path = _walk(room, joined, side, dice)
        for here, there in pairwise(path):
            grid[here[0] + there[0] + 1][here[1] + there[1] + 1] = FLOOR
        joined.update(path)
    return tuple("".join(row) for row in grid)


def _walk(room: Cell, joined: set[Cell], side: int, dice: np.random.RandomState) -> list[Cell]:
    """From a room to the tree at random; a loop is forgotten as soon as it closes."""
    path = [room]
    while path[-1] not in joined:
        row, column = path[-1]
        near = [(row + down, column + right) for down, right in MOVES.values()]
        near = [(down, right) for down, right in near if 0 <= down < side and 0 <= right < side]
        there = near[int(dice.randint(len(near)))]
        if there in path:
            del path[path.index(there) + 1 :]
        else:
            path.append(there)
    return path


def shortest(maze: Maze, start: Cell, goal: Cell) -> tuple[str, ...] | None:
    """The moves of a shortest way, breadth first; None where there is none. Ties go to the earlier move of MOVES."""
    came: dict[Cell, tuple[Cell, str]] = {}
    queue = deque([start])
    seen = {start}
    while queue:
        here = queue.popleft()
        if here == goal:
            return _back(came, start, goal)
        for name, (down, right) in MOVES.items():
            there = (here[0] + down, here[1] + right)
            if maze.is_floor(there) and there not in seen:
                seen.add(there)
                came[there] = (here, name)
                queue.append(there)
    return None


def _back(came: dict[Cell, tuple[Cell, str]], start: Cell, goal: Cell) -> tuple[str, ...]:
    moves: list[str] = []
    here = goal
    while here != start:
        here, name = came[here]
        moves.append(name)
    return tuple(reversed(moves))


def oracle(maze: Maze, position: Cell | None = None) -> tuple[str, ...]:
    """What solves the maze from a position (the start's by default) in the fewest turns: the moves, then stop."""
    moves = shortest(maze, position or maze.start, maze.goal)
    assert moves is not None, "a tree joins all floor"
    return (*moves, "stop")
