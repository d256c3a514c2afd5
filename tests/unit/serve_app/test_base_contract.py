"""A base described without an engine: what its headers confirm, what the settings decide, what the registry already says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from adapters.errors import InvalidRequest, VersionConflict
from adapters.registry import Registry
from adapters.types import BaseContract, ModuleShape
from serve_app.commands import app
from serve_app.engine.base_contract import (
    INDEX_FILE,
    check_folder,
    check_headers,
    differences,
    engine_arguments,
    publish,
    report,
    stored_tensors,
)
from serve_app.engine.layers import _out_features, _parts
from serve_app.engine.warmup import write_zero_adapter
from tests.fake_store import FakeStore

Q = "model.layers.0.self_attn.q_proj"
CONTRACT = BaseContract("demo", "f", {Q: ModuleShape(4, 6)}, max_rank=16, architecture="Toy")


def stored(folder: Path, tensors: Mapping[str, tuple[int, ...]], name: str = "model.safetensors", dtype=numpy.float32) -> None:
    save_file({key: numpy.zeros(shape, dtype) for key, shape in tensors.items()}, folder / name)


def checked(folder: Path, contract: BaseContract = CONTRACT) -> tuple[str, ...]:
    return check_headers(stored_tensors(folder), contract, lambda path: path.replace("old.", "model."))


def test_weights_of_the_promised_shapes_raise_no_doubt(tmp_path):
    stored(tmp_path, {f"{Q}.weight": (6, 4)})
    assert checked(tmp_path) == ()


def test_names_are_compared_as_the_engine_renames_them(tmp_path):
    stored(tmp_path, {f"{Q}.weight".replace("model.", "old."): (6, 4)})
    assert checked(tmp_path) == ()


def test_a_config_of_a_sibling_is_refused_with_both_shapes(tmp_path):
    stored(tmp_path, {f"{Q}.weight": (8, 4)})
    with pytest.raises(InvalidRequest) as caught:
        checked(tmp_path)
    assert (caught.value.limit, caught.value.value) == ([6, 4], [8, 4])


def test_a_packed_weight_has_its_own_shape(tmp_path):
    stored(tmp_path, {f"{Q}.weight": (12, 1)}, dtype=numpy.uint8)
    assert checked(tmp_path) == ()


def test_a_quantised_module_needs_no_tensor_called_weight(tmp_path):
    stored(tmp_path, {f"{Q}.qweight": (1, 6), f"{Q}.scales": (1, 6)})
    assert checked(tmp_path) == ()


def test_a_module_without_weights_is_a_warning_that_names_it(tmp_path):
    stored(tmp_path, {"model.norm.weight": (4,)})
    assert Q in checked(tmp_path)[0]


@pytest.mark.parametrize("key", ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.7.gate_proj.weight"])
def test_experts_are_seen_in_either_form(tmp_path, key):
    contract = replace(CONTRACT, modules={"model.layers.0.mlp.experts.3.gate_proj": ModuleShape(4, 6)})
    stored(tmp_path, {key: (6, 4)})
    assert checked(tmp_path, contract) == ()


def test_a_folder_without_weights_is_described_by_its_config_and_says_so(tmp_path):
    assert "config alone" in checked(tmp_path)[0]


def test_a_missing_shard_is_named(tmp_path):
    stored(tmp_path, {f"{Q}.weight": (6, 4)}, "one.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(InvalidRequest, match=r"two\.safetensors"):
        stored_tensors(tmp_path)


def test_files_that_the_index_does_not_name_are_not_the_base(tmp_path):
    stored(tmp_path, {f"{Q}.weight": (6, 4)}, "one.safetensors")
    stored(tmp_path, {f"{Q}.weight": (9, 9)}, "consolidated.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    assert checked(tmp_path) == ()


@pytest.mark.parametrize("text", ["nonsense", "[]", "{}"])
def test_an_index_that_cant_be_read_is_said(tmp_path, text):
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(InvalidRequest):
        stored_tensors(tmp_path)


def test_a_cut_off_shard_is_refused(tmp_path):
    stored(tmp_path, {f"{Q}.weight": (6, 4)})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(InvalidRequest) as caught:
        stored_tensors(tmp_path)
    assert caught.value.hint == "finish the download"


def test_a_folder_that_is_no_base_is_refused_before_the_engine_is_asked(tmp_path):
    for source in (str(tmp_path), str(tmp_path / "absent"), "./absent"):
        with pytest.raises(InvalidRequest):
            check_folder(source)
    check_folder("Qwen/Qwen3-8B")


def test_the_settings_of_the_base_decide_and_the_command_line_overrides(tmp_path):
    file = tmp_path / "loramux.yaml"
    file.write_text("bases: [{id: demo, engine: {enable_lora: true, max_lora_rank: 16, enable_tower_connector_lora: true}}]")
    assert engine_arguments("demo", file)["max_lora_rank"] == 16
    said = engine_arguments("demo", file, max_rank=8, vision=False)
    assert (said["max_lora_rank"], said["enable_tower_connector_lora"]) == (8, False)
    assert engine_arguments("other", file) == {}


def test_a_base_that_is_to_be_served_without_adapters_takes_none(tmp_path):
    file = tmp_path / "loramux.yaml"
    file.write_text("bases: [{id: demo, engine: {max_lora_rank: 16}}]")
    with pytest.raises(InvalidRequest, match="without adapters"):
        engine_arguments("demo", file)


@pytest.fixture
def command(tmp_path):
    """Runs `loramux base-contract` with empty settings; gives exit code and what it said."""
    (tmp_path / "loramux.yaml").write_text("{}")

    def run(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["base-contract", *words, "--config", str(tmp_path / "loramux.yaml")])
        return result.exit_code, result.output

    return run


def test_the_command_takes_one_place_to_write_to(command):
    code, said = command("./base", "--id", "demo", "--out", "x.json", "--publish")
    assert code == 2
    assert "--out or --publish" in said


def test_the_command_says_early_that_there_is_no_base_and_no_registry(command, tmp_path):
    assert command("./absent", "--id", "demo")[0] == 1
    code, said = command(str(tmp_path), "--id", "demo")
    assert code == 1
    assert "config.json" in said
    assert str(tmp_path) not in said
    code, said = command("./absent", "--id", "demo", "--publish")
    assert code == 1
    assert "no registry is configured" in said


def test_the_command_refuses_an_id_that_the_model_field_cant_hold(command):
    assert command("./absent", "--id", "a:b")[0] == 1


async def test_a_base_that_is_known_otherwise_is_replaced_only_on_demand():
    registry = Registry(FakeStore())
    assert await publish(registry, CONTRACT)
    assert not await publish(registry, CONTRACT)
    changed = replace(CONTRACT, max_rank=32, fingerprint="g")
    with pytest.raises(VersionConflict, match="max_rank 16, now 32"):
        await publish(registry, changed)
    assert await registry.base("demo") == CONTRACT
    assert await publish(registry, changed, replace=True)
    assert await registry.base("demo") == changed


async def test_a_live_replica_has_the_last_word_and_says_what_it_changed(caplog):
    registry = Registry(FakeStore())
    await report(registry, CONTRACT)
    await report(registry, CONTRACT)
    assert not caplog.records
    await report(registry, replace(CONTRACT, max_rank=8))
    assert "max_rank 16, now 8" in caplog.text
    assert (await registry.base("demo")).max_rank == 8


def test_differences_name_the_first_module():
    other = replace(CONTRACT, modules={Q: ModuleShape(4, 8)})
    assert differences(CONTRACT, other) == (f"1 modules differ, `{Q}` first",)
    assert differences(CONTRACT, CONTRACT) == ()


def linear(**sizes) -> SimpleNamespace:
    return SimpleNamespace(**sizes)


def test_parts_of_a_shared_layer_have_their_whole_widths():
    # Two devices, one key head: each holds a copy of it, and `output_sizes` counts both.
    shared = linear(total_num_heads=4, total_num_kv_heads=1, head_size=8, output_sizes=[32, 16, 16], output_size=64)
    assert _out_features(shared, 3) == [32, 8, 8]
    assert _out_features(shared, 1) == [48]


def test_a_first_part_covers_the_slices_that_the_others_leave():
    assert _out_features(linear(output_sizes=[4, 4, 8, 8], output_size=24), 2) == [16, 8]
    assert _out_features(linear(output_sizes=[5, 5], output_size=10), 2) == [5, 5]
    assert _out_features(linear(output_size=7), 1) == [7]


def test_a_layer_whose_parts_cant_be_told_apart_is_left_out():
    manager = SimpleNamespace(packed_modules={"x.qkv": ["x.q", "x.k", "x.v"]})
    layer = SimpleNamespace(base_layer=linear(input_size=4, output_size=12))
    assert _parts(manager, "x.qkv", layer) == {}
    assert _parts(manager, "x.o", layer) == {"x.o": (4, 12, None)}


def test_the_adapter_of_zeros_holds_experts_as_peft_writes_them(tmp_path):
    from safetensors.numpy import load_file

    experts = "model.layers.0.mlp.experts"
    modules = {f"{experts}.gate_up_proj": ModuleShape(4, 12, experts=3), f"{experts}.down_proj": ModuleShape(6, 4, experts=3)}
    write_zero_adapter(tmp_path, replace(CONTRACT, modules=modules))
    shapes = {name: tensor.shape for name, tensor in load_file(tmp_path / "adapter_model.safetensors").items()}
    assert shapes == {
        f"base_model.model.{experts}.base_layer.lora_A.weight": (3, 4),
        f"base_model.model.{experts}.base_layer.lora_B.weight": (12, 3),
        f"base_model.model.{experts}.lora_A.weight": (3, 6),
        f"base_model.model.{experts}.lora_B.weight": (4, 3),
    }
