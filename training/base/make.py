"""The recipe of the base: what it learns, in which order, and when it walks badly enough to have something left to learn."""

from __future__ import annotations

import copy
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from training.base.architecture import MAZES, SHAPE, make_tokenizer
from training.base.demonstrations import demonstrations
from training.base.fitting import Course, autocast, fit
from training.base.seeing import Examiner, known, lessons, loss_of
from training.base.walking import Teller, walking_loss, walks
from training.demo.answering import answer_batches, answering_loss
from training.demo.fit import PromptMaker
from training.learner.pictures import Eye, quicken
from training.maze import Maze, training_mazes
from training.rollouts import Rollouts
from training.small_vlm import config_of, new_model, processor_of, save_base
from training.spec import TrainSpec
from training.trajectory import Sampling, Task

Say = Callable[[str], None]

SEEING = Course(steps=3000, batch=64, lr=1.5e-3)
ANSWERING = Course(steps=240, batch=15, lr=3e-3, rise=5)
WALKING = Course(steps=400, batch=16, lr=1e-3, rise=20)


SOME = 0.03  # of mazes


class NotLearnt(RuntimeError):
    """The lessons ended without a base that solves the wanted share; says what was seen."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Lessons are on mazes of seeds from `first_seed`; `tried_on` mazes of other seeds say when to stop: as soon as the base
    solves from `least` to `most` of them at `temperature`. No maze of an evaluation set is among either."""

    seed: int = 0
    first_seed: int = 10_000_000
    seen: int = 150_000  # of 401,408 that there are: with 20,000 the tower knows those better than others
    seeing: Course = SEEING
    answering: Course = ANSWERING
    walking: Course = WALKING
    mistakes: float = 0.3
    short: float = 0.8
    try_every: int = 5  # steps; every one, as soon as anything is solved: from there it goes fast
    try_from: float = 0.8  # of replies right in the lesson: before that nothing is solved
    walked: int = 10_000
    tried_on: int = 256
    temperature: float = 0.7
    least: float = 0.38
    most: float = 0.48
    approaches: int = 4


@dataclass(frozen=True, slots=True)
class Tried:
    """After `step` steps of the walking lesson: the share of replies that were right in it, and of mazes that were solved."""

    step: int
    right: float
    solved: float


def make_base(out: Path, recipe: Recipe, device: torch.device, say: Say) -> list[Tried]:
    """Leaves the base in the folder `out`, with `recipe.json`. The tower, half of the work, is kept beside it and taken up again
    when the same recipe is made once more. Raises NotLearnt."""
    began = time.monotonic()
    tokenizer = make_tokenizer(recipe.seed)
    processor = processor_of(tokenizer, SHAPE)
    model = new_model(config_of(tokenizer, SHAPE), recipe.seed).to(device)
    model.requires_grad_(False)
    learn_to_see(model, recipe, out.with_name(f"{out.name}.tower"), say)
    tries = list(learn_to_walk(model, processor, recipe, say))
    save_base(model, processor, out)
    told = {"recipe": asdict(recipe), "tries": [asdict(tried) for tried in tries], "seconds": time.monotonic() - began}
    (out / "recipe.json").write_text(json.dumps(told, indent=1) + "\n")
    return tries


def mazes_of(recipe: Recipe, count: int) -> list[tuple[int, Maze]]:
    return list(islice(training_mazes(MAZES.size, recipe.first_seed), count))


def learn_to_see(model: Any, recipe: Recipe, kept: Path, say: Say) -> None:
    tower, device = model.model.visual, model.lm_head.weight.device
    name = kept / f"{recipe.seed}-{recipe.seeing.steps}x{recipe.seeing.batch}.pt"
    if name.exists():
        tower.load_state_dict(torch.load(name, weights_only=True))
        say(f"seeing: learnt already, in {name}")
        return
    quicken(tower)
    examiner = Examiner(tower.requires_grad_(True)).to(device)
    asked_next = lessons(MAZES, mazes_of(recipe, recipe.seen), recipe.seeing.batch, recipe.seed)
    knows = (0.0, 0.0)

    def losses() -> Tensor:
        nonlocal knows
        asked = next(asked_next).to(device)
        # where so few cells attend to each other, plain products are several times faster on a CPU
        with autocast(device), sdpa_kernel(SDPBackend.MATH):
            logits, of_blocks = examiner(asked)
        knows = known(logits, asked)
        return loss_of(logits, of_blocks, asked)

    for step, loss in fit(recipe.seeing, list(examiner.parameters()), losses):
        if step % 50 == 0:
            say(f"seeing: step {step}, loss {loss:.4f}, way known in {knows[0]:.2%} of cells, all of {knows[1]:.1%} of pictures")
    examiner.forget()
    kept.mkdir(parents=True, exist_ok=True)
    torch.save(tower.requires_grad_(False).state_dict(), name)


def learn_to_walk(model: Any, processor: Any, recipe: Recipe, say: Say) -> Iterator[Tried]:
    device = model.lm_head.weight.device
    layers = list(model.model.language_model.layers.requires_grad_(True).parameters())
    questions = answer_batches(model, PromptMaker(processor, recipe.seed), recipe.seed)

    def answering() -> Tensor:
        with autocast(device):
            return answering_loss(model, next(questions))

    for step, loss in fit(recipe.answering, layers, answering):
        if step % 20 == 0:
            say(f"answering: step {step}, loss {loss:.4f}")

    eye = Eye(model.model.visual, processor.image_processor, device)
    mazes = mazes_of(recipe, recipe.walked)
    walked = demonstrations(MAZES, mazes, recipe.mistakes, recipe.seed, recipe.short)
    shown = walks(Teller(processor.tokenizer, eye), walked, recipe.walking.batch)
    right = solved = 0.0

    def walking() -> Tensor:
        nonlocal right
        with autocast(device):
            loss, now = walking_loss(model, eye, next(shown), processor.tokenizer.pad_token_id)
            right = 0.5 * right + 0.5 * now
            return loss + answering_loss(model, next(questions))

    def lesson(course: Course) -> Iterator[Tried | None]:
        nonlocal solved
        for step, loss in fit(course, layers, walking):
            say(f"walking: step {step}, loss {loss:.4f}, {right:.1%} of replies right")
            if right < recipe.try_from or (step % recipe.try_every and solved <= SOME):
                yield None
                continue
            tried = Tried(step, right, solved_by(model, processor, recipe))
            solved = tried.solved
            say(f"walking: step {step}, solves {solved:.1%} of {recipe.tried_on} mazes")
            yield tried

    yield from until_wanted(recipe, lesson, layers)


def until_wanted(
    recipe: Recipe, lesson: Callable[[Course], Iterator[Tried | None]], weights: Sequence[Tensor]
) -> Iterator[Tried]:
    """The tries of a lesson, until one solves as much as is wanted. From one that solves more the lesson goes back to the weights
    of the one before, and on at a quarter of the rate: from one step to the next a base may solve twice as much. Raises
    NotLearnt."""
    course, kept = recipe.walking, [weight.detach().clone() for weight in weights]
    for _ in range(recipe.approaches):
        for tried in filter(None, lesson(course)):
            yield tried
            if tried.solved > recipe.most:
                break
            if tried.solved >= recipe.least:
                return
            kept = [weight.detach().clone() for weight in weights]
        else:
            raise NotLearnt(f"{course.steps} steps did not bring the base to {recipe.least} of mazes solved")
        with torch.no_grad():
            for weight, before in zip(weights, kept, strict=True):
                weight.copy_(before)
        course = replace(course, lr=course.lr / 4, rise=1)
    raise NotLearnt(f"{recipe.approaches} times the base went from below {recipe.least} of mazes solved beyond {recipe.most}")


def solved_by(model: Any, processor: Any, recipe: Recipe) -> float:
    """Share of the recipe's other mazes that a copy of the model, in bfloat16 as it will be, solves."""
    seeds = [seed for seed, _ in islice(training_mazes(MAZES.size, 2 * recipe.first_seed), recipe.tried_on)]
    with tempfile.TemporaryDirectory() as folder:
        save_base(copy.deepcopy(model).cpu(), processor, Path(folder))
        return share_solved(Path(folder), seeds, recipe.temperature)


def share_solved(base: Path, seeds: Sequence[int], temperature: float) -> float:
    """Share of mazes of these seeds that the base in a folder solves, one episode each, without an adapter."""
    spec = TrainSpec.from_values({"loramux": {"maze": asdict(MAZES)}}, _playing(base))
    rollouts = Rollouts(spec)
    try:
        played = rollouts.play([Task(seed, dice=seed) for seed in seeds], Sampling(temperature, max_generate_length=8))
    finally:
        rollouts.close()
    return math.fsum(one.solved for one in played) / len(played)


def _playing(base: Path) -> list[str]:
    return [
        f"trainer.policy.model.path={base}",
        "trainer.max_prompt_length=512",
        "generator.max_input_length=4096",
        f"generator.max_turns={MAZES.max_turns}",
        "generator.inference_engine.engine_init_kwargs.max_model_len=4096",
    ]
