"""A spec that cannot be run, and what to say about it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from pydantic import ValidationError

UNKNOWN = frozenset({"extra_forbidden", "unexpected_keyword_argument"})


class BadTrainSpec(ValueError):
    """Says every trouble that was found, a line each: key, value, and what is allowed."""

    def __init__(self, troubles: Sequence[str]) -> None:
        super().__init__("\n".join(troubles))
        self.troubles = tuple(troubles)

    def __reduce__(self) -> tuple[type[BadTrainSpec], tuple[tuple[str, ...]]]:
        return type(self), (self.troubles,)


def explained(error: ValidationError, known: Sequence[str]) -> list[str]:
    """What pydantic found, in the words of a spec; unknown keys with those of `known` that are near."""
    troubles = []
    for found in error.errors():
        key = ".".join(str(part) for part in found["loc"])
        if found["type"] in UNKNOWN:
            troubles.append(f"there is no key {key}{_near(key, known)}")
        elif found["type"] == "value_error":
            said = str(found["ctx"]["error"])
            troubles.append(said if said.startswith(key) else f"{key}: {said}")
        else:
            message = found["msg"].replace("Input should be", "it has to be")
            troubles.append(f"{key} is {found['input']!r}: {message}")
    return troubles


def _near(key: str, known: Sequence[str]) -> str:
    """Keys whose last word is much like its, or else whose whole name is."""
    last = key.rpartition(".")[2]
    near = [one for one in known if _likeness(one.rpartition(".")[2], last) >= 0.8]
    near = near or difflib.get_close_matches(key, known, 3, 0.75)
    near = sorted(near, key=lambda one: -_likeness(key, one))[:3]
    return f"; near: {', '.join(near)}" if near else ""


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
