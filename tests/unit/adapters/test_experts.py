"""Experts, in whatever layout they come: what each expert's weight is changed by stays the same."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adapters.contract import inspect, prepare
from adapters.registry.codec import decode_contract, encode_contract
from adapters.types import ModuleShape
from tests import peft_experts
from tests.adapter_folders import PREFIX, read_safetensors
from tests.exporter_layouts import EXPERTS_PLAIN, SINGLE, STACKED, experts_adapter

OLD = Path(__file__).parents[2] / "fixtures" / "peft-0.18-experts"


def deltas_of(weights: Path, experts: int) -> dict[str, np.ndarray]:
    """B @ A of each module in a published file, experts as `...gate_up_proj` and `...down_proj` of [expert, out, in]."""
    tensors, found, single = read_safetensors(weights), {}, {}
    for key, a in tensors.items():
        if "lora_A" not in key:
            continue
        path, b = key.removeprefix(PREFIX).removesuffix(".lora_A.weight"), tensors[key.replace("lora_A", "lora_B")]
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)", path)
        if match:
            single[match[1], int(match[2]), match[3]] = b @ a
        elif ".experts" in path:
            stack = np.einsum("ore,eri->eoi", b.reshape(len(b), -1, experts), a.reshape(experts, -1, a.shape[1]))
            name = "gate_up_proj" if path.endswith("base_layer") else "down_proj"
            found[f"{path.removesuffix('.base_layer')}.{name}"] = stack
        else:
            found[path] = b @ a
    for root in {root for root, _, _ in single}:
        gates, ups, downs = (
            np.stack([single[root, number, name] for number in range(experts)]) for name in ("gate_proj", "up_proj", "down_proj")
        )
        found |= {f"{root}.gate_up_proj": np.concatenate([gates, ups], axis=1), f"{root}.down_proj": downs}
    return found


def check(folder: Path, wanted: dict[str, np.ndarray], stacked: bool, out: Path) -> set[str]:
    """The published deltas are the wanted ones; the names of the rules that it took."""
    prepared = prepare(folder, peft_experts.contract(stacked=stacked), workdir=out)
    found = deltas_of(prepared.weights, peft_experts.EXPERTS)
    assert found.keys() == wanted.keys()
    for path, delta in wanted.items():
        assert np.abs(found[path] - delta).max() <= 2**-6 * np.abs(delta).max(), path
    return {rule.name for rule in prepared.rules}


@pytest.mark.parametrize("stacked", [True, False], ids=["one module", "single linears"])
def test_an_adapter_of_peft_0_18_keeps_what_it_changes(stacked, tmp_path):
    rules = check(OLD, read_safetensors(OLD / peft_experts.DELTAS), stacked, tmp_path)

    assert "unswap-experts" in rules
    assert ("split-experts" in rules) is not stacked


@pytest.mark.integration
@pytest.mark.parametrize("stacked", [True, False], ids=["one module", "single linears"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"target_parameters": peft_experts.PARAMETERS[::-1]}, {"use_rslora": True}, {"rank_pattern": {r"layers\.1\..*": 3}}],
    ids=str,
)
def test_an_adapter_of_the_installed_peft_keeps_what_it_changes(fields, stacked, tmp_path):
    wanted = peft_experts.write(tmp_path / "in", **fields)

    assert "unswap-experts" not in check(tmp_path / "in", wanted, stacked, tmp_path / "out")


@pytest.mark.integration
def test_peft_loads_published_experts(tmp_path):
    from peft import PeftModel

    wanted = peft_experts.write(tmp_path / "in")
    prepare(tmp_path / "in", peft_experts.contract(stacked=True), workdir=tmp_path / "out")
    model = PeftModel.from_pretrained(peft_experts.model(), str(tmp_path / "out"))
    outer = model.base_model.model.get_submodule("model.layers.0.mlp.experts")
    layers = {layer.parameter_name: layer.get_delta_weight("default").detach().numpy() for layer in (outer, outer.base_layer)}

    for name, delta in layers.items():
        right = wanted[f"model.layers.0.mlp.experts.{name}"]
        assert np.abs(delta - right).max() <= 2**-6 * np.abs(right).max(), name


def test_from_one_form_to_the_other_and_back_is_the_same_adapter(tmp_path):
    first = prepare(EXPERTS_PLAIN.write(tmp_path / "in"), STACKED, workdir=tmp_path / "stacked")
    split = prepare(tmp_path / "stacked", SINGLE, workdir=tmp_path / "single")
    joined = prepare(tmp_path / "single", STACKED, workdir=tmp_path / "joined")

    assert joined.digest == first.digest != split.digest
    assert {rule.name: rule.count for rule in split.rules}["split-experts"] == 4
    assert {rule.name: rule.count for rule in joined.rules}["join-experts"] == 18


def test_experts_with_an_a_of_their_own_for_gate_and_up_need_both_ranks(tmp_path):
    folder = experts_adapter("single")
    for key in [key for key in folder.tensors if "up_proj.lora_A" in key]:
        folder = folder.with_tensor(key, folder.tensors[key] * 2)
    single = prepare(folder.write(tmp_path / "in"), SINGLE, workdir=tmp_path / "single")
    joined = prepare(tmp_path / "in", STACKED, workdir=tmp_path / "joined")
    wanted = deltas_of(single.weights, 3)

    assert (single.rank, joined.rank) == (4, 8)
    for path, delta in deltas_of(joined.weights, 3).items():
        np.testing.assert_allclose(delta, wanted[path], rtol=1e-5)


def test_shapes_prove_the_way_round_whatever_the_version_says(tmp_path):
    seen = inspect(experts_adapter("swapped", version="0.21.2").write(tmp_path), STACKED)

    assert "unswap-experts" in {rule.name for rule in seen.rules}


def test_without_the_base_nobody_knows_how_many_experts_there_are(tmp_path):
    seen = inspect(EXPERTS_PLAIN.write(tmp_path), None)

    assert [finding.reason for finding in seen.findings] == ["moe_layout_unsupported"]


def test_a_contract_of_an_older_release_has_no_stacked_experts():
    old = json.loads(encode_contract(SINGLE))
    for shape in old["modules"].values():
        del shape["experts"]

    assert decode_contract(json.dumps(old).encode()) == SINGLE
    assert decode_contract(encode_contract(STACKED)) == STACKED


def test_equal_widths_are_told_apart_by_the_version_or_refused(tmp_path):
    square = {path: shape for path, shape in STACKED.modules.items() if "experts" not in path}
    square |= {f"model.layers.{layer}.mlp.experts.up_proj": ModuleShape(16, 16, 3) for layer in (0, 1)}
    contract = replace(STACKED, modules=square)
    folder = experts_adapter("stacked").minus("experts.lora").configured(target_parameters=["mlp.experts.up_proj"])
    for key in [key for key in folder.tensors if "experts" in key]:
        shape = (12, 16) if "lora_A" in key else (16, 12)
        folder = folder.with_tensor(key, np.ones(shape, np.float32))
    verdicts = {}
    for version in ("0.18.1", "0.21.2", None):
        seen = inspect(folder.configured(peft_version=version).write(tmp_path / str(version)), contract)
        verdicts[version] = [finding.reason for finding in seen.findings] or [
            "unswap-experts" in {rule.name for rule in seen.rules}
        ]

    assert verdicts == {"0.18.1": [True], "0.21.2": [False], None: ["moe_layout_unsupported"]}
