"""Whatever lies in a folder, the answer is an inspection: bytes of strangers never end in an error that nobody meant."""

from __future__ import annotations

import json
import struct

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from adapters.contract import Inspection, inspect
from tests.adapter_folders import TEXT, plain

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
