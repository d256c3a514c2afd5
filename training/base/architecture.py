"""The base's shape and its tokenizer: small enough for two cores, one image token for each cell of a maze."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedTokenizerFast

from training.demo.text import corpus
from training.maze import MazeSpec, begin, messages
from training.maze.episode import FEEDBACK
from training.maze.grid import MOVES
from training.small_vlm import Shape, tokenizer_of

# What the base was made for; another size, or text instead of pictures, is for others to try.
MAZES = MazeSpec(cell_px=16, actions="keyword")
SHAPE = Shape(
    hidden=192,
    layers=4,
    intermediate=512,
    vision_hidden=128,
    vision_depth=6,
    vision_intermediate=384,
    patch_px=16,
    merge=1,  # so that a maze's cell is a patch and an image token
    image_px=(32, 192),
    pictured=MAZES.size,
    deepstack=(3,),
)
TAGS = ("<action>", "</action>")


def make_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """Knows the demo's words, the maze's and an action's tags as one token each."""
    return tokenizer_of(_texts(seed), TAGS)


def _texts(seed: int) -> Iterator[str]:
    yield from corpus(seed)
    question = messages(begin(MAZES, seed=0))[0]["content"][0]["text"]
    yield from [question, *FEEDBACK.values(), *MOVES, "stop"] * 40
