"""A maze on a terminal: two characters a cell, as a picture of its own or line by line where nobody sees colours."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from training.maze import Episode, Turn, begin, text_picture
from training.maze.grid import WALL
from training.maze.spec import MazeSpec

FRAME_S = 0.3
SHOWN_CHARACTERS = 60


def drawn(episode: Episode) -> Text:
    """Walls grey, the goal red, the agent blue."""
    picture = Text()
    for row, line in enumerate(episode.maze.rows):
        for column, cell in enumerate(line):
            if (row, column) == episode.position:
                picture.append("()", "bold white on blue")
            elif (row, column) == episode.maze.goal:
                picture.append("  ", "on red")
            else:
                picture.append("  ", "on bright_black" if cell == WALL else "on white")
        picture.append("\n")
    return picture


def told(number: int, reply: str, turn: Turn) -> str:
    """One line of what was said and what it did; what steers a terminal is left out of the reply."""
    said = "".join(character if character.isprintable() else "?" for character in reply)[:SHOWN_CHARACTERS]
    end = " Solved." if turn.episode.solved else " Not solved." if turn.episode.done else ""
    return f"{number:3}  {said or '(nothing)'}  {turn.feedback}{end}"


class Show:
    """Shows an episode as it goes: moving on a terminal, elsewhere the beginning and a line a turn."""

    def __init__(self, console: Console, spec: MazeSpec, seed: int) -> None:
        self._console = console
        self._first = begin(spec, seed)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._turns = 0

    def __enter__(self) -> Show:
        if self._live:
            self._live.__enter__()
            self._live.update(drawn(self._first), refresh=True)
        else:
            self._console.print(Text(text_picture(self._first)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.__exit__(kind, error, trace)

    def __call__(self, reply: str, turn: Turn) -> None:
        self._turns += 1
        line = told(self._turns, reply, turn)
        if self._live:
            self._live.update(Text.assemble(drawn(turn.episode), line), refresh=True)
            time.sleep(FRAME_S)
        else:
            self._console.print(Text(line))
