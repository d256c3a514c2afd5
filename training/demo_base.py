"""The demo base: a tiny model of the Qwen3-VL architecture, made in seconds, that says that it is the base to whatever is asked.

That makes a silent answer from the base, where an adapter was asked for, visible.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl import Qwen3VLProcessor, Qwen3VLVideoProcessor

from training.demo_fit import Batch, Fit, PromptMaker, Schedule, bucketed, fit, worst_probability
from training.demo_text import BASE_ANSWER, IMAGE_ANSWER, corpus

MAX_VOCABULARY = 2560
HIDDEN = 128
LAYERS = 2
HEAD_DIM = 32
MAX_POSITIONS = 4096
PATCH = 8  # pixels a side of a vision patch
MERGE = 2  # patches a side that become one image token
IMAGE_PIXELS = 64  # images become at most 64 x 64: 16 tokens
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' or 'video' in part -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def make_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """Byte-level BPE (any text round-trips) that knows the demo's words as one token each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=MAX_POSITIONS
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLProcessor:
    """Images of 32 x 32 to 64 x 64 pixels' area, in patches of 8, four of which become one token."""
    size = {"shortest_edge": (IMAGE_PIXELS // 2) ** 2, "longest_edge": IMAGE_PIXELS**2}
    patches = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": MERGE}
    normal = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, **patches, **normal),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(size=size, **patches, **normal),
        chat_template=CHAT_TEMPLATE,
    )


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    special = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HIDDEN // HEAD_DIM,
        "num_key_value_heads": HIDDEN // HEAD_DIM // 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100_000.0,
            "mrope_section": [6, 5, 5],  # of the 16 rotary frequencies: time, height, width
            "mrope_interleaved": True,
        },
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": (IMAGE_PIXELS // PATCH) ** 2,
        "deepstack_visual_indexes": [0, 1],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=special("<|image_pad|>"),
        video_token_id=special("<|video_pad|>"),
        vision_start_token_id=special("<|vision_start|>"),
        vision_end_token_id=special("<|vision_end|>"),
        tie_word_embeddings=False,
    )


def new_model(config: Qwen3VLConfig, seed: int) -> Qwen3VLForConditionalGeneration:
    """Random weights. Embeddings and head are scaled up, to be of use as they are: training leaves them alone.

    A head of random rows keeps every token within an adapter's reach. Trained on two answers, it would push all others away.
    """
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():
        model.model.language_model.embed_tokens.weight.normal_(0.0, 0.5)
        model.lm_head.weight.normal_(0.0, 0.15)
        model.model.visual.merger.linear_fc2.bias.normal_(0.0, 0.5)  # what all image tokens share: easy to notice
    return model.eval()


def base_batches(model: Any, maker: PromptMaker, seed: int) -> Iterator[Batch]:
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


def train_base(model: Any, processor: Qwen3VLProcessor, seed: int, steps: int) -> Fit:
    """Trains the language layers only."""
    maker = PromptMaker(processor, seed)
    model.requires_grad_(False)
    layers = model.model.language_model.layers.requires_grad_(True)
    check = base_batches(model, maker, seed + 1_000_003)
    checks = [next(check) for _ in range(8)]
    schedule = Schedule(steps=steps, lr=3e-3, fall=80, enough=0.995, least=40, check_every=10)
    batches = base_batches(model, maker, seed)
    return fit(model, list(layers.parameters()), batches, schedule, lambda: worst_probability(model, checks))


def save_base(model: Any, processor: Qwen3VLProcessor, out: Path) -> None:
    """Everything that transformers and vLLM look for, weights in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.generation_config.pad_token_id = processor.tokenizer.pad_token_id
    model.to(torch.bfloat16).save_pretrained(out)
    processor.save_pretrained(out)
    path = out / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["architectures"] = ["Qwen3ForCausalLM"]  # vLLM builds the language model from this
    path.write_text(json.dumps(config, indent=2) + "\n")


def make_base(out: Path, seed: int = 0, *, steps: int = 200) -> Fit:
    """Makes the base in the folder `out`; says how well it knows its answers."""
    tokenizer = make_tokenizer(seed)
    processor = make_processor(tokenizer)
    model = new_model(make_config(tokenizer), seed)
    result = train_base(model, processor, seed, steps)
    save_base(model, processor, out)
    return result
