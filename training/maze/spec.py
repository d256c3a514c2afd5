"""What of a maze's rules and looks can be chosen; recorded with every adapter that was trained on them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Actions = Literal["tuple", "keyword", "both"]
Layout = Literal["skyrl", "visgym"]
Observation = Literal["image", "text"]
Reward = Literal["sparse", "sft_mixed"]

EASY, HARD = 9, 11  # cells a side, the outer wall among them: 4 x 4 and 5 x 5 rooms
LEAST_SIZE, MOST_SIZE = 5, 101
MOST_CELL_PX = 64


class BadSpec(ValueError):
    """A rule that no maze can have; names the field, the value and the limit."""


@dataclass(frozen=True, slots=True)
class MazeSpec:
    """`size` is cells a side and odd. A turn is one reply, whatever it does; the episode ends after `max_turns`. With
    `stop_required` only saying stop on the goal solves it, else arriving does. `actions` is how replies may name an action,
    `prompt` in which order text and image come and which of several actions in a reply counts, `reward` what the last turn
    pays: `sparse` 1 for solved, `sft_mixed` 0.8 for solved and 0.2 for the share of turns in the three tags. Raises BadSpec."""

    size: int = EASY
    max_turns: int = 21
    stop_required: bool = True
    cell_px: int = 25
    actions: Actions = "both"
    prompt: Layout = "skyrl"
    observation: Observation = "image"
    reward: Reward = "sparse"

    def __post_init__(self) -> None:
        _within("size", self.size, LEAST_SIZE, MOST_SIZE)
        if self.size % 2 == 0:
            raise BadSpec(f"size is {self.size}: it has to be odd, since rooms lie on odd cells between walls")
        _within("max_turns", self.max_turns, 1, 10_000)
        _within("cell_px", self.cell_px, 4, MOST_CELL_PX)
        for name, allowed in CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise BadSpec(f"{name} is {value!r}: one of {', '.join(allowed)}")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


CHOICES: dict[str, tuple[str, ...]] = {
    "actions": get_args(Actions),
    "prompt": get_args(Layout),
    "observation": get_args(Observation),
    "reward": get_args(Reward),
}


def _within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise BadSpec(f"{name} is {value}: from {least} to {most}")
