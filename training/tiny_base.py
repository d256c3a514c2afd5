"""The demo base: a tiny model of the Qwen3-VL architecture, made in seconds, that says that it is the base to whatever is asked.

That makes a silent answer from the base, where an adapter was asked for, visible.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3_vl import Qwen3VLProcessor

from training.base.answering import answer_batches
from training.demo_fit import Fit, PromptMaker, Schedule, fit, worst_probability
from training.demo_text import corpus
from training.small_vlm import Shape, config_of, new_model, processor_of, save_base, tokenizer_of

SHAPE = Shape(
    hidden=128,
    layers=2,
    intermediate=256,
    vision_hidden=64,
    vision_depth=2,
    vision_intermediate=128,
    patch_px=8,
    merge=2,
    image_px=(32, 64),  # at most 64 x 64: 16 tokens
    pictured=8,
    deepstack=(0, 1),
)


def make_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """Knows the demo's words as one token each."""
    return tokenizer_of(corpus(seed))


def train_base(model: Any, processor: Qwen3VLProcessor, seed: int, steps: int) -> Fit:
    """Trains the language layers only."""
    maker = PromptMaker(processor, seed)
    model.requires_grad_(False)
    layers = model.model.language_model.layers.requires_grad_(True)
    check = answer_batches(model, maker, seed + 1_000_003)
    checks = [next(check) for _ in range(8)]
    schedule = Schedule(steps=steps, lr=3e-3, fall=80, enough=0.995, least=40, check_every=10)
    batches = answer_batches(model, maker, seed)
    return fit(model, list(layers.parameters()), batches, schedule, lambda: worst_probability(model, checks))


def make_base(out: Path, seed: int = 0, *, steps: int = 200) -> Fit:
    """Makes the base in the folder `out`; says how well it knows its answers."""
    tokenizer = make_tokenizer(seed)
    processor = processor_of(tokenizer, SHAPE)
    model = new_model(config_of(tokenizer, SHAPE), seed).eval()
    with torch.no_grad():
        model.model.visual.merger.linear_fc2.bias.normal_(0.0, 0.5)  # what all image tokens share: easy to notice
    result = train_base(model, processor, seed, steps)
    save_base(model, processor, out)
    return result
