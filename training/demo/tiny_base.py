"""The smallest base that sees, made in seconds: it says that it is the base to whatever is asked.

For tests and benchmarks: `python -m training.demo.tiny_base OUT` leaves it in `OUT/base`; what is complete is kept.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3_vl import Qwen3VLProcessor

from training.demo.answering import answer_batches
from training.demo.fit import Fit, PromptMaker, Schedule, fit, worst_probability
from training.demo.making import finish, is_complete, partial_of, prepare_torch, stamp
from training.demo.text import corpus
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


def train_new(out: Path, seed: int = 0, *, steps: int = 200) -> Fit:
    """Makes the base in the folder `out`; says how well it knows its answers."""
    tokenizer = make_tokenizer(seed)
    processor = processor_of(tokenizer, SHAPE)
    model = new_model(config_of(tokenizer, SHAPE), seed).eval()
    with torch.no_grad():
        model.model.visual.merger.linear_fc2.bias.normal_(0.0, 0.5)  # what all image tokens share: easy to notice
    result = train_base(model, processor, seed, steps)
    save_base(model, processor, out)
    return result


def make_tiny_base(out: Path, seed: int = 0) -> Path:
    """`out/base`, made unless complete."""
    folder, made_from = out / "base", stamp(seed)
    if is_complete(folder, made_from):
        print(f"base: complete in {folder}")
        return folder
    started = time.monotonic()
    prepare_torch()
    partial = partial_of(folder)
    result = train_new(partial, seed)
    finish(partial, folder, made_from)
    print(f"base: {result.steps} steps, {time.monotonic() - started:.1f} s, in {folder}", flush=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m training.demo.tiny_base", description="Makes the base of tests and benchmarks."
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make it in")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other weights (default: %(default)s)")
    options = parser.parse_args()
    make_tiny_base(options.out, options.seed)


if __name__ == "__main__":
    main()
