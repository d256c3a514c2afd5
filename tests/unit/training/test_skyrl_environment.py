"""The maze in SkyRL's gym: registered, made of tickets and played through its own interface."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.skyrl_apart import run_with_skyrl
from training.maze import MazeSpec, evaluation_set, is_held_out, make_maze
from training.skyrl.tickets import evaluation_tickets, training_tickets, write

SPEC = MazeSpec(max_turns=21)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("tickets") / "easy-64.jsonl"
    write(evaluation_tickets(SPEC, "easy-64"), file)
    return json.loads(run_with_skyrl("tests.skyrl_plays", str(file)).splitlines()[-1])


def test_the_oracle_solves_what_can_be_solved_in_time_and_only_the_end_pays(told: dict[str, Any]):
    assert (told["together"]["easy-64/solved"], told["together"]["easy-64/mazes"]) == (63, 64)
    for one in told["played"]:
        assert sum(one["rewards"]) == one["rewards"][-1] == one["metrics"]["solved"]


def test_each_reply_is_answered_with_one_message_but_the_last(told: dict[str, Any]):
    assert all(one["first"] == ["text", "image_url"] for one in told["played"])
    assert all(one["shown"] == [1] * (len(one["shown"]) - 1) + [0] for one in told["played"])


def test_a_ticket_is_its_sets_maze(told: dict[str, Any]):
    assert [one["digest"] for one in told["played"]] == [maze.digest() for maze in evaluation_set("easy-64").mazes()]


def test_tickets_without_a_seed_or_with_other_turns_are_refused_with_the_reason(told: dict[str, Any]):
    without, other = told["refused"]
    assert "no seed" in without
    assert "generator.max_turns is 15, the maze's is 21" in other


def test_training_tickets_have_a_seed_each_and_none_is_held_out():
    tickets = training_tickets(SPEC, 200)
    assert len({one["seed"] for one in tickets}) == 200
    assert not any(is_held_out(make_maze(SPEC.size, one["seed"])) for one in tickets)


def test_rules_of_another_size_do_not_fit_a_set(tmp_path: Path):
    with pytest.raises(ValueError, match="size 9, the rules say 11"):
        evaluation_tickets(MazeSpec(size=11), "easy-64")
