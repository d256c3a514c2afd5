"""How a maze looks: an image of squares and a disc, and the same as text."""

from __future__ import annotations

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from training.maze.episode import Episode
from training.maze.grid import WALL, Cell

WHITE, GREY, RED, BLUE = (255, 255, 255), (169, 169, 169), (255, 0, 0), (0, 0, 255)
AGENT, GOAL = "A", "T"


def picture(episode: Episode) -> NDArray[np.uint8]:
    """uint8 [H, W, 3] with H = W = size * cell_px: floor white, walls grey, the goal a red square, the agent a blue disc of a
    quarter cell's radius. Where the agent has walked off the goal, a white disc is left in it, as in VisGym."""
    maze, cell_px = episode.maze, episode.spec.cell_px
    colours = np.array([[GREY if cell == WALL else WHITE for cell in row] for row in maze.rows], np.uint8)
    colours[maze.goal] = RED
    image = colours.repeat(cell_px, axis=0).repeat(cell_px, axis=1)
    if episode.left_goal:
        _disc(image, maze.goal, cell_px, WHITE)
    _disc(image, episode.position, cell_px, BLUE)
    return image


def _disc(image: NDArray[np.uint8], cell: Cell, cell_px: int, colour: tuple[int, int, int]) -> None:
    centre = (cell_px - 1) / 2
    down, right = np.mgrid[:cell_px, :cell_px]
    inside = (down - centre) ** 2 + (right - centre) ** 2 <= (cell_px / 4) ** 2
    top, left = cell[0] * cell_px, cell[1] * cell_px
    image[top : top + cell_px, left : left + cell_px][inside] = colour


def png(image: NDArray[np.uint8]) -> bytes:
    with io.BytesIO() as file:
        Image.fromarray(image).save(file, "PNG")
        return file.getvalue()


def data_uri(image: NDArray[np.uint8]) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def text_picture(episode: Episode) -> str:
    """Lines of `#`, space, `A` and `T` with one more border around; the agent is in front of the goal."""
    maze = episode.maze
    cells = [list(row) for row in maze.rows]
    cells[maze.goal[0]][maze.goal[1]] = GOAL
    cells[episode.position[0]][episode.position[1]] = AGENT
    border = WALL * (maze.size + 2)
    return "\n".join((border, *(f"{WALL}{''.join(row)}{WALL}" for row in cells), border))
