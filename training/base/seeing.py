"""First lesson: the vision tower learns the way. For every cell of a maze at once it has to say where the goal lies from there.

An answer a cell teaches far more than one move a picture. The tower's blocks are asked as well, each only about cells as near to
the goal as it can know: so the way is learnt from the goal outwards (deep supervision: Lee et al., AISTATS 2015).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from training.base.architecture import SHAPE
from training.maze import Episode, Maze, MazeSpec, picture
from training.maze.grid import MOVES, Cell

WAYS = (*MOVES, "wall", "goal")
REACH = (2, 4, 7, 12, 20, 10_000)  # moves from the goal that each block is asked about
assert len(REACH) == SHAPE.vision_depth
LEFT_GOAL_SHARE = 0.1
UNASKED = -100


@dataclass(frozen=True, slots=True)
class Way:
    """For each cell, row by row: which of WAYS is right there, and how many moves it is from the goal (0 for walls)."""

    ways: NDArray[np.int64]
    moves: NDArray[np.int64]


def way_to_goal(maze: Maze) -> Way:
    ways = np.full((maze.size, maze.size), WAYS.index("wall"))
    moves = np.zeros((maze.size, maze.size), dtype=np.int64)
    ways[maze.goal] = WAYS.index("goal")
    queue = deque([maze.goal])
    while queue:
        here = queue.popleft()
        for move, (down, right) in enumerate(MOVES.values()):
            cell = (here[0] - down, here[1] - right)
            if maze.is_floor(cell) and ways[cell] == WAYS.index("wall"):
                ways[cell], moves[cell] = move, moves[here] + 1
                queue.append(cell)
    return Way(ways.reshape(-1), moves.reshape(-1))


@dataclass(frozen=True, slots=True)
class Lesson:
    """B pictures of N cells each: `patches` [B * N, values] as the image processor makes them, what is right in each cell, and
    where the agent stands."""

    patches: Tensor
    grid_b3: Tensor
    ways_n: Tensor
    moves_n: Tensor
    is_agent_n: Tensor

    def to(self, device: torch.device) -> Lesson:
        return Lesson(*(getattr(self, name).to(device) for name in self.__slots__))


def lessons(spec: MazeSpec, mazes: Sequence[tuple[int, Maze]], batch: int, seed: int) -> Iterator[Lesson]:
    """Without end: mazes by chance, the agent on any floor cell."""
    dice = random.Random(f"seeing-{seed}")
    floors = [[cell for cell in _cells(maze) if maze.is_floor(cell)] for _, maze in mazes]
    while True:
        chosen = [dice.randrange(len(mazes)) for _ in range(batch)]
        states = [_somewhere(spec, mazes[at], dice.choice(floors[at]), dice.random() < LEFT_GOAL_SHARE) for at in chosen]
        yield lesson(states)


def lesson(states: Sequence[Episode]) -> Lesson:
    size = states[0].spec.size
    right = [way_to_goal(state.maze) for state in states]
    agents = np.zeros((len(states), size, size), dtype=np.float32)
    for at, state in enumerate(states):
        agents[at][state.position] = 1
    return Lesson(
        patches=patches(np.stack([picture(state) for state in states])),
        grid_b3=torch.tensor([[1, size, size]] * len(states)),
        ways_n=torch.from_numpy(np.concatenate([way.ways for way in right])),
        moves_n=torch.from_numpy(np.concatenate([way.moves for way in right])),
        is_agent_n=torch.from_numpy(agents.reshape(-1)),
    )


def _cells(maze: Maze) -> list[Cell]:
    return [(row, column) for row in range(maze.size) for column in range(maze.size)]


def _somewhere(spec: MazeSpec, seeded: tuple[int, Maze], cell: Cell, left_goal: bool) -> Episode:
    seed, maze = seeded
    return Episode(spec, maze, seed, cell, left_goal=left_goal and cell != maze.goal)


def patches(images: NDArray[np.uint8]) -> Tensor:
    """uint8 [B, H, W, 3] -> float [B * patches, 3 * 2 * 16 * 16], as the base's image processor cuts and scales them."""
    pixels = torch.from_numpy(images).float().div_(127.5).sub_(1).permute(0, 3, 1, 2)
    count, channels, height, width = pixels.shape
    rows, columns = height // SHAPE.patch_px, width // SHAPE.patch_px
    cut = pixels.reshape(count, channels, rows, SHAPE.patch_px, columns, SHAPE.patch_px).permute(0, 2, 4, 1, 3, 5)
    twice = cut.unsqueeze(4).expand(-1, -1, -1, -1, 2, -1, -1)  # a still picture is two equal frames
    return twice.reshape(count * rows * columns, -1)


class Examiner(nn.Module):
    """Asks a tower: after each block, and what it gives to the language model. Thrown away when the tower has learnt."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        answers = len(WAYS) + 1
        self.tower = tower
        self.of_blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(SHAPE.vision_hidden), nn.Linear(SHAPE.vision_hidden, answers)) for _ in tower.blocks
        )
        self.of_tokens = nn.Linear(SHAPE.hidden, answers)
        self._after_blocks: list[Tensor] = []
        self._hooks = [
            block.register_forward_hook(lambda _module, _inputs, hidden: self._after_blocks.append(hidden))
            for block in tower.blocks
        ]

    def forget(self) -> None:
        """Leaves the tower as if nobody had asked."""
        for hook in self._hooks:
            hook.remove()

    def forward(self, asked: Lesson) -> tuple[Tensor, list[Tensor]]:
        """Logits [B * N, WAYS and agent] of the image tokens, and of each block."""
        self._after_blocks.clear()
        tokens = self.tower(asked.patches, grid_thw=asked.grid_b3).pooler_output
        of_blocks = [ask(hidden) for ask, hidden in zip(self.of_blocks, self._after_blocks, strict=True)]
        return self.of_tokens(tokens), of_blocks


def loss_of(logits: Tensor, of_blocks: Sequence[Tensor], asked: Lesson) -> Tensor:
    total = _loss(logits, asked.ways_n, asked)
    for of_block, reach in zip(of_blocks, REACH, strict=True):
        total = total + 0.5 * _loss(of_block, torch.where(asked.moves_n <= reach, asked.ways_n, UNASKED), asked)
    return total


def _loss(logits: Tensor, ways_n: Tensor, asked: Lesson) -> Tensor:
    logits = logits.float()
    way = F.cross_entropy(logits[:, :-1], ways_n, ignore_index=UNASKED)
    return way + F.binary_cross_entropy_with_logits(logits[:, -1], asked.is_agent_n)


def known(logits: Tensor, asked: Lesson) -> tuple[float, float]:
    """Share of floor cells whose way is known, and of pictures with no cell wrong, agent included."""
    right_n = (logits[:, :-1].argmax(-1) == asked.ways_n) & ((logits[:, -1] > 0) == (asked.is_agent_n > 0))
    floor = asked.ways_n < len(MOVES)
    return right_n[floor].float().mean().item(), right_n.view(len(asked.grid_b3), -1).all(-1).float().mean().item()
