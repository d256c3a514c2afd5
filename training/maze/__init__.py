"""The maze: an agent walks from one corner to the opposite one and says stop. Rules as VisGym's maze_2d, code our own."""

from training.maze.actions import Action, Mistake, parse
from training.maze.episode import Episode, Turn, begin, step
from training.maze.grid import Maze, make_maze, oracle, shortest
from training.maze.observing import messages, observe
from training.maze.rendering import picture, png, text_picture
from training.maze.sets import HELD_OUT, EvaluationSet, evaluation_set, is_held_out, training_mazes
from training.maze.spec import MazeSpec

__all__ = [
    "HELD_OUT",
    "Action",
    "Episode",
    "EvaluationSet",
    "Maze",
    "MazeSpec",
    "Mistake",
    "Turn",
    "begin",
    "evaluation_set",
    "is_held_out",
    "make_maze",
    "messages",
    "observe",
    "oracle",
    "parse",
    "picture",
    "png",
    "shortest",
    "step",
    "text_picture",
    "training_mazes",
]
