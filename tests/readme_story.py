"""The tour of the README, step by step: what it types, and what it says comes back."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

SECTION = "## Publish, canary, roll back"
PROGRAM = ".venv/bin/loramux"
MORE = "..."

# What differs from run to run and machine to machine. Versions, percentages and words stay.
VARIES = (
    (r"\b[0-9a-f]{12}\b", "DIGEST"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ", "TIME"),
    (r"\d+(?:\.\d+)? (?:B|kB|MB|GB)\b", "SIZE"),
    (r"first token \d+ ms", "FIRST"),
    (r"\d+ tokens", "TOKENS"),
    (r"\b\d+ (?:s|min|h|d|w)\b", "AGE"),
    (r"rank \d+", "RANK"),
    (r"revision \d+", "REVISION"),
    (r"127\.0\.0\.1:\d+", "GATEWAY"),
    (r"(?:tier )?\b(?:engine|disk|remote)\b", "TIER"),
    (r"[ ]+", " "),
)


@dataclass(frozen=True)
class Step:
    """One command without the program, and the lines that follow it in the README."""

    arguments: tuple[str, ...]
    expected: tuple[str, ...]


def steps(readme: Path) -> list[Step]:
    """The tour. Every line after `$ .venv/bin/loramux` up to the next command or text belongs to the answer."""
    section = readme.read_text().partition(f"\n{SECTION}\n")[2].partition("\n## ")[0]
    found: list[tuple[str, list[str]]] = []
    for line in section.splitlines():
        if line.startswith(f"    $ {PROGRAM} "):
            found.append((line.removeprefix(f"    $ {PROGRAM} "), []))
        elif line.startswith("    ") and found:
            found[-1][1].append(line.removeprefix("    "))
    return [Step(tuple(shlex.split(command)), tuple(lines)) for command, lines in found]


def shape(lines: list[str]) -> list[str]:
    """The lines without what varies; empty ones left out."""
    shaped = []
    for line in lines:
        for pattern, name in VARIES:
            line = re.sub(pattern, name, line)
        shaped.append(line.strip())
    return [line for line in shaped if line]


def check_step(step: Step, said: str) -> None:
    """Raises AssertionError unless what was said is what the README shows; `...` stands for any lines."""
    found, expected = shape(said.splitlines()), shape(list(step.expected))
    assert _fits(found, expected), f"loramux {shlex.join(step.arguments)}\n" + "\n".join(
        ["expected:", *expected, "said:", *found]
    )


def _fits(found: list[str], expected: list[str]) -> bool:
    if not expected:
        return not found
    if expected[0] == MORE:
        return any(_fits(found[skipped:], expected[1:]) for skipped in range(len(found) + 1))
    return bool(found) and found[0] == expected[0] and _fits(found[1:], expected[1:])
