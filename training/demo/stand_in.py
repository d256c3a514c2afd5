"""A stand-in for a real base, for GPU machines that no model can be fetched to: `python -m training.demo.stand_in OUT`.

`OUT/base` has the configuration of Qwen3-8B and the demo's small tokenizer, but no weights: vLLM makes some up with
`load_format: dummy`. `OUT/adapters` holds adapters with random weights on all of its linear layers. Its answers mean nothing;
times and sizes are those of the real one.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import Qwen3Config

from training.demo.tiny_base import make_tokenizer

WEIGHTS = "adapter_model.safetensors"  # PEFT's name
SPREAD = 0.02  # of random factors: small enough that a generation stays finite


@dataclass(frozen=True)
class Shape:
    """Of a Qwen3 model; the defaults are Qwen3-8B's (its config.json on the hub)."""

    hidden: int = 4096
    intermediate: int = 12288
    layers: int = 36
    heads: int = 32
    key_value_heads: int = 8
    head_dim: int = 128

    def linear(self) -> dict[str, tuple[int, int]]:
        """Features in and out of each linear module of a layer."""
        query, key_value = self.heads * self.head_dim, self.key_value_heads * self.head_dim
        return {
            "self_attn.q_proj": (self.hidden, query),
            "self_attn.k_proj": (self.hidden, key_value),
            "self_attn.v_proj": (self.hidden, key_value),
            "self_attn.o_proj": (query, self.hidden),
            "mlp.gate_proj": (self.hidden, self.intermediate),
            "mlp.up_proj": (self.hidden, self.intermediate),
            "mlp.down_proj": (self.intermediate, self.hidden),
        }


def make_base(folder: Path, shape: Shape) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=False,
        dtype="bfloat16",
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    ).save_pretrained(folder)


def make_adapter(folder: Path, shape: Shape, rank: int, seed: int) -> None:
    """In bfloat16; the same seed gives the same bytes."""
    dice = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(shape.layers):
        for module, (features_in, features_out) in shape.linear().items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            weights[f"{name}.lora_A.weight"] = (torch.randn(rank, features_in, generator=dice) * SPREAD).bfloat16()
            weights[f"{name}.lora_B.weight"] = (torch.randn(features_out, rank, generator=dice) * SPREAD).bfloat16()
    targets = sorted(module.rpartition(".")[2] for module in shape.linear())
    folder.mkdir(parents=True, exist_ok=True)
    LoraConfig(
        r=rank, lora_alpha=rank, target_modules=targets, task_type="CAUSAL_LM", base_model_name_or_path="stand-in"
    ).save_pretrained(str(folder))
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=8, help="load tests pad it to the ranks of their pools")
    arguments = parser.parse_args()
    make_base(arguments.out / "base", Shape())
    for number in range(arguments.adapters):
        make_adapter(arguments.out / "adapters" / f"a{number}", Shape(), arguments.rank, number)


if __name__ == "__main__":
    main()
