"""The stand-in for a real base: a configuration that makes a model, and adapters that fit it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from training.demo.stand_in import WEIGHTS, Shape, make_adapter, make_base

SMALL = Shape(hidden=64, intermediate=96, layers=2, heads=4, key_value_heads=2, head_dim=16)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stand-in") / "base"
    make_base(folder, SMALL)
    return folder


def test_its_configuration_and_tokenizer_make_a_model_that_answers_anything(base: Path):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    tokens = AutoTokenizer.from_pretrained(base)("Hello", return_tensors="pt")
    assert torch.isfinite(model(**tokens).logits).all()


def test_its_adapters_reach_every_linear_layer_and_change_the_answer(base: Path, tmp_path: Path):
    make_adapter(tmp_path, SMALL, 4, 1)
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base), dtype=torch.float32).eval()
    tokens = torch.tensor([[1, 2, 3]])
    before = plain(tokens).logits
    adapted = PeftModel.from_pretrained(plain, str(tmp_path)).eval()
    held = {name.replace(".default", "") for name, _ in adapted.named_parameters() if ".lora_" in name}
    assert held == load_file(tmp_path / WEIGHTS).keys() and len(held) == 2 * 7 * SMALL.layers
    assert not torch.equal(before, adapted(tokens).logits)


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(tmp_path: Path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_adapter(tmp_path / name, SMALL, 4, seed)
    a, b, c = ((tmp_path / name / WEIGHTS).read_bytes() for name in "abc")
    assert a == b != c


def test_its_full_size_is_that_of_eight_billion_parameters():
    shape = Shape()
    assert shape.layers * sum(a * b for a, b in shape.linear().values()) == pytest.approx(6.95e9, rel=0.01)  # and embeddings
