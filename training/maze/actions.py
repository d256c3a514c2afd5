"""What a reply asks for. Parsing never raises: whatever a model says is an action or a mistake, and both cost a turn."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from training.maze.grid import MOVES
from training.maze.spec import Actions, Layout

STOP = "stop"
NAMES = (*MOVES, STOP)
MOST_STOP_LETTERS = 4

# No nesting and bounded lengths, so that no reply takes long: a name, quoted or not, a comma, a payload.
TUPLE = re.compile(r"\(\s*(['\"]?)([A-Za-z_]{1,32})\1\s*,\s*(['\"]?)([^()'\",]{0,64}?)\3\s*\)")
PAIR = re.compile(r"\([^()]{0,256}\)")
KEYWORD = re.compile(r"<action>\s*([A-Za-z]{1,32})\s*</action>", re.IGNORECASE)
TAGS = tuple(
    re.compile(rf"<{tag}>\s*[^\s<].*?</{tag}>", re.DOTALL | re.IGNORECASE) for tag in ("observation", "justification", "action")
)

Kind = Literal["unreadable", "not_a_pair", "unknown_name", "bad_direction", "bad_stop"]


@dataclass(frozen=True, slots=True)
class Action:
    """`name` is one of NAMES."""

    name: str


@dataclass(frozen=True, slots=True)
class Mistake:
    """A reply that names no action, and what is wrong with it."""

    kind: Kind
    said: str = ""


def parse(reply: str, actions: Actions = "both", layout: Layout = "skyrl") -> Action | Mistake:
    """The action of a reply: `<action>up</action>`, the last one, or a tuple as `('move', 1)` and `('stop', 'stop')`: the first
    that a reply holds (`skyrl`), or the last that is an action (`visgym`). Where both ways are open, a keyword goes first."""
    if actions != "tuple":
        words = [match[1].lower() for match in KEYWORD.finditer(reply)]
        if words:
            return Action(words[-1]) if words[-1] in NAMES else Mistake("unknown_name", words[-1])
        if actions == "keyword":
            return Mistake("unreadable")
    found = list(_tuples(reply))
    if not found:
        return Mistake("not_a_pair" if PAIR.search(reply) else "unreadable")
    if layout == "visgym":
        valid = [one for one in found if isinstance(one, Action)]
        return valid[-1] if valid else found[-1]
    return found[0]


def _tuples(reply: str) -> Iterator[Action | Mistake]:
    for match in TUPLE.finditer(reply):
        yield _action(match[2].lower(), match[4].strip())


def _action(name: str, payload: str) -> Action | Mistake:
    if name == "move":
        if payload in {str(number) for number in range(len(MOVES))}:
            return Action(tuple(MOVES)[int(payload)])
        return Mistake("bad_direction", payload)
    if name == STOP:
        return Action(STOP) if len(payload) <= MOST_STOP_LETTERS else Mistake("bad_stop", payload)
    return Mistake("unknown_name", name)


def is_well_formed(reply: str) -> bool:
    """Whether a reply has something in each of the three tags: observation, justification, action."""
    return all(tag.search(reply) for tag in TAGS)


def as_text(action: str, actions: Actions) -> str:
    """How the oracle writes an action: a tuple, or a tagged keyword where only those are read."""
    if actions == "keyword":
        return f"<action>{action}</action>"
    return f"('{STOP}', '{STOP}')" if action == STOP else f"('move', {tuple(MOVES).index(action)})"
