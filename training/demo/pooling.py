"""A tiny embedding base (Qwen3, text only) with random weights, and adapters that turn its embeddings elsewhere.

vLLM serves it with `runner="pooling", convert="embed"`. Nothing is trained: embeddings that differ by adapter are all it is for.
`python -m training.demo.pooling OUT` leaves `OUT/base` and `OUT/adapter`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from training.demo.adapters import ALL_LINEAR, save_peft
from training.demo.making import finish, is_complete, partial_of, prepare_torch, stamp
from training.demo.tiny_base import make_tokenizer
from training.small_vlm import MAX_POSITIONS

HIDDEN = 64  # numbers in an embedding
LAYERS = 2
HEAD_DIM = 32


def make_pooling_base(out: Path, seed: int = 0) -> Path:
    """Makes the base in the folder `out`, weights in bfloat16."""
    tokenizer = make_tokenizer(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // HEAD_DIM,
        num_key_value_heads=HIDDEN // HEAD_DIM,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.1,  # the usual 0.02 lets so narrow a model hardly look at its input
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def make_pooling_adapter(base_dir: Path, out: Path, seed: int, *, rank: int = 8, base_name: str = "base") -> Path:
    """A LoRA with random weights, B too, in PEFT's files in the folder `out`; another seed gives other embeddings."""
    base = Qwen3ForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    base.name_or_path = base_name
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=list(ALL_LINEAR),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_name,
        init_lora_weights=False,  # B too is random, so that it does something
    )
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0.0, 0.2)
    save_peft(model, out)
    return out


def main(out: Path, seed: int = 0) -> None:
    """Both, unless complete."""
    prepare_torch()
    base, adapter = out / "base", out / "adapter"
    if not is_complete(base, stamp(seed)):
        partial = partial_of(base)
        make_pooling_base(partial, seed)
        finish(partial, base, stamp(seed))
    if not is_complete(adapter, stamp(seed)):
        partial = partial_of(adapter)
        make_pooling_adapter(base, partial, seed + 1)
        finish(partial, adapter, stamp(seed))
    print(f"embedding base in {base}, adapter in {adapter}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
