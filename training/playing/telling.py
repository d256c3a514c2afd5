"""What came of playing, as data and as lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from adapters.cli.output import Line, table
from training.playing.comparing import Comparison
from training.playing.player import NotPlayed, Table
from training.trajectory import Played

SHOWN_DIFFERENCES = 10
SHOWN_BROKEN = 3


def data(
    at: Table, name: str, results: Sequence[Played | NotPlayed], refs: Iterable[str], comparison: Comparison | None
) -> dict[str, Any]:
    """`solve_rate` is of the mazes that were played; where some were not, it says nothing of the set."""
    done = [one for one in results if isinstance(one, Played)]
    return {
        "model": at.model,
        "answered_by": sorted(refs),
        "set": name,
        "decoding": "greedy" if at.sampling.temperature == 0 else "sampled",
        "temperature": at.sampling.temperature,
        "mazes": len(results),
        "played": len(done),
        "solved": sum(one.solved for one in done),
        "solve_rate": sum(one.solved for one in done) / len(done) if done else None,
        "turns_mean": sum(one.turns for one in done) / len(done) if done else None,
        "not_played": [asdict(one) for one in results if isinstance(one, NotPlayed)],
        "beside": _beside(comparison) if comparison else None,
    }


def lines(told: dict[str, Any]) -> list[Line]:
    """A table of one row, then what a person has to know."""
    row = (
        ", ".join(told["answered_by"]) or told["model"],
        told["set"],
        told["decoding"],
        f"{told['solved']}/{told['played']}",
        f"{told['solve_rate']:.1%}" if told["played"] else "-",
        f"{told['turns_mean']:.1f}" if told["played"] else "-",
        str(len(told["not_played"])),
    )
    found: list[Line] = list(table(("MODEL", "SET", "DECODING", "SOLVED", "RATE", "TURNS", "NOT PLAYED"), [row]))
    found += [
        f"not played: maze {one['maze_seed']} ({one['reason']}): {one['message']}" for one in told["not_played"][:SHOWN_BROKEN]
    ]
    if len(told["answered_by"]) > 1:
        found.append("several versions answered, so an alias moved meanwhile; name a version by its number")
    return found + (_beside_lines(told["beside"]) if told["beside"] else [])


def _beside(comparison: Comparison) -> dict[str, Any]:
    return {"same_solves": comparison.same_solves, "same_moves": comparison.same_moves, **asdict(comparison)}


def _beside_lines(beside: dict[str, Any]) -> list[str]:
    mazes = beside["mazes"]
    found = [f"beside the evaluation: {beside['solved']}/{mazes} solved here, {beside['solved_there']}/{mazes} there"]
    if beside["missing"]:
        found.append(f"{len(beside['missing'])} of its mazes were not played here")
    if beside["same_moves"]:
        return [*found, "the same moves in every maze"]
    found += [_difference(one) for one in beside["differences"][:SHOWN_DIFFERENCES]]
    left = len(beside["differences"]) - SHOWN_DIFFERENCES
    return [*found, f"and {left} more that differ"] if left > 0 else found


def _difference(one: dict[str, Any]) -> str:
    here, there = ("solved" if solved else "not solved" for solved in (one["solved"], one["solved_there"]))
    if one["first_move"] is None:
        return f"maze {one['maze_seed']}: {here} here, {there} there, with the same moves"
    parted = f"move {one['first_move']} is {one['move'] or 'none'} here, {one['move_there'] or 'none'} there"
    return f"maze {one['maze_seed']}: {here} here, {there} there; {parted}"
