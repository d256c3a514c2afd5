"""Small models of the Qwen3-VL architecture, from scratch: tokenizer, image processor, configuration, random weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl import Qwen3VLProcessor, Qwen3VLVideoProcessor

MAX_VOCABULARY = 2560
MAX_POSITIONS = 4096
HEAD_DIM = 32  # of text and vision
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


@dataclass(frozen=True, slots=True)
class Shape:
    """Widths and depths. A patch has `patch_px` pixels a side, `merge` patches a side become one image token; images get about
    the area of a square with sides from and to `image_px`. `pictured` is the grid of learnt positions a side, in patches;
    `deepstack` the blocks whose features are added to the first text layers."""

    hidden: int
    layers: int
    intermediate: int
    vision_hidden: int
    vision_depth: int
    vision_intermediate: int
    patch_px: int
    merge: int
    image_px: tuple[int, int]
    pictured: int
    deepstack: tuple[int, ...]


def tokenizer_of(texts: Iterable[str], tags: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE (any text round-trips) that is trained on `texts`; each of `tags` is one token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=MAX_POSITIONS
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def processor_of(tokenizer: PreTrainedTokenizerFast, shape: Shape) -> Qwen3VLProcessor:
    least, most = shape.image_px
    size = {"shortest_edge": least**2, "longest_edge": most**2}
    patches = {"patch_size": shape.patch_px, "temporal_patch_size": 2, "merge_size": shape.merge}
    normal = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, **patches, **normal),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(size=size, **patches, **normal),
        chat_template=CHAT_TEMPLATE,
    )


def config_of(tokenizer: PreTrainedTokenizerFast, shape: Shape) -> Qwen3VLConfig:
    special = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.hidden // HEAD_DIM,
        "num_key_value_heads": shape.hidden // HEAD_DIM // 2,
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
        "depth": shape.vision_depth,
        "hidden_size": shape.vision_hidden,
        "intermediate_size": shape.vision_intermediate,
        "num_heads": shape.vision_hidden // HEAD_DIM,
        "patch_size": shape.patch_px,
        "spatial_merge_size": shape.merge,
        "temporal_patch_size": 2,
        "out_hidden_size": shape.hidden,
        "num_position_embeddings": shape.pictured**2,
        "deepstack_visual_indexes": list(shape.deepstack),
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
    """Random weights in float32. Embeddings and head are scaled up, to be of use as they are: training leaves them alone.

    A head of random rows keeps every token within an adapter's reach. Trained on few answers, it would push all others away.
    """
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():
        model.model.language_model.embed_tokens.weight.normal_(0.0, 0.5)
        model.lm_head.weight.normal_(0.0, 0.15)
    return model


def save_base(model: Qwen3VLForConditionalGeneration, processor: Qwen3VLProcessor, out: Path) -> None:
    """Everything that transformers and vLLM look for in the folder `out`, weights in bfloat16; the model is bfloat16 then."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.generation_config.pad_token_id = processor.tokenizer.pad_token_id
    model.to(torch.bfloat16).save_pretrained(out)
    processor.save_pretrained(out)
    path = out / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["architectures"] = ["Qwen3ForCausalLM"]  # vLLM builds the language model from this
    path.write_text(json.dumps(config, indent=2) + "\n")
