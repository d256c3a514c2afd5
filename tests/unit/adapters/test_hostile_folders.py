"""Whatever lies in a folder, the answer is an inspection: bytes of strangers never end in an error that nobody meant."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from adapters.contract import Inspection, inspect
from tests.adapter_folders import TEXT, plain
from tests.exporter_layouts import FUSED, SINGLE, STACKED, moe_contract

FEW = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [
        "r",
        "lora_alpha",
        "peft_type",
        "target_modules",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "bias",
        "auto_mapping",
        "modules_to_save",
        "base_model_name_or_path",
        "base_fingerprint",
        "init_lora_weights",
        "layer_replication",
        "use_dora",
    ]
)
ROW = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F4", "I8", 3]),
        "shape": st.lists(st.integers(-1, 2**62), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 2**62), max_size=3) | JSON,
    },
)
NAMES = st.sampled_from(["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", "x.lora_B.weight", ".lora_A.weight", ""])


@FEW
@given(fields=st.dictionaries(FIELDS, JSON, max_size=4))
@example(fields={"alpha_pattern": {"x" * 600: 1}})
@example(fields={"rank_pattern": {"[": 1}})
@example(fields={"lora_alpha": 10**400})
@example(fields={"lora_alpha": 1e-320})
@example(fields={"target_modules": ["\ud800"]})
def test_any_configuration_is_answered(fields, tmp_path):
    assert isinstance(inspect(plain().configured(**fields).write(tmp_path), TEXT), Inspection)


@FEW
@given(data=st.binary(max_size=200))
def test_any_bytes_for_weights_are_answered(data, tmp_path):
    plain().write(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(data)

    assert inspect(tmp_path, TEXT).findings


@FEW
@given(rows=st.dictionaries(NAMES | st.text(max_size=6), ROW | JSON, max_size=3), data=st.binary(max_size=16))
def test_any_header_is_answered(rows, data, tmp_path):
    plain().write(tmp_path)
    text = json.dumps(rows).encode()
    (tmp_path / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    seen = inspect(tmp_path, TEXT)

    assert seen.findings
    json.dumps([finding.details() for finding in seen.findings])


PLACES = st.sampled_from(
    [
        "mlp.experts",
        "mlp.experts.base_layer",
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
        "mlp.experts.0.gate_proj",
        "mlp.experts.1.up_proj",
        "mlp.experts.2.w2",
        "mlp.experts.7.w1",
        "mlp.experts.0.gate_up_proj",
        "mlp.gate_up_proj",
        "mlp.up_proj",
        "self_attn.qkv_proj",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
    ]
)
WIDTHS = st.sampled_from([1, 4, 8, 12, 16, 24, 32, 48])
FACTORS = st.dictionaries(
    st.tuples(st.sampled_from(["model.layers.0.", "layers.1.", "model.language_model.layers.0.", "model.layers.5."]), PLACES),
    st.tuples(st.tuples(WIDTHS, WIDTHS), st.tuples(WIDTHS, WIDTHS)),
    max_size=8,
)
BASES = {"text": TEXT, "fused": FUSED, "stacked": STACKED, "single": SINGLE, "gpt-oss": moe_contract(stacked=True, gpt_oss=True)}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    factors=FACTORS,
    base=st.sampled_from([*BASES, None]),
    rank=st.sampled_from([1, 4, 8]),
    version=st.sampled_from([None, "0.18", "x"]),
)
def test_factors_of_any_shape_in_any_place_are_answered(factors, base, rank, version, tmp_path):
    tensors = {}
    for (root, place), (a, b) in factors.items():
        tensors[f"base_model.model.{root}{place}.lora_A.weight"] = np.ones(a, np.float32)
        tensors[f"base_model.model.{root}{place}.lora_B.weight"] = np.ones(b, np.float32)
    folder = replace(plain(r=rank, target_modules=None, peft_version=version), tensors=tensors)
    seen = inspect(folder.write(tmp_path), BASES.get(base))

    assert seen.findings or seen.digest
    json.dumps([finding.details() for finding in seen.findings])
