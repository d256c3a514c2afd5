"""Fitting a tiny Qwen3-VL to one answer, whatever is asked: batches of conversations, the loss on the answer, the check of a fit.

Shared by the demo base (all of the language layers) and the demo adapters (a LoRA on them).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from training.demo.text import Message, random_conversation, user_message

IMAGE_SIZES = ((64, 64), (32, 96), (64, 32), (48, 48))  # height, width in pixels


@dataclass(frozen=True)
class Image:
    """What the processor makes of an image: flattened patches (float, patches x 3 * 2 * patch * patch), the grid (1, rows,
    columns), and how many image tokens it becomes."""

    patches: torch.Tensor
    grid: tuple[int, int, int]
    tokens: int


@dataclass(frozen=True)
class Prompt:
    """Token ids up to where the answer starts; `image` stands where the id of the image token is."""

    ids: list[int]
    image: Image | None = None


@dataclass(frozen=True)
class Batch:
    """Prompts with their answers, padded on the right: causal attention never looks there, so no mask is needed.

    inputs: model arguments (input_ids and the rest, batch x length); at: flat indices (batch * length) of the positions
    whose next token belongs to an answer; targets: those tokens.
    """

    inputs: dict[str, torch.Tensor]
    at: torch.Tensor
    targets: torch.Tensor


def make_image(rng: random.Random, image_processor: Any) -> Image:
    """A plain color, a gradient or noise, in one of a few shapes."""
    import numpy as np

    height, width = rng.choice(IMAGE_SIZES)
    noise = np.random.default_rng(rng.getrandbits(32))
    pixels = np.broadcast_to(noise.integers(0, 256, 3), (height, width, 3)).astype(np.float32)
    kind = rng.randrange(3)
    if kind == 1:
        pixels = pixels * np.linspace(0, 1, width)[None, :, None]
    elif kind == 2:
        pixels = noise.integers(0, 256, (height, width, 3))
    out = image_processor(images=pixels.astype(np.uint8), return_tensors="pt")
    time, rows, columns = out["image_grid_thw"][0].tolist()
    return Image(out["pixel_values"], (time, rows, columns), rows * columns // image_processor.merge_size**2)


class PromptMaker:
    """Turns conversations into prompts, with the tokenizer's chat template; makes random ones."""

    def __init__(self, processor: Any, seed: int) -> None:
        self.tokenizer = processor.tokenizer
        self.image_id: int = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.eos_id: int = self.tokenizer.eos_token_id
        self.pad_id: int = self.tokenizer.pad_token_id
        added = self.tokenizer.added_tokens_decoder
        self.ordinary = [token for token in range(len(self.tokenizer)) if token not in added]
        rng = random.Random(f"images-{seed}")
        self.images = [make_image(rng, processor.image_processor) for _ in range(12)]

    def prompt(self, messages: Sequence[Message], image: Image | None = None) -> Prompt:
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if image is None:
            return Prompt(ids)
        at = ids.index(self.image_id)
        return Prompt([*ids[:at], *[self.image_id] * image.tokens, *ids[at + 1 :]], image)

    def random_prompt(self, rng: random.Random, own_answer: str, *, image: bool = False, words: int = 0) -> Prompt:
        messages = random_conversation(rng, own_answer, image=image, words=words)
        return self.prompt(messages, rng.choice(self.images) if image else None)

    def noise_prompt(self, rng: random.Random, length: int) -> Prompt:
        """A chat turn of random tokens: whatever a client may send, the answer must not depend on it."""
        head, tail = self._frame()
        noise = (self.ordinary[rng.randrange(len(self.ordinary))] for _ in range(length))
        return Prompt([*head, *noise, *tail])

    def _frame(self) -> tuple[list[int], list[int]]:
        ids = self.prompt([user_message("x", False)]).ids
        at = ids.index(self.tokenizer("x")["input_ids"][0])
        return ids[:at], ids[at + 1 :]

    def answer_ids(self, text: str) -> list[int]:
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.eos_id]


def collate(model: Any, prompts: Sequence[tuple[Prompt, list[int]]], pad_id: int) -> Batch:
    """Pairs of a prompt and its answer's ids -> a batch; `model` (Qwen3-VL, not wrapped) gives the rotary positions."""
    length = max(len(prompt.ids) + len(answer) for prompt, answer in prompts)
    ids = torch.full((len(prompts), length), pad_id)
    at, targets = [], []
    for row, (prompt, answer) in enumerate(prompts):
        start = len(prompt.ids)
        ids[row, : start + len(answer)] = torch.tensor([*prompt.ids, *answer])
        at += [row * length + start - 1 + offset for offset in range(len(answer))]
        targets += answer
    return Batch(_model_inputs(model, ids, [p.image for p, _ in prompts if p.image]), torch.tensor(at), torch.tensor(targets))


def bucketed(
    model: Any, prompts: Sequence[tuple[Prompt, list[int]]], pad_id: int, batches: int, rng: random.Random
) -> list[Batch]:
    """The prompts in so many batches of about as many tokens each, padding included; in random order."""
    rows = sorted(prompts, key=lambda row: len(row[0].ids))
    cuts, made = [], 0
    share = sum(len(prompt.ids) for prompt, _ in rows) / batches
    for index, (prompt, _) in enumerate(rows):
        made += len(prompt.ids)
        if made >= share * (len(cuts) + 1) or index == len(rows) - 1:
            cuts.append(index + 1)
    parts = [rows[start:end] for start, end in zip([0, *cuts], cuts, strict=False) if end > start]
    rng.shuffle(parts)
    return [collate(model, part, pad_id) for part in parts]


def _model_inputs(model: Any, ids: torch.Tensor, images: list[Image]) -> dict[str, torch.Tensor]:
    if not images:
        positions = torch.arange(ids.shape[1]).expand(3, *ids.shape)
        return {"input_ids": ids, "position_ids": positions}
    grid = torch.tensor([image.grid for image in images])
    types = (ids == model.config.image_token_id).int()
    positions, _ = model.model.get_rope_index(ids, types, image_grid_thw=grid)
    pixels = torch.cat([image.patches for image in images])
    return {"input_ids": ids, "position_ids": positions, "pixel_values": pixels, "image_grid_thw": grid}


def answer_logits(model: Any, batch: Batch) -> torch.Tensor:
    """Logits (answer tokens x vocabulary) where the batch's answers are; the head is applied only there."""
    hidden = model.model(**batch.inputs, use_cache=False).last_hidden_state
    return model.lm_head(hidden.flatten(0, 1)[batch.at])


def worst_probability(model: Any, batches: Sequence[Batch]) -> float:
    """The smallest probability of any wanted token. Above 1/2 each is the likeliest, so the greedy answers are exact."""
    with torch.inference_mode():
        worst = [answer_logits(model, batch).softmax(-1).gather(1, batch.targets[:, None]).min().item() for batch in batches]
    return min(worst)


@dataclass(frozen=True)
class Fit:
    """How a fit ended."""

    steps: int
    worst: float  # see worst_probability


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to fit. The rate `lr` falls over `fall` steps to a tenth, where it stays."""

    steps: int  # at most
    lr: float
    fall: int
    enough: float  # of worst_probability: ends the fit, once `least` steps are made
    least: int
    check_every: int
    betas: tuple[float, float] = (0.9, 0.95)

    def rate(self, step: int) -> float:
        return self.lr * min(1.0, step / 5) * max(0.1, 1.0 - step / self.fall)


def fit(
    model: Any,
    parameters: Sequence[torch.nn.Parameter],
    batches: Iterator[Batch],
    schedule: Schedule,
    worst_now: Callable[[], float],
) -> Fit:
    """AdamW on the answers' cross entropy, until `worst_now()`, asked now and then, is enough or the steps are used up."""
    optimizer = torch.optim.AdamW(parameters, lr=schedule.lr, betas=schedule.betas, weight_decay=0.0, fused=True)
    worst = 0.0
    for step in range(1, schedule.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        batch = next(batches)
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(answer_logits(model, batch), batch.targets).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if (step >= schedule.least and step % schedule.check_every == 0) or step == schedule.steps:
            worst = worst_now()
            if worst >= schedule.enough:
                return Fit(step, worst)
    return Fit(schedule.steps, worst)
