"""The maze base: its shape and its lessons."""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from training.base.architecture import MAZES, SHAPE, make_tokenizer
from training.base.demonstrations import SHORT_TURNS, demonstrate, demonstrations
from training.base.fitting import Course
from training.base.make import NotLearnt, Recipe, Tried, until_wanted
from training.base.seeing import WAYS, lesson, lessons, patches, way_to_goal
from training.base.walking import Teller
from training.learner.pictures import Eye
from training.maze import begin, evaluation_set, is_held_out, make_maze, messages, observe, oracle, picture, training_mazes
from training.maze.actions import as_text
from training.small_vlm import config_of, new_model, processor_of

ROOT = Path(__file__).parents[3]
WEIGHTS = ROOT / "training/base/weights/model.safetensors"
LARGEST_BYTES = 12 * 2**20


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def eye(tokenizer) -> Eye:
    model = new_model(config_of(tokenizer, SHAPE), 0)
    return Eye(model.model.visual, processor_of(tokenizer, SHAPE).image_processor, torch.device("cpu"))


def test_a_reply_is_four_tokens(tokenizer):
    for action in ("right", "up", "left", "down", "stop"):
        assert len(tokenizer.encode(as_text(action, "keyword"))) + 1 == 4


@pytest.mark.parametrize("size", [9, 11])
def test_a_cell_is_an_image_token(eye: Eye, size: int):
    assert eye.grid(begin(replace(MAZES, size=size), 7)) == (1, size, size)


def test_patches_are_cut_as_the_image_processor_cuts_them(tokenizer):
    images = [picture(begin(MAZES, seed)) for seed in range(3)]
    processed = processor_of(tokenizer, SHAPE).image_processor(images=images, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(patches(np.stack(images)), processed, rtol=0, atol=1e-6)


def test_the_way_is_the_oracles_from_every_cell():
    for seed in range(20):
        maze = make_maze(9, seed)
        way = way_to_goal(maze)
        for at, (name, moves) in enumerate(zip(way.ways, way.moves, strict=True)):
            cell = divmod(at, 9)
            if not maze.is_floor(cell):
                assert WAYS[name] == "wall"
            elif cell == maze.goal:
                assert WAYS[name] == "goal"
            else:
                shown = oracle(maze, cell)
                assert (WAYS[name], moves) == (shown[0], len(shown) - 1)


def test_a_lesson_says_where_the_agent_stands():
    states = [begin(MAZES, seed) for seed in range(4)]
    where = lesson(states).is_agent_n.view(4, 9, 9)
    assert where.sum() == 4
    assert all(where[at][state.position] == 1 for at, state in enumerate(states))


def test_lessons_of_a_seed_are_the_same_again():
    mazes = list(islice(training_mazes(9, 0), 50))
    first, again = (next(lessons(MAZES, mazes, 8, seed=3)) for _ in range(2))
    assert torch.equal(first.patches, again.patches)
    assert not torch.equal(first.patches, next(lessons(MAZES, mazes, 8, seed=4)).patches)


def test_a_demonstration_wants_the_oracles_action_also_after_a_mistake():
    walk = demonstrate(MAZES, 5, 0.5, random.Random(1))
    assert walk.taken != walk.wanted
    for state, wanted in zip(walk.states, walk.wanted, strict=True):
        assert wanted == oracle(state.maze, state.position)[0]


def test_without_mistakes_a_demonstration_solves_its_maze():
    walk = demonstrate(MAZES, 5, 0.0, random.Random(1))
    assert walk.turns[-1].episode.solved


def test_some_demonstrations_are_broken_off():
    shown = list(islice(demonstrations(MAZES, [(5, make_maze(9, 5))], 0.0, seed=0, short=0.5), 40))
    assert {len(walk.states) <= SHORT_TURNS for walk in shown} == {True, False}


def test_a_demonstration_is_the_conversation_that_the_chat_template_makes(tokenizer, eye: Eye):
    walk = demonstrate(MAZES, 5, 0.3, random.Random(2))
    shown = Teller(tokenizer, eye).show(walk)
    talk = list(messages(walk.states[0], with_pictures=False))
    for taken, turn in zip(walk.taken, walk.turns, strict=True):
        talk += [{"role": "assistant", "content": as_text(taken, "keyword")}, *observe(turn, with_pictures=False)]
    text = tokenizer.apply_chat_template(talk, tokenize=False).removesuffix("\n")
    expected = tokenizer.encode(text.replace("<|image_pad|>", "<|image_pad|>" * 81))
    assert shown.row.ids_l.tolist() == expected


def test_what_is_learnt_stands_where_the_replies_do(tokenizer, eye: Eye):
    walk = demonstrate(MAZES, 5, 0.3, random.Random(2))
    shown = Teller(tokenizer, eye).show(walk)
    said = tokenizer.decode(shown.row.ids_l[shown.row.sampled_at])
    assert re.findall(r"<action>(\w+)</action>", said) == list(walk.taken)
    wanted = tokenizer.decode([token for reply in shown.wanted for token in reply])
    assert re.findall(r"<action>(\w+)</action>", wanted) == list(walk.wanted)


def test_no_lesson_has_a_maze_of_an_evaluation_set():
    first = evaluation_set("easy-64").seeds[0]
    assert is_held_out(make_maze(9, first))
    assert not any(is_held_out(maze) for _, maze in islice(training_mazes(9, 10_000_000), 500))


def test_the_rate_rises_and_falls():
    course = Course(steps=100, batch=1, lr=1.0, rise=10)
    rates = [course.rate(step) for step in range(1, 101)]
    assert rates[0] < rates[4] < max(rates) <= 1.0
    assert rates[-1] == pytest.approx(0.05)


def test_the_weights_are_those_that_the_readme_names():
    content = WEIGHTS.read_bytes()
    assert len(content) <= LARGEST_BYTES
    assert hashlib.sha256(content).hexdigest() in (ROOT / "training/README.md").read_text()


def lesson_of(solved: dict[float, list[float]], weight: torch.Tensor):
    """A lesson by the script: at each rate, what each step's try solves; each step adds one to the weight."""

    def lesson(course: Course):
        for step, share in enumerate(solved[course.lr], 1):
            weight.add_(1)
            yield Tried(step, 1.0, share)

    return lesson


def test_a_lesson_that_went_too_far_goes_back_and_on_more_slowly():
    weight, recipe = torch.zeros(1), Recipe(walking=Course(steps=3, batch=1, lr=4.0))
    script = {4.0: [0.02, 0.3, 0.7], 1.0: [0.35, 0.6], 0.25: [0.41]}
    tries = list(until_wanted(recipe, lesson_of(script, weight), [weight]))
    assert [one.solved for one in tries] == [0.02, 0.3, 0.7, 0.35, 0.6, 0.41]
    assert weight.item() == 4.0, "two steps at the first rate, one at the second, one at the third"


def test_a_lesson_that_never_solves_as_much_as_is_wanted_says_so():
    weight = torch.zeros(1)
    short = Recipe(walking=Course(steps=2, batch=1, lr=4.0))
    with pytest.raises(NotLearnt, match="2 steps did not bring"):
        list(until_wanted(short, lesson_of({4.0: [0.1, 0.2]}, weight), [weight]))
    jumping = replace(short, approaches=2)
    with pytest.raises(NotLearnt, match="2 times"):
        list(until_wanted(jumping, lesson_of({4.0: [0.9], 1.0: [0.9]}, weight), [weight]))
