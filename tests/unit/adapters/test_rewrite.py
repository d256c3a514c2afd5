"""All clothes of one adapter are one adapter: the same digest, and the same change to each module of the base."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters.contract import PublishOptions, inspect, prepare
from adapters.contract.canonical import bfloat16_bits
from adapters.types import WEIGHTS_FILE, ModuleShape, PreparedAdapter
from tests.adapter_folders import (
    ALPHA,
    CLOTHES,
    PREFIX,
    RANK,
    TEXT,
    TEXT_NAMES,
    VLM,
    AdapterFolder,
    contract_of,
    decode,
    exact,
    moved,
    plain,
    read_safetensors,
)
from tests.exporter_layouts import (
    EXPERTS_PLAIN,
    FUSED,
    FUSED_PLAIN,
    LAYOUTS,
    SINGLE,
    STACKED,
    experts_adapter,
    only_keys,
    split_by_hand,
)

# One takes the place of the other, so they are not worn together.
EXCLUSIVE = ("no prefix", "prefix twice"), ("three shards", "shards without index"), ("rsLoRA", "alpha pattern", "rank pattern")


def published(folder: AdapterFolder, tmp_path: Path, contract=TEXT, **options) -> PreparedAdapter:
    return prepare(folder.write(tmp_path / "in"), contract, PublishOptions(**options), workdir=tmp_path / "out")


def digest_of(folder: AdapterFolder, path: Path, contract=TEXT) -> str | None:
    seen = inspect(folder.write(path), contract)
    assert not seen.findings, seen.findings
    return seen.digest


def rule_names(prepared: PreparedAdapter) -> set[str]:
    return {rule.name for rule in prepared.rules}


@pytest.mark.parametrize("clothes", CLOTHES)
@pytest.mark.parametrize("contract", [TEXT, VLM], ids=["text", "vlm"])
def test_all_clothes_of_one_adapter_have_one_digest(clothes, contract, tmp_path):
    odd = CLOTHES[clothes](plain(contract))

    assert digest_of(odd, tmp_path / "odd", contract) == digest_of(plain(contract), tmp_path / "plain", contract)


@pytest.mark.parametrize("name", TEXT_NAMES)
@pytest.mark.parametrize(("contract", "root"), [(TEXT, "model"), (VLM, "model.language_model")], ids=["text", "vlm"])
def test_text_layers_find_their_tower_under_any_known_name(name, contract, root, tmp_path):
    odd = moved(plain(contract), f"{root}.layers", name)

    assert digest_of(odd, tmp_path / "odd", contract) == digest_of(plain(contract), tmp_path / "plain", contract)


# An adapter and a base for it: text, tower, fused projections cut and joined, experts in each form on each kind of engine.
WARDROBES = {
    "text": (plain(), TEXT, plain()),
    "tower": (plain(VLM), VLM, plain(VLM)),
    "fused, on parts": (FUSED_PLAIN, TEXT, split_by_hand(FUSED_PLAIN)),
    "parts, on fused": (split_by_hand(FUSED_PLAIN), FUSED, FUSED_PLAIN),
    **{
        f"experts {layout}, on {kind}": (experts_adapter(layout), contract, EXPERTS_PLAIN)
        for layout in ("stacked", "swapped", "reversed", "single")
        for kind, contract in (("one module", STACKED), ("single linears", SINGLE))
    },
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    wardrobe=st.sampled_from(sorted(WARDROBES)),
    names=st.lists(st.sampled_from(sorted(CLOTHES)), unique=True, max_size=6),
    packed=st.sampled_from([None, "a.tar", "a.tar.gz", "a.zip"]),
)
def test_clothes_can_be_worn_together(wardrobe, names, packed, tmp_path_factory):
    odd, contract, good = WARDROBES[wardrobe]
    for group in EXCLUSIVE:
        names = [name for name in names if name not in group or name == next(one for one in names if one in group)]
    for name in names:
        odd = CLOTHES[name](odd)
    path = tmp_path_factory.mktemp("clothes")
    source = odd.write(path / "odd")
    if packed:
        shutil.make_archive(str(path / "a"), {"a.tar": "tar", "a.tar.gz": "gztar", "a.zip": "zip"}[packed], source)
        source = path / packed
    seen = inspect(source, contract)

    assert (seen.findings, seen.digest) == ((), digest_of(good, path / "plain", contract))


def test_another_adapter_has_another_digest(tmp_path):
    assert digest_of(plain(seed=1), tmp_path / "a") != digest_of(plain(seed=2), tmp_path / "b")


def test_what_inspect_announces_is_what_prepare_writes(tmp_path):
    prepared = published(plain(), tmp_path)
    seen = inspect(tmp_path / "in", TEXT)

    assert (seen.digest, seen.published_bytes) == (prepared.digest, sum(file.size_bytes for file in prepared.files))
    assert {file.name: file.size_bytes for file in prepared.files} == {
        file.name: file.stat().st_size for file in (tmp_path / "out").iterdir()
    }


def test_publishing_what_was_published_changes_nothing(tmp_path):
    first = published(plain(), tmp_path)
    again = prepare(tmp_path / "out", TEXT, workdir=tmp_path / "again")

    assert again.digest == first.digest
    assert again.rules == ()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"lora_alpha": 7},
        {"use_rslora": True, "lora_alpha": 7},
        {"alpha_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 5.5}},
        {"alpha_pattern": {r"layers\.0\..*": 2, "q_proj": 32}},
        {"alpha_pattern": {"proj": 99}},
        {"use_rslora": True, "alpha_pattern": {"self_attn.[qk]_proj": 9}},
    ],
    ids=str,
)
def test_each_module_changes_as_peft_would_change_it(fields, tmp_path):
    folder = plain(**fields)

    check_deltas(folder, published(folder, tmp_path), tmp_path)


@pytest.mark.parametrize(
    "layout",
    [layout for layout in LAYOUTS if isinstance(layout.expected, int) and layout.contract is TEXT],
    ids=lambda layout: layout.name,
)
def test_each_published_layout_changes_the_base_as_peft_would(layout, tmp_path):
    layout.write(tmp_path / "in")
    prepared = prepare(tmp_path / "in", layout.contract, layout.options, workdir=tmp_path / "out")
    config = {"rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}
    config |= json.loads((tmp_path / "in" / "adapter_config.json").read_text())

    check_deltas(AdapterFolder(config, read_safetensors(tmp_path / "in" / WEIGHTS_FILE)), prepared, tmp_path)


@pytest.mark.parametrize("kept", [("q", "k", "v"), ("q", "v"), ("k",), ("q",), ("v",)], ids="+".join)
def test_parts_joined_to_a_fused_module_change_their_own_rows(kept, tmp_path):
    names = [f"{part}_proj" for part in kept]
    folder = only_keys(plain(target_modules=names), *names)
    tensors = read_safetensors(published(folder, tmp_path, FUSED).weights)
    wanted = deltas_of_peft(folder)
    at = {"q_proj": (0, 16), "k_proj": (16, 24), "v_proj": (24, 32)}
    for layer in (0, 1):
        root = f"model.layers.{layer}.self_attn"
        a, b = (tensors[f"{PREFIX}{root}.qkv_proj.lora_{side}.weight"] for side in "AB")
        delta, expected = b @ a, np.zeros((32, 16))
        for name in names:
            expected[slice(*at[name])] = wanted[f"{root}.{name}"]
        assert np.abs(delta - expected).max() <= 2**-7 * np.abs(expected).max()


def test_mixed_ranks_are_padded_to_the_largest(tmp_path):
    folder = with_ranks(plain(rank_pattern={"q_proj": 2, "mlp.down_proj": 8}, alpha_pattern={"down_proj": 24}))
    prepared = published(folder, tmp_path)

    assert prepared.rank == json.loads(prepared.config)["r"] == 8
    assert {value.shape[0] for key, value in read_safetensors(prepared.weights).items() if "lora_A" in key} == {8}
    check_deltas(folder, prepared, tmp_path)


def test_float32_is_kept_on_request(tmp_path):
    random = np.random.default_rng(3)
    folder = plain()
    random_values = {key: random.normal(size=value.shape).astype(np.float32) for key, value in folder.tensors.items()}
    folder = replace(folder, tensors=random_values)
    kept = published(folder, tmp_path, keep_dtype=True)
    deltas = deltas_of_peft(folder)
    tensors = read_safetensors(kept.weights)

    assert "cast" not in rule_names(kept)
    for module, delta in deltas.items():
        found = tensors[f"{PREFIX}{module}.lora_B.weight"] @ tensors[f"{PREFIX}{module}.lora_A.weight"]
        np.testing.assert_allclose(found, delta, rtol=1e-5, atol=1e-5)


def test_an_adapter_for_the_head_and_the_embeddings_lands(tmp_path):
    contract = replace(TEXT, modules={**TEXT.modules, "model.embed_tokens": ModuleShape(32, 16), "lm_head": ModuleShape(16, 32)})
    folder = plain(target_modules=[*plain().config["target_modules"], "embed_tokens", "lm_head"])
    ones = {
        "model.embed_tokens.lora_embedding_A": (4, 32),
        "model.embed_tokens.lora_embedding_B": (16, 4),
        "lm_head.lora_A.weight": (4, 16),
        "lm_head.lora_B.weight": (32, 4),
    }
    for key, shape in ones.items():
        folder = folder.with_tensor(PREFIX + key, np.ones(shape, np.float32))
    tensors = read_safetensors(published(folder, tmp_path, contract).weights)

    assert {PREFIX + key for key in ones} <= tensors.keys()


def test_the_canonical_configuration_says_scale_one_and_nothing_else(tmp_path):
    prepared = prepare(plain().write(tmp_path / "in"), TEXT, workdir=tmp_path / "out", base="served/name")

    assert json.loads(prepared.config) == {
        "base_model_name_or_path": "served/name",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "peft_version": "0.19.0",
        "r": RANK,
        "task_type": "CAUSAL_LM",
        "use_rslora": False,
        "target_modules": ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
    }
    assert (prepared.alpha, prepared.rank, prepared.num_modules) == (ALPHA, RANK, 14)
    assert prepared.base_fingerprint == TEXT.fingerprint


def test_rules_are_recorded_with_their_counts(tmp_path):
    folder = CLOTHES["three shards"](CLOTHES["adapter name"](moved(plain(VLM), "model.language_model.layers", "model.layers")))
    prepared = published(folder, tmp_path, VLM)
    counts = {rule.name: rule.count for rule in prepared.rules}

    assert counts.pop("rewrite-config") > 0
    assert counts == {"merge-shards": 3, "strip-name": 28, "remap-tower": 28, "fold-scale": 14, "cast": 28}


def test_headless_layers_are_lifted_by_their_own_rule(tmp_path):
    prepared = published(moved(plain(), f"{PREFIX}model.layers", f"{PREFIX}layers"), tmp_path)

    assert "lift-headless" in rule_names(prepared)


def test_a_part_named_module_stays_where_the_base_has_one(tmp_path):
    contract = contract_of("model.module")
    prepared = published(plain(contract), tmp_path, contract)

    assert f"{PREFIX}model.module.layers.0.mlp.up_proj.lora_A.weight" in read_safetensors(prepared.weights)


def test_the_published_file_can_be_read_by_safetensors_itself(tmp_path):
    from safetensors import safe_open

    published(plain(), tmp_path)
    with safe_open(tmp_path / "out" / WEIGHTS_FILE, framework="numpy") as file:
        assert len(list(file.keys())) == 28


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0, 0x3F80),
        (-0.0, 0x8000),
        (1.00390625, 0x3F80),
        (1.01171875, 0x3F82),
        (1.0039064, 0x3F81),
        (3.4e38, 0x7F80),
        (1e-45, 0x0000),
        (-2.5, 0xC020),
    ],
)
def test_bfloat16_rounds_to_nearest_and_ties_to_even(value, bits):
    assert bfloat16_bits(np.array([value], np.float32))[0] == bits


def test_values_that_vanish_in_the_cast_are_counted(tmp_path):
    folder = plain()
    key = next(iter(folder.tensors))
    tiny = folder.tensors[key].copy()
    tiny[0, :3] = 1e-44

    assert "3 values were too small" in " ".join(published(folder.with_tensor(key, tiny), tmp_path).warnings)


def with_ranks(folder: AdapterFolder) -> AdapterFolder:
    """The folder with factors of the ranks that its `rank_pattern` of plain names gives."""
    random = np.random.default_rng(5)
    tensors = dict(folder.tensors)
    for key, value in folder.tensors.items():
        rank = rank_by_peft(folder.config, module_of(key))
        shape = (rank, value.shape[1]) if "lora_A" in key else (value.shape[0], rank)
        tensors[key] = exact(random.normal(size=shape))
    return replace(folder, tensors=tensors)


def module_of(key: str) -> str:
    return key.removeprefix(PREFIX).rpartition(".lora_")[0]


def by_peft(patterns: dict, path: str, default):
    """The matching of PEFT 0.21, written down again from its behaviour."""
    for key, value in patterns.items():
        if re.match(rf"(.*\.)?({key})$", path):
            return value
    return default


def rank_by_peft(config: dict, path: str) -> int:
    return by_peft(config["rank_pattern"], path, config["r"])


def deltas_of_peft(folder: AdapterFolder) -> dict[str, np.ndarray]:
    """scale * B @ A of each module, by PEFT's definition, in float64."""
    config, deltas = folder.config, {}
    for module in {module_of(key) for key in folder.tensors}:
        rank = rank_by_peft(config, module)
        alpha = by_peft(config["alpha_pattern"], module, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
        a, b = (folder.tensors[f"{PREFIX}{module}.lora_{side}.weight"].astype(np.float64) for side in "AB")
        deltas[module] = scale * b @ a
    return deltas


def check_deltas(folder: AdapterFolder, prepared: PreparedAdapter, tmp_path: Path) -> None:
    tensors, config = read_safetensors(prepared.weights), json.loads(prepared.config)
    deltas = deltas_of_peft(folder)
    assert len(tensors) == 2 * len(deltas)
    for module, delta in deltas.items():
        a, b = (tensors[f"{PREFIX}{module}.lora_{side}.weight"] for side in "AB")
        found = config["lora_alpha"] / config["r"] * b @ a
        assert np.abs(found - delta).max() <= 2**-7 * np.abs(delta).max(), module


def test_the_reader_of_these_tests_agrees_with_the_rounding():
    values = exact(np.linspace(-3, 3, 7))

    np.testing.assert_array_equal(decode(bfloat16_bits(values).tobytes(), "BF16"), values)
