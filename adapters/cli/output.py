"""What commands print: lines for people on stdout, JSON for programs, troubles and progress on stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from rich.console import Console

from adapters.errors import LoraMuxError
from adapters.names import AdapterRef

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def show(as_json: bool, value: Any, *lines: Any) -> None:
    """The value as one line of JSON, or the lines."""
    if as_json:
        sys.stdout.write(json.dumps(value, default=plain) + "\n")
        return
    for line in lines:
        out.print(line)


def plain(value: Any) -> Any:
    """What `json` can't write by itself: frozen values, sets, refs."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: str(item) if isinstance(item, AdapterRef) else item for name, item in fields.items()}
    if isinstance(value, (set, frozenset, tuple)):
        return sorted(value) if isinstance(value, (set, frozenset)) else list(value)
    return str(value)


def fail(error: LoraMuxError) -> NoReturn:
    """What went wrong, the value against the limit, what to do."""
    err.print(f"[red]{error.code}[/red]{f' ({error.reason})' if error.reason else ''}: {error.message}")
    if error.limit is not None or error.value is not None:
        err.print(f"  limit {error.limit}, value {error.value}")
    if error.hint:
        err.print(f"  {error.hint}")
    sys.exit(1)


@contextlib.contextmanager
def progress_bar(what: str, wanted: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of bytes done and bytes in all on a terminal, nothing elsewhere."""
    if not wanted or not err.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    with Progress(what, BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=err, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def size(size_bytes: int) -> str:
    amount = float(size_bytes)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"
