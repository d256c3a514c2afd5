"""The base's shape and its tokenizer: Qwen3-VL, small enough for two cores, one image token for each cell of a maze."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl import Qwen3VLProcessor, Qwen3VLVideoProcessor

from training.demo_base import CHAT_TEMPLATE, SPECIAL_TOKENS
from training.demo_text import corpus
from training.maze import MazeSpec, begin, messages
from training.maze.episode import FEEDBACK
from training.maze.grid import MOVES

# What the base was made for; another size, or text instead of pictures, is for others to try.
MAZES = MazeSpec(cell_px=16, actions="keyword")

HIDDEN, LAYERS, HEAD_DIM, INTERMEDIATE = 192, 4, 32, 512
VISION_HIDDEN, VISION_DEPTH, VISION_INTERMEDIATE = 128, 6, 384
MAX_VOCABULARY = 2560
MAX_POSITIONS = 4096
PATCH_PX = 16  # nothing is merged, so that a maze's cell is a patch and an image token
IMAGE_PX = (32, 192)  # images get about the area of a square with sides from and to these
TAGS = ("<action>", "</action>")


def make_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """Byte-level BPE (any text round-trips) that knows the demo's words, the maze's and an action's tags as one token each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed), trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=MAX_POSITIONS
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _texts(seed: int) -> Iterator[str]:
    yield from corpus(seed)
    question = messages(begin(MAZES, seed=0))[0]["content"][0]["text"]
    yield from [question, *FEEDBACK.values(), *MOVES, "stop"] * 40


def make_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLProcessor:
    least, most = IMAGE_PX
    size = {"shortest_edge": least**2, "longest_edge": most**2}
    patches = {"patch_size": PATCH_PX, "temporal_patch_size": 2, "merge_size": 1}
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
        "intermediate_size": INTERMEDIATE,
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
        "depth": VISION_DEPTH,
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": VISION_INTERMEDIATE,
        "num_heads": VISION_HIDDEN // HEAD_DIM,
        "patch_size": PATCH_PX,
        "spatial_merge_size": 1,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": MAZES.size**2,
        "deepstack_visual_indexes": [VISION_DEPTH // 2],
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
    """Random weights in float32. Embeddings and head are scaled up, to be of use as they are: no lesson changes them.

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
