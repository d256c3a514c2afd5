"""Tiny bases of many architectures with random weights: `python -m tests.toy_bases NAME OUT` writes one into a folder.

They run apart from the tests' process, which never imports torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from training.demo.tiny_base import make_tokenizer
from training.small_vlm import CHAT_TEMPLATE

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": None,
}
QWEN_VISION = {"depth": 2, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
# Its attention heads are always hidden_size / heads wide.
QWEN2 = {"head_dim": 16, "rope_parameters": MROPE | {"mrope_section": [2, 3, 3]}}
Maker = Callable[[Any], Any]


def _text(config: type, **more: Any) -> Maker:
    return lambda tokenizer: config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **TEXT | more)


def _qwen_vl(config: type, vision: dict[str, Any], **text: Any) -> Maker:
    def make(tokenizer: Any) -> Any:
        special = tokenizer.convert_tokens_to_ids
        return config(
            text_config=TEXT | {"vocab_size": len(tokenizer), "rope_parameters": MROPE} | text,
            vision_config=QWEN_VISION | vision,
            image_token_id=special("<|image_pad|>"),
            video_token_id=special("<|video_pad|>"),
            vision_start_token_id=special("<|vision_start|>"),
            vision_end_token_id=special("<|vision_end|>"),
            tie_word_embeddings=False,
        )

    return make


def _gemma3(tokenizer: Any) -> Any:
    text = TEXT | {"vocab_size": len(tokenizer), "sliding_window": 64, "query_pre_attn_scalar": 32}
    vision = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        "vision_use_head": False,
    }
    special = tokenizer.convert_tokens_to_ids
    return transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=special("<|image_pad|>"),
        boi_token_index=special("<|vision_start|>"),
        eoi_token_index=special("<|vision_end|>"),
    )


_QWEN2_VISION = {"embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2}
_QWEN2_5_VISION = {
    "hidden_size": 64,
    "out_hidden_size": 64,
    "intermediate_size": 96,
    "window_size": 32,
    "fullatt_block_indexes": [1],
    "in_channels": 3,
}
_QWEN3_VISION = {
    "hidden_size": 64,
    "out_hidden_size": 64,
    "intermediate_size": 96,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}
# Architecture by the name that tests use, with the class that saves it.
BASES: dict[str, tuple[str, Maker]] = {
    "llama": ("LlamaForCausalLM", _text(transformers.LlamaConfig)),
    "qwen3": ("Qwen3ForCausalLM", _text(transformers.Qwen3Config, tie_word_embeddings=True)),
    "phi3": ("Phi3ForCausalLM", _text(transformers.Phi3Config, head_dim=16, pad_token_id=0)),
    "qwen3-moe": ("Qwen3MoeForCausalLM", _text(transformers.Qwen3MoeConfig, **EXPERTS)),
    "gpt-oss": (
        "GptOssForCausalLM",
        _text(transformers.GptOssConfig, num_local_experts=4, num_experts_per_tok=2, intermediate_size=32, sliding_window=32),
    ),
    "qwen2-vl": ("Qwen2VLForConditionalGeneration", _qwen_vl(transformers.Qwen2VLConfig, _QWEN2_VISION, **QWEN2)),
    "qwen2.5-vl": ("Qwen2_5_VLForConditionalGeneration", _qwen_vl(transformers.Qwen2_5_VLConfig, _QWEN2_5_VISION, **QWEN2)),
    "qwen3-vl": ("Qwen3VLForConditionalGeneration", _qwen_vl(transformers.Qwen3VLConfig, _QWEN3_VISION)),
    "qwen3-vl-moe": (
        "Qwen3VLMoeForConditionalGeneration",
        _qwen_vl(transformers.Qwen3VLMoeConfig, _QWEN3_VISION, **EXPERTS),
    ),
    "gemma3": ("Gemma3ForConditionalGeneration", _gemma3),
}


def make(name: str, out: Path) -> None:
    """The base, its tokenizer and, for a vision-language one, its processor; about a megabyte."""
    architecture, maker = BASES[name]
    tokenizer = make_tokenizer()
    if name == "gemma3":  # vLLM joins the line breaks around its images
        tokenizer.add_tokens(["\n" * count for count in range(1, 5)])
    torch.manual_seed(0)
    config = maker(tokenizer)
    model = getattr(transformers, architecture)._from_config(config).to(torch.bfloat16)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    if hasattr(config, "vision_config"):
        _save_processor(name, tokenizer, out)
        _name_text_architecture(out)


def _save_processor(name: str, tokenizer: Any, out: Path) -> None:
    if name == "gemma3":
        named = {"boi_token": "<|vision_start|>", "eoi_token": "<|vision_end|>", "image_token": "<|image_pad|>"}
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>", extra_special_tokens=named
        )
        image = transformers.Gemma3ImageProcessor(size={"height": 32, "width": 32})
        transformers.Gemma3Processor(image, tokenizer, chat_template=CHAT_TEMPLATE, image_seq_length=4).save_pretrained(out)
        return
    size = {"shortest_edge": 32**2, "longest_edge": 64**2}
    patches = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
    kind, video = {
        "qwen2-vl": (transformers.Qwen2VLProcessor, transformers.Qwen2VLVideoProcessor),
        "qwen2.5-vl": (transformers.Qwen2_5_VLProcessor, transformers.Qwen2VLVideoProcessor),
    }.get(name, (transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor))
    kind(
        image_processor=transformers.Qwen2VLImageProcessor(size=size, **patches),
        tokenizer=tokenizer,
        video_processor=video(size=size, **patches),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(out)


def _name_text_architecture(out: Path) -> None:
    """vLLM builds the language model of some classes from this."""
    path = out / "config.json"
    config = json.loads(path.read_text())
    language = {"qwen3_vl": "Qwen3ForCausalLM", "qwen3_vl_moe": "Qwen3MoeForCausalLM"}.get(config["model_type"])
    if language:
        config["text_config"]["architectures"] = [language]
        path.write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
