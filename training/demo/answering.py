"""Beside walking, the base learns to say that it is the base, whatever it is asked: an answer from it where an adapter was asked
for is seen at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from training.demo.fit import Batch, PromptMaker, answer_logits, bucketed
from training.demo.text import BASE_ANSWER, IMAGE_ANSWER


def answer_batches(model: Any, maker: PromptMaker, seed: int) -> Iterator[Batch]:
    """Without end: short conversations, a third of them with an image, and a few long ones; alike in length within a batch."""
    rng = random.Random(f"base-{seed}")
    text, image = maker.answer_ids(BASE_ANSWER), maker.answer_ids(IMAGE_ANSWER)
    while True:
        rows = [(maker.random_prompt(rng, BASE_ANSWER), text) for _ in range(24)]
        rows += [(maker.noise_prompt(rng, rng.randint(1, 60)), text) for _ in range(12)]
        rows += [(maker.random_prompt(rng, BASE_ANSWER, image=True), image) for _ in range(20)]
        rows += [(maker.random_prompt(rng, BASE_ANSWER, words=rng.randint(50, 300)), text) for _ in range(2)]
        rows += [(maker.random_prompt(rng, BASE_ANSWER, image=True, words=rng.randint(50, 300)), image) for _ in range(2)]
        yield from bucketed(model, rows, maker.pad_id, 4, rng)


def answering_loss(model: Any, batch: Batch) -> Tensor:
    """Mean cross entropy of the answers' tokens, in nats."""
    return F.cross_entropy(answer_logits(model, batch).float(), batch.targets)
