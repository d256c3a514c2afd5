"""What commands print: lines for people on stdout, JSON for programs, troubles and progress on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from adapters.errors import LoraMuxError

out = Console(highlight=False, soft_wrap=True, markup=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

Line = str | Text

# Messages, tags and answers are other people's words: nothing in them may steer the terminal of who reads them.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
_IN_A_CELL = {**_CONTROLS, ord("\n"): " ", ord("\t"): " "}


def show(as_json: bool, value: Any, *lines: Line | None) -> None:
    """The value as one line of JSON, or the lines; None is no line."""
    if as_json:
        sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
        return
    for line in lines:
        if isinstance(line, str | Text) and not out.is_terminal:  # ten thousand rows, and nobody to see colours
            sys.stdout.write(f"{visible(str(line))}\n")
        elif isinstance(line, str | Text):
            out.print(_visible(line))
        elif line is not None:
            out.print(line)


def visible(text: str) -> str:
    """The text with control characters but line ends and tabs made harmless."""
    return text.translate(_CONTROLS)


def table(header: Sequence[str], rows: Iterable[Sequence[Line]]) -> list[Text]:
    """Aligned columns, one line a row, as wide as they must be: what reads the lines next is often a program."""
    if not out.is_terminal:
        return [Text(line) for line in _plain_table(header, rows)]
    cells = [[_text(cell) for cell in row] for row in (header, *rows)]
    widths = [max(line[column].cell_len for line in cells) for column in range(len(header))]
    return [_aligned(line, widths) for line in cells]


def warn(text: str) -> None:
    err.print(_visible(Text.assemble(("warning", "yellow"), f": {text}")))


def fail(error: LoraMuxError, as_json: bool = False) -> NoReturn:
    """What went wrong, the value against the limit, what to do; exit code 1."""
    if as_json:
        sys.stderr.write(json.dumps({"error": as_data(error)}, default=str) + "\n")
        sys.exit(1)
    reason = f" ({error.reason})" if error.reason else ""
    err.print(_visible(Text.assemble((f"{error.code}{reason}", "red"), f": {error.message}")))
    if error.limit is not None or error.value is not None:
        parts = [f"{name} {value}" for name, value in (("value", error.value), ("limit", error.limit)) if value is not None]
        err.print(_visible(f"  {', '.join(parts)}"))
    if error.hint:
        err.print(_visible(f"  {error.hint}"))
    sys.exit(1)


def as_data(error: LoraMuxError) -> dict[str, Any]:
    """An error as a program reads it."""
    names = ("code", "reason", "message", "limit", "value", "hint")
    return {name: getattr(error, name) for name in names}


@contextlib.contextmanager
def progress_bar(what: str, wanted: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of bytes done and bytes in all on a terminal, nothing elsewhere."""
    if not wanted or not err.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    with Progress(what, BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=err, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def count_bar(what: str, wanted: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of things done and things in all on a terminal, nothing elsewhere."""
    if not wanted or not err.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress

    with Progress(what, BarColumn(), MofNCompleteColumn(), console=err, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def spinner(what: str, wanted: bool = True) -> Iterator[None]:
    """Something that moves on a terminal while nobody knows how long it takes, nothing elsewhere."""
    if not wanted or not err.is_terminal:
        yield
        return
    with err.status(what):
        yield


def size(size_bytes: float) -> str:
    amount = float(size_bytes)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"


def is_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty() and err.is_terminal


def _plain_table(header: Sequence[str], rows: Iterable[Sequence[Line]]) -> list[str]:
    """The same without colours, which takes a fifth of the time: lists may be long."""
    cells = [[str(cell).translate(_IN_A_CELL) for cell in row] for row in (header, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _text(cell: Line) -> Text:
    return _visible(cell, _IN_A_CELL)


def _visible(line: Line, mapping: dict[int, str] = _CONTROLS) -> Text:
    text = line.copy() if isinstance(line, Text) else Text(line)
    text.plain = text.plain.translate(mapping)  # as long as before, so that the colours stay in their places
    return text


def _aligned(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    line = Text()
    for cell, width in zip(cells, widths, strict=True):
        line.append_text(cell)
        line.append(" " * (width - cell.cell_len + 2))
    line.rstrip()
    return line
