"""What PEFT itself answers: `python -m tests.peft_truth BASE OUT KINDS SPREAD` makes adapters of some kinds on a base and writes
`OUT/<kind>` folders and `OUT/truth.json`: log probabilities of a fixed prompt, by transformers and PEFT in float32, and what a
merge adds to the first layer's experts, if it has any.

It runs apart from the tests' process, which never imports torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

PROMPT = [300 + 37 * place % 1500 for place in range(24)]
TEXT = r".*language_model\.layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj"

# Each says in its own way that modules are scaled differently; none has a rank over 16.
SCALES: dict[str, dict[str, Any]] = {
    "uniform": {"r": 8, "lora_alpha": 16, "target_modules": TEXT},
    "alpha-pattern": {"r": 8, "lora_alpha": 8, "target_modules": TEXT, "alpha_pattern": {"o_proj": 64, r"layers\.1\..*": 2}},
    "rank-pattern": {"r": 4, "lora_alpha": 16, "target_modules": TEXT, "rank_pattern": {"q_proj": 16, r"0\.mlp\.up_proj": 2}},
    "both-patterns": {
        "r": 8,
        "lora_alpha": 8,
        "target_modules": TEXT,
        "rank_pattern": {"down_proj": 12, "model.language_model.layers.0.self_attn.v_proj": 3},
        "alpha_pattern": {"down_proj": 48, "mlp.down_proj": 1, "k_proj": 24},
    },
    "rslora": {"r": 16, "lora_alpha": 16, "target_modules": TEXT, "use_rslora": True},
    "rslora-patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": TEXT,
        "use_rslora": True,
        "rank_pattern": {"gate_proj": 9},
        "alpha_pattern": {"gate_proj": 3},
    },
    "some-modules": {"r": 8, "lora_alpha": 32, "target_modules": r".*language_model\.layers\.(0\.self_attn\.q|1\.mlp\.up)_proj"},
    "one-layer": {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj", "down_proj"], "layers_to_transform": [1]},
}


BOTH_WEIGHTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"r": 2, "lora_alpha": 8, "target_modules": [], "target_parameters": BOTH_WEIGHTS},
    "experts-and-attention": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"], "target_parameters": BOTH_WEIGHTS},
}
KINDS = {"scales": SCALES, "experts": EXPERTS}


def logprobs(model: Any) -> list[float]:
    """The log probability of each token of the prompt but the first."""
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        scores = model(input_ids=tokens).logits.float().log_softmax(-1)
    return scores[0, :-1].gather(1, tokens[0, 1:, None])[:, 0].tolist()


def expert_deltas(base: Any, adapted: Any) -> dict[str, Any]:
    """[expert, out, in] by weight; transformers keeps gpt-oss' weights the other way round."""
    before = {name: value.clone() for name, value in base.state_dict().items() if "layers.0.mlp.experts" in name}
    after = adapted.merge_and_unload().state_dict() if before else {}
    turned = base.config.model_type == "gpt_oss"
    deltas = {name.rpartition(".")[2]: after[name] - value for name, value in before.items() if value.dim() == 3}
    return {name: (delta.transpose(1, 2) if turned else delta).tolist() for name, delta in deltas.items()}


def make(base: Path, out: Path, kinds: dict[str, dict[str, Any]], spread: float) -> None:
    """`spread` is the standard deviation of B: a base of large weights is moved by small deltas.

    The truth is what PEFT reads back: it saves patterns in alphabetical order, and the first one that matches counts.
    """
    truth = {"prompt": PROMPT, "base": logprobs(load(base)), "kinds": {}}
    for seed, (kind, config) in enumerate(kinds.items()):
        torch.manual_seed(seed)
        model = get_peft_model(load(base), LoraConfig(task_type="CAUSAL_LM", **config))
        with torch.no_grad():
            for name, factor in model.named_parameters():
                if ".lora_B." in name:
                    factor.normal_(0, spread)
        model.save_pretrained(out / kind)
        saved = PeftModel.from_pretrained(load(base), out / kind).eval()
        truth["kinds"][kind] = {"logprobs": logprobs(saved), "deltas": expert_deltas(load(base), saved)}
    (out / "truth.json").write_text(json.dumps(truth))


def load(base: Path) -> Any:
    architecture = json.loads((base / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(base, dtype=torch.float32).eval()


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]), KINDS[sys.argv[3]], float(sys.argv[4]))
