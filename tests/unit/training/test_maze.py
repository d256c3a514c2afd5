"""The maze's rules: what a seed makes, what a reply does, what ends an episode and what it pays."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.maze import (
    HELD_OUT,
    Action,
    Episode,
    MazeSpec,
    Mistake,
    begin,
    evaluation_set,
    is_held_out,
    make_maze,
    messages,
    observe,
    oracle,
    parse,
    picture,
    step,
    text_picture,
    training_mazes,
)
from training.maze.actions import NAMES, as_text
from training.maze.spec import BadSpec

SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.sampled_from([5, 7, 9, 11, 15])
EASY = MazeSpec()
MOVES = {"right": (0, 1), "up": (-1, 0), "left": (0, -1), "down": (1, 0)}


def floor_of(maze):
    return {(row, column) for row in range(maze.size) for column in range(maze.size) if maze.is_floor((row, column))}


def played(spec: MazeSpec, seed: int, *replies: str):
    episode, turn = begin(spec, seed), None
    for reply in replies:
        turn = step(episode, reply)
        episode = turn.episode
    assert turn is not None
    return turn


def solution(spec: MazeSpec, seed: int) -> list[str]:
    return [as_text(action, spec.actions) for action in oracle(begin(spec, seed).maze)]


def into_a_wall(seed: int) -> str:
    """A reply that bumps at once: a corner room has two walls at least."""
    maze = make_maze(9, seed)
    row, column = maze.start
    name = next(name for name, (down, right) in MOVES.items() if not maze.is_floor((row + down, column + right)))
    return as_text(name, "tuple")


# -- mazes -------------------------------------------------------------------------------------------------------------


@given(SEEDS, SIZES)
def test_floor_is_a_tree_over_all_rooms_and_the_outer_wall_is_whole(seed: int, size: int):
    maze = make_maze(size, seed)
    floor = floor_of(maze)
    rooms = ((size - 1) // 2) ** 2
    assert len(floor) == rooms + rooms - 1  # a tree: one passage fewer than rooms
    joined, edge = {maze.start}, [maze.start]
    while edge:
        row, column = edge.pop()
        near = {(row + down, column + right) for down, right in MOVES.values()} & floor - joined
        joined |= near
        edge += near
    assert joined == floor
    assert not any(0 in cell or size - 1 in cell for cell in floor)


@given(SEEDS, SIZES)
def test_start_and_goal_are_opposite_corner_rooms(seed: int, size: int):
    maze = make_maze(size, seed)
    assert {*maze.start, *maze.goal} == {1, size - 2}
    assert maze.start[0] + maze.goal[0] == maze.start[1] + maze.goal[1] == size - 1


def test_all_four_pairs_of_corners_are_about_as_frequent():
    counts = Counter(make_maze(5, seed).start for seed in range(800))
    assert len(counts) == 4 and min(counts.values()) > 150


def test_trees_of_two_by_two_rooms_are_uniform():
    counts = Counter(make_maze(5, seed).rows for seed in range(800))
    assert len(counts) == 4 and min(counts.values()) > 150


def test_ways_are_as_long_as_uniform_trees_make_them():
    """The shares that a simulation of 20,000 trees of 4 x 4 rooms gave: 12 moves 72.5 %, 16 21.6 %, 20 4.9 %."""
    lengths = Counter(len(oracle(make_maze(9, seed))) - 1 for seed in range(2000))
    assert lengths[12] / 2000 == pytest.approx(0.725, abs=0.03)
    assert lengths[16] / 2000 == pytest.approx(0.216, abs=0.03)
    assert lengths[20] / 2000 == pytest.approx(0.049, abs=0.02)


def test_a_seed_is_the_same_maze_in_every_process_and_for_ever():
    code = "from training.maze import make_maze; print([make_maze(9, seed).digest() for seed in range(5)])"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert there == str([make_maze(9, seed).digest() for seed in range(5)])
    assert make_maze(9, 0).digest() == "5071e4b4cf88f37a"


@given(SEEDS, SIZES)
def test_the_oracle_solves_every_maze_and_no_shorter_way_exists_in_a_tree(seed: int, size: int):
    spec = MazeSpec(size=size, max_turns=10_000)
    turn = played(spec, seed, *solution(spec, seed))
    assert turn.episode.solved and turn.reward == 1.0


# -- replies -----------------------------------------------------------------------------------------------------------


WAYS = st.sampled_from(["tuple", "keyword", "both"])
LAYOUTS = st.sampled_from(["skyrl", "visgym"])


@given(st.text() | st.from_regex(r"[(<'a-z,0-9 >/)\"]*"), WAYS, LAYOUTS)
def test_whatever_is_said_is_an_action_or_a_mistake(reply: str, actions, layout):
    read = parse(reply, actions, layout)
    assert isinstance(read, Mistake) or read.name in NAMES


@pytest.mark.parametrize(
    ("reply", "read"),
    [
        ("('move', 0)", "right"),
        ("('move', 1)", "up"),
        ("('move', 2)", "left"),
        ('("move", 3)', "down"),
        ("(move, 3)", "down"),
        ("I go ( 'move' ,2 ) now", "left"),
        ("('stop', 'stop')", "stop"),
        ("('stop', '')", "stop"),
        ("<action>UP</action>", "up"),
        ("<action>up</action> no, <action> stop </action>", "stop"),
        ("('move', 0) <action>left</action>", "left"),
    ],
)
def test_actions_are_read_in_every_form(reply: str, read: str):
    assert parse(reply) == Action(read)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ("", "unreadable"),
        ("up", "unreadable"),
        ("(1, 2, 3)", "not_a_pair"),
        ("('move', 4)", "bad_direction"),
        ("('move', '')", "bad_direction"),
        ("('jump', 1)", "unknown_name"),
        ("('stop', 'at once')", "bad_stop"),
        ("<action>jump</action>", "unknown_name"),
    ],
)
def test_a_mistake_says_what_is_wrong(reply: str, kind: str):
    read = parse(reply)
    assert isinstance(read, Mistake) and read.kind == kind


def test_the_first_tuple_counts_as_skyrl_reads_and_the_last_valid_one_as_visgym_does():
    reply = "('move', 0) or ('move', 1) but not ('move', 9)"
    assert parse(reply, "tuple", "skyrl") == Action("right")
    assert parse(reply, "tuple", "visgym") == Action("up")


@given(st.sampled_from(NAMES), WAYS)
def test_what_the_oracle_writes_is_read_as_what_it_meant(name: str, actions):
    assert parse(as_text(name, actions), actions) == Action(name)


def test_a_long_hostile_reply_is_read_at_once():
    for part in ("(", "<action>", "('move'", "<observation>x", "('a', "):
        parse(part * 20_000)


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_bump_and_a_mistake_cost_a_turn_and_move_nothing(seed: int):
    for reply in (into_a_wall(seed), "what?"):
        turn = played(EASY, seed, reply)
        assert (turn.episode.position, turn.episode.turns, turn.reward) == (turn.episode.maze.start, 1, 0.0)
        assert not turn.episode.done


def test_arriving_is_not_enough_where_stop_is_required():
    moves = solution(EASY, 1)[:-1]
    turn = played(MazeSpec(max_turns=100), 1, *moves)
    assert turn.episode.position == turn.episode.maze.goal
    assert not turn.episode.done and turn.reward == 0.0


def test_arriving_solves_where_stop_is_not_required():
    spec = MazeSpec(stop_required=False, max_turns=100)
    turn = played(spec, 1, *solution(spec, 1)[:-1])
    assert (turn.episode.done, turn.episode.solved, turn.reward) == (True, True, 1.0)


def test_stop_elsewhere_ends_the_episode_unsolved():
    turn = played(EASY, 1, "('stop', 'stop')")
    assert (turn.episode.done, turn.episode.solved, turn.reward) == (True, False, 0.0)


def test_the_turn_limit_ends_an_episode_and_a_stop_in_the_last_turn_still_counts():
    needed = len(solution(EASY, 1))
    in_time = played(MazeSpec(max_turns=needed), 1, *solution(EASY, 1))
    assert in_time.episode.solved
    late = played(MazeSpec(max_turns=needed - 1), 1, *solution(EASY, 1)[:-1])
    assert (late.episode.done, late.episode.solved) == (True, False)


def test_no_step_is_taken_after_the_end():
    over = played(EASY, 1, "('stop', 'stop')").episode
    with pytest.raises(ValueError, match="over after 1 turns"):
        step(over, "('move', 0)")


def test_a_mixed_reward_pays_for_form_too():
    spec = MazeSpec(reward="sft_mixed", max_turns=2)
    tagged = "<observation>a wall</observation><justification>none</justification><action>stop</action>"
    assert played(spec, 1, "('x', 1)", tagged).reward == pytest.approx(0.1)
    assert played(spec, 1, "<observation></observation><justification>x</justification><action>stop</action>").reward == 0.0


@given(SEEDS, st.lists(st.sampled_from([as_text(name, "tuple") for name in MOVES] + ["?"]), max_size=12))
def test_the_same_replies_give_the_same_episode_also_from_a_state_in_between(seed: int, replies: list[str]):
    one = other = begin(EASY, seed)
    for reply in replies:
        one = step(one, reply).episode
        other = Episode.from_state(json.loads(json.dumps(step(other, reply).episode.to_state())))
    assert one == other


def test_a_state_of_another_version_is_refused():
    with pytest.raises(ValueError, match="version 9"):
        Episode.from_state(begin(EASY, 1).to_state() | {"version": 9})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"size": 8}, "size is 8: it has to be odd"),
        ({"size": 3}, "size is 3: from 5 to 101"),
        ({"max_turns": 0}, "max_turns is 0"),
        ({"reward": "much"}, "reward is 'much': one of sparse, sft_mixed"),
    ],
)
def test_rules_that_no_maze_can_have_are_refused_with_the_limit(wrong: dict, said: str):
    with pytest.raises(BadSpec, match=said):
        MazeSpec(**wrong)


# -- looks -------------------------------------------------------------------------------------------------------------


@given(SEEDS, st.sampled_from([8, 16, 25]))
def test_the_picture_shows_walls_floor_goal_and_agent_in_their_colours(seed: int, cell_px: int):
    episode = begin(MazeSpec(cell_px=cell_px), seed)
    image = picture(episode)
    assert image.shape == (9 * cell_px, 9 * cell_px, 3) and image.dtype == np.uint8
    middle = image[cell_px // 2 :: cell_px, cell_px // 2 :: cell_px]
    corner = image[::cell_px, ::cell_px]
    for row, line in enumerate(episode.maze.rows):
        for column, cell in enumerate(line):
            wanted = (169, 169, 169) if cell == "#" else (255, 0, 0) if (row, column) == episode.maze.goal else (255, 255, 255)
            assert tuple(corner[row, column]) == wanted
    assert tuple(middle[episode.position]) == (0, 0, 255)


def test_an_agent_that_walked_off_the_goal_left_a_white_disc_in_it():
    there = played(MazeSpec(max_turns=100), 1, *solution(EASY, 1)[:-1]).episode
    back = {"right": "left", "left": "right", "up": "down", "down": "up"}[oracle(there.maze)[-2]]
    off = step(there, as_text(back, "tuple")).episode
    row, column = (25 * there.maze.goal[0] + 12, 25 * there.maze.goal[1] + 12)
    assert tuple(picture(there)[row, column]) == (0, 0, 255)
    assert tuple(picture(off)[row, column]) == (255, 255, 255)


def test_the_text_says_the_same_with_one_more_border():
    episode = begin(EASY, 1)
    lines = text_picture(episode).splitlines()
    assert len(lines) == 11 and {len(line) for line in lines} == {11} and {lines[0], lines[-1]} == {"#" * 11}
    assert lines[episode.position[0] + 1][episode.position[1] + 1] == "A"
    assert lines[episode.maze.goal[0] + 1][episode.maze.goal[1] + 1] == "T"


def test_text_comes_first_for_skyrl_and_the_picture_for_visgym_with_the_turns_left():
    (skyrl,) = messages(begin(EASY, 1))
    assert [part["type"] for part in skyrl["content"]] == ["text", "image_url"]
    (visgym,) = messages(begin(MazeSpec(prompt="visgym"), 1))
    assert [part["type"] for part in visgym["content"]] == ["image_url", "text"]
    assert "21 left" in visgym["content"][1]["text"]
    assert visgym["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")


def test_nothing_is_shown_after_the_end():
    assert observe(played(EASY, 1, "('stop', 'stop')")) == []
    (after,) = observe(played(EASY, 1, into_a_wall(1)))
    assert "wall" in after["content"][0]["text"]


# -- sets --------------------------------------------------------------------------------------------------------------


def test_evaluation_sets_are_fixed_and_no_maze_is_in_two_of_them_or_twice():
    digests = [maze.digest() for name in HELD_OUT for maze in evaluation_set(name).mazes()]
    assert len(digests) == len(set(digests)) == 64 + 512 + 128
    assert {name: evaluation_set(name).digest() for name in HELD_OUT} == {
        "easy-64": "23221045659a4078",
        "easy-512": "98becf83fcd1d310",
        "hard-128": "288da50e97e72431",
    }


def test_the_oracles_share_of_the_sets_under_their_turn_limit_is_known():
    assert {name: evaluation_set(name).solvable_share(21) for name in ("easy-64", "easy-512")} == {
        "easy-64": 63 / 64,
        "easy-512": 508 / 512,
    }


def test_no_maze_of_an_evaluation_set_is_ever_given_to_training():
    held = evaluation_set("easy-64")
    assert all(is_held_out(maze) for maze in held.mazes())
    seeds = training_mazes(9, 0)
    given_out = [next(seeds) for _ in range(3000)]
    assert not {maze.digest() for _, maze in given_out} & {
        maze.digest() for name in HELD_OUT for maze in evaluation_set(name).mazes()
    }
    left_out = set(range(given_out[-1][0] + 1)) - {seed for seed, _ in given_out}
    assert left_out and all(is_held_out(make_maze(9, seed)) for seed in left_out)  # some seeds do make one of them
