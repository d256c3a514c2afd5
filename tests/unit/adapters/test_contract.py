"""What the publish contract refuses: each fault has its code, the limit and the value, and no refusal tells a path."""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.contract import Inspection, PublishOptions, inspect, prepare
from adapters.contract.safetensors_file import read_header
from adapters.errors import AdapterCorrupt, AdapterIncompatible, AdapterRefused, InvalidRequest
from adapters.types import BaseContract
from tests.adapter_folders import (
    PREFIX,
    TEXT,
    VISION_MODULE,
    VLM,
    AdapterFolder,
    contract_of,
    moved,
    plain,
    safetensors_bytes,
)

Q0 = "model.layers.0.self_attn.q_proj"
A_OF_Q0 = f"{PREFIX}{Q0}.lora_A.weight"
B_OF_Q0 = f"{PREFIX}{Q0}.lora_B.weight"
WEIGHTS = "adapter_model.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 175000000\n"


@dataclass(frozen=True)
class Case:
    """A folder that is refused: how it is written, and the refusal's code, limit and value."""

    name: str
    write: Callable[[Path], Any] | AdapterFolder
    code: str
    limit: Any = None
    value: Any = None
    contract: BaseContract | None = TEXT
    options: PublishOptions | None = None

    def folder(self, path: Path) -> Path:
        if isinstance(self.write, AdapterFolder):
            return self.write.write(path)
        plain().write(path)
        self.write(path)
        return path


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def overwrite(name: str, data: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(data)


def without_weights(*others: str) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        for name in others:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"x")

    return write


def only(name: str, *keys: str) -> Callable[[Path], Any]:
    """A folder whose one safetensors file is called `name` and holds `keys`."""

    def write(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(safetensors_bytes({key: zeros(2, 2) for key in keys}, dict.fromkeys(keys, "F32")))

    return write


def cut(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-100])


def header(text: str, data: bytes = b"") -> Callable[[Path], Any]:
    return overwrite(WEIGHTS, struct.pack("<Q", len(text)) + text.encode() + data)


def shard_lost(folder: Path) -> None:
    without_weights()(folder)
    replace(plain(), shards=3).write(folder)
    (folder / "adapter_model-00002-of-00003.safetensors").unlink()


def index_disagrees(folder: Path) -> None:
    without_weights()(folder)
    replace(plain(), shards=2).write(folder)
    index = folder / f"{WEIGHTS}.index.json"
    named = json.loads(index.read_text())
    named["weight_map"]["base_model.model.extra.lora_A.weight"] = "../../secret"
    index.write_text(json.dumps(named))


def with_values(key: str, value: float, count: int) -> AdapterFolder:
    folder = plain()
    values = folder.tensors[key].copy()
    values.reshape(-1)[:count] = value
    return folder.with_tensor(key, values)


def with_layer(number: int) -> AdapterFolder:
    extra = {key.replace("layers.1", f"layers.{number}"): value for key, value in plain().tensors.items() if "layers.1" in key}
    return replace(plain(), tensors={**plain().tensors, **extra})


def with_pair(path: str, width_in: int = 16, width_out: int = 16) -> AdapterFolder:
    name = path.rpartition(".")[2]
    folder = plain(target_modules=[*plain().config["target_modules"], name])
    folder = folder.with_tensor(f"{PREFIX}{path}.lora_A.weight", np.ones((4, width_in), np.float32))
    return folder.with_tensor(f"{PREFIX}{path}.lora_B.weight", np.ones((width_out, 4), np.float32))


def all_b_zero() -> AdapterFolder:
    return replace(plain(), tensors={key: value * ("lora_A" in key) for key, value in plain().tensors.items()})


def vision(contract: BaseContract) -> AdapterFolder:
    folder = plain(contract, target_modules=[*plain().config["target_modules"], "qkv"])
    folder = folder.with_tensor(f"{PREFIX}{VISION_MODULE}.lora_A.weight", np.ones((4, 16), np.float32))
    return folder.with_tensor(f"{PREFIX}{VISION_MODULE}.lora_B.weight", np.ones((48, 4), np.float32))


BROKEN_BYTES = {
    "adapter_corrupt",
    "config_invalid",
    "incomplete_pair",
    "incomplete_shards",
    "no_tensors",
    "not_downloaded",
    "sharded_tensor",
}
SIZE = len(safetensors_bytes(plain().tensors, dict.fromkeys(plain().tensors, "F32")))
TARGETS = plain().config["target_modules"]
FINITE, WHOLE = "a finite number", "a positive integer"
DTYPES = ["BF16", "F16", "F32", "F64"]

FILES = [
    Case("a pickle", without_weights("adapter_model.bin"), "pickle_refused", WEIGHTS, "adapter_model.bin"),
    Case("a torch file", without_weights("adapter_model.pt"), "pickle_refused", WEIGHTS, "adapter_model.pt"),
    Case("a pointer for weights", overwrite(WEIGHTS, POINTER), "not_downloaded", "the file itself", WEIGHTS),
    Case(
        "a pointer for the config",
        overwrite("adapter_config.json", POINTER),
        "not_downloaded",
        "the file itself",
        "adapter_config.json",
    ),
    Case("no weights", without_weights(), "no_tensors", WEIGHTS, 0),
    Case("no config", lambda folder: (folder / "adapter_config.json").unlink(), "config_invalid", "adapter_config.json", 0),
    Case("a truncated file", cut, "adapter_corrupt", SIZE, SIZE - 100),
    Case("a file of three bytes", overwrite(WEIGHTS, b"abc"), "adapter_corrupt", 8, 3),
    Case("a header longer than the file", overwrite(WEIGHTS, struct.pack("<Q", 10**12)), "adapter_corrupt", 0, 10**12),
    Case(
        "a header that is no JSON",
        header("{nope"),
        "adapter_corrupt",
        "JSON",
        "Expecting property name enclosed in double quotes",
    ),
    Case("a header without bottom", header('{"a":' + "[" * 100_000), "adapter_corrupt", "JSON", "RecursionError"),
    Case("a tensor named twice", header('{"a":{},"a":{}}'), "adapter_corrupt", 1, "a"),
    Case(
        "a tensor larger than its offsets",
        header('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', b"1234"),
        "adapter_corrupt",
        8,
        4,
    ),
    Case(
        "overlapping tensors",
        header(
            '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}', b"123"
        ),
        "adapter_corrupt",
        115,
        114,
    ),
    Case("a missing shard", shard_lost, "incomplete_shards", 3, ["adapter_model-00002-of-00003.safetensors"]),
    Case("an index of something else", index_disagrees, "incomplete_shards", 0, 1),
    Case("a single file and shards", plain().with_file("adapter_model-00001-of-00001.safetensors"), "ambiguous_folder", 1, 2),
    Case(
        "adapters in subfolders only",
        without_weights("a/adapter_config.json", "b/adapter_config.json"),
        "ambiguous_folder",
        1,
        ["a", "b"],
    ),
    Case("a trained tower beside it", plain().with_file("vit.safetensors"), "extra_weights", 0, "vit.safetensors"),
    Case("more bytes than allowed", plain(), "too_large", 1000, SIZE, options=PublishOptions(max_bytes=1000)),
    Case("an adapter of mlx-lm", only("adapters.safetensors", "model.layers.0.lora_a"), "foreign_format", "PEFT", "mlx-lm"),
    Case("an adapter of kohya", only("style.safetensors", "lora_unet_down.lora_down.weight"), "foreign_format", "PEFT", "kohya"),
    Case(
        "an adapter of diffusers",
        only("pytorch_lora_weights.safetensors", "unet.lora.down.weight"),
        "foreign_format",
        "PEFT",
        "diffusers",
    ),
    Case(
        "factors named by mlx-lm",
        plain().renamed(lambda key: key.replace("lora_A.weight", "lora_a")),
        "foreign_format",
        "PEFT",
        "mlx-lm",
    ),
    Case(
        "factors named by Megatron",
        plain().with_tensor("decoder.layers.0.linear_in.weight", zeros(2, 2)),
        "foreign_format",
        "PEFT",
        "Megatron",
    ),
]

CONFIGS = [
    Case(
        "no JSON",
        overwrite("adapter_config.json", b"{r: 4}"),
        "config_invalid",
        "JSON",
        "Expecting property name enclosed in double quotes",
    ),
    Case("a list", overwrite("adapter_config.json", b"[]"), "config_invalid", "object", "list"),
    Case("a key twice", overwrite("adapter_config.json", b'{"r": 4, "r": 8}'), "config_invalid", 1, "r"),
    Case("NaN for alpha", overwrite("adapter_config.json", b'{"r": 4, "lora_alpha": NaN}'), "config_invalid", "JSON", "NaN"),
    Case("r as text", plain(r="4"), "config_invalid", WHOLE, '"4"'),
    Case("r of zero", plain(r=0), "config_invalid", WHOLE, "0"),
    Case("r as true", plain(r=True), "config_invalid", WHOLE, "True"),
    Case("no r", plain().without("r"), "config_invalid", WHOLE),
    Case("no alpha", plain().without("lora_alpha"), "config_invalid", FINITE),
    Case("a pattern that is no expression", plain(rank_pattern={"(": 4}), "config_invalid", "a regular expression", "("),
    Case(
        "a pattern that takes for ever",
        plain(alpha_pattern={"(a+)+b": 4}),
        "config_invalid",
        "512 characters, 2 repeats, no repeated groups",
        "(a+)+b",
    ),
    Case("a configuration of mlx-lm", plain(fine_tune_type="lora"), "foreign_format", "PEFT", "mlx-lm"),
    Case("another method", plain(peft_type="IA3"), "peft_type_unsupported", "LORA", "IA3"),
    Case("DoRA", plain(use_dora=True), "dora_unsupported", "no `use_dora`", "True"),
    Case("saved modules", plain(modules_to_save=["score"]), "extra_weights", "no `modules_to_save`", "['score']"),
    Case("trained tokens", plain(trainable_token_indices=[1]), "extra_weights", "no `trainable_token_indices`", "[1]"),
    Case("biases", plain(bias="all"), "extra_weights", "none", "all"),
    Case("a LoRA bias", plain(lora_bias=True), "lora_bias_unsupported", "no `lora_bias`", "True"),
    Case(
        "an activated LoRA", plain(alora_invocation_tokens=[5, 6]), "alora_unsupported", "no `alora_invocation_tokens`", "[5, 6]"
    ),
    Case(
        "replicated layers",
        plain(layer_replication=[[0, 1]]),
        "layer_replication_unsupported",
        "no `layer_replication`",
        "[[0, 1]]",
    ),
    Case(
        "PiSSA",
        plain(init_lora_weights="pissa_niter_16"),
        "base_changing_init",
        "an init that leaves the base as it is",
        "pissa_niter_16",
    ),
    Case("alpha of zero", plain(lora_alpha=0), "scale_zero", "not 0", 0.0),
    Case("a pattern of zero", plain(alpha_pattern={"q_proj": 0}), "scale_zero", "not 0", 0.0),
    Case("another base", plain(base_fingerprint="e" * 64), "wrong_base", "f" * 64, "e" * 64),
    Case(
        "another base, says the trainer",
        plain(),
        "wrong_base",
        "f" * 64,
        "d" * 64,
        options=PublishOptions(base_fingerprint="d" * 64),
    ),
    Case("a target without weights", plain().minus("q_proj"), "no_matching_module", 0, ["q_proj"]),
    Case("weights without a target", plain(target_modules=["q_proj"]), "extra_tensors", 0, 12),
]

WEIGHT_CASES = [
    Case("no tensors", replace(plain(), tensors={}), "no_tensors", 1, 0),
    Case("A without B", plain().minus("layers.0.self_attn.q_proj.lora_B"), "incomplete_pair", "A and B", "A"),
    Case("B without A", plain().minus("layers.0.self_attn.q_proj.lora_A"), "incomplete_pair", "A and B", "B"),
    Case("a factor of one dimension", plain().with_tensor(A_OF_Q0, zeros(64)), "sharded_tensor", 2, [64]),
    Case("a factor of no size", plain().with_tensor(A_OF_Q0, zeros(0, 16)), "sharded_tensor", 2, [0, 16]),
    Case("a factor of integers", replace(plain(), dtypes={A_OF_Q0: "I8"}), "dtype_unsupported", DTYPES, "I8"),
    Case("NaN", with_values(A_OF_Q0, np.nan, 2), "adapter_corrupt", 0, 2),
    Case("infinity", with_values(B_OF_Q0, np.inf, 3), "adapter_corrupt", 0, 3),
    Case("NaN in bfloat16", replace(with_values(A_OF_Q0, np.nan, 1), dtype="BF16"), "adapter_corrupt", 0, 1),
    Case("a scale that overflows", with_values(B_OF_Q0, 3e38, 5), "overflow", 0, 5),
    Case("another rank than the config's", plain(r=8), "rank_mismatch", 8, 4),
    Case("A and B of different ranks", plain().with_tensor(A_OF_Q0, zeros(2, 16)), "rank_mismatch", 4, [2, 4]),
    Case("a rank over the limit", plain(rank=16), "rank_too_large", 8, 16),
    Case("a wider base", plain(), "shape_mismatch", [32, 48], [16, 24], contract=contract_of("model", wider=2)),
    Case("a narrower base", plain(contract_of("model", wider=2)), "shape_mismatch", [16, 24], [32, 48]),
    Case("a transposed factor", plain().with_tensor(A_OF_Q0, zeros(16, 4)), "rank_mismatch", 4, [16, 4]),
    Case("layers beyond the base", with_layer(99), "extra_layers", 2, 99),
    Case("nothing that lands", moved(plain(), "model.layers", "decoder.blocks"), "no_matching_module", 1, 0),
    Case("a module that the base lacks", with_pair("model.layers.0.self_attn.x_proj"), "extra_tensors", 0, 1),
    Case("tensors of nobody", plain().with_tensor("base_model.model.lora_extra", zeros(2)), "extra_tensors", 0, 1),
    Case("saved embeddings", plain().with_tensor(f"{PREFIX}model.embed_tokens.weight", zeros(32, 16)), "extra_weights", 0, 1),
    Case("magnitude vectors", plain().with_tensor(f"{PREFIX}{Q0}.lora_magnitude_vector", zeros(16)), "dora_unsupported", 0, 1),
    Case("biases of factors", plain().with_tensor(f"{PREFIX}{Q0}.lora_B.bias", zeros(16)), "lora_bias_unsupported", 0, 1),
    Case("factors of LoKr", plain().with_tensor(f"{PREFIX}{Q0}.lokr_w1", zeros(4, 4)), "peft_type_unsupported", 0, 1),
    Case("experts on a dense base", with_pair("model.layers.0.mlp.experts.0.gate_proj"), "moe_layout_unsupported", 0, 1),
    Case("fused experts", with_pair("model.layers.0.mlp.experts"), "moe_layout_unsupported", 0, 1),
    Case("vision keys that the engine skips", vision(VLM), "vision_keys_not_served", 0, 1, contract=VLM),
    Case(
        "two adapters in one file",
        moved(plain(), "q_proj.lora_A.weight", "q_proj.lora_A.reference.weight").renamed(
            lambda key: key.replace("lora_B.weight", "lora_B.default.weight")
        ),
        "ambiguous_folder",
        1,
        ["default", "reference"],
    ),
    Case(
        "two tensors for one module",
        plain().with_tensor(A_OF_Q0.removeprefix(PREFIX), zeros(4, 16)),
        "duplicate_module",
        1,
        [A_OF_Q0, A_OF_Q0.removeprefix(PREFIX)],
    ),
    Case("every B zero", all_b_zero(), "changes_nothing", "some B @ A not zero", 0),
]

STRICT = [
    Case(
        "a name in the keys",
        moved(plain(), ".weight", ".default.weight"),
        "rewrite_needed",
        0,
        ["strip-name"],
        options=PublishOptions(strict=True),
    ),
    Case(
        "a pattern", plain(alpha_pattern={"q_proj": 8}), "rewrite_needed", 0, ["fold-scale"], options=PublishOptions(strict=True)
    ),
]


CASES = [*FILES, *CONFIGS, *WEIGHT_CASES, *STRICT]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_fault_is_refused_with_its_code_limit_and_value(case, tmp_path):
    with pytest.raises(AdapterRefused) as caught:
        prepare(case.folder(tmp_path / "in"), case.contract, case.options, workdir=tmp_path / "out")
    error = caught.value

    assert (error.reason, error.limit, error.value) == (case.code, case.limit, case.value), error
    assert type(error) is (AdapterCorrupt if case.code in BROKEN_BYTES else AdapterIncompatible)
    assert str(tmp_path) not in str(error)
    json.dumps(error.details())
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def seen_by(folder: AdapterFolder, tmp_path: Path, contract: BaseContract | None = TEXT, **options: Any) -> Inspection:
    return inspect(folder.write(tmp_path), contract, PublishOptions(**options))


def test_a_good_adapter_has_no_findings(tmp_path):
    seen = seen_by(plain(), tmp_path)

    assert seen.is_publishable
    assert (seen.rank, seen.alpha, seen.num_modules, seen.tool, seen.warnings) == (4, 16, 14, "PEFT", ())


def test_inspection_finds_all_faults_at_once_and_writes_nothing(tmp_path):
    seen = seen_by(with_layer(7).configured(use_dora=True, r=8), tmp_path)

    assert [finding.reason for finding in seen.findings] == ["dora_unsupported", "extra_layers", "rank_mismatch"]
    assert seen.digest is None
    assert len(list(tmp_path.iterdir())) == 2


def test_an_adapter_without_effect_can_be_forced(tmp_path):
    seen = seen_by(all_b_zero(), tmp_path, allow_zero=True)

    assert seen.is_publishable
    assert "changes nothing" in " ".join(seen.warnings)


def test_an_alpha_that_was_lost_can_be_given(tmp_path):
    lost = seen_by(plain(lora_alpha=0), tmp_path / "lost", alpha=16)

    assert lost.digest == seen_by(plain(), tmp_path / "plain").digest
    assert lost.tool == "verl"


def test_without_a_contract_only_the_structure_is_checked_and_a_warning_says_so(tmp_path):
    seen = seen_by(with_layer(99), tmp_path, contract=None)

    assert seen.is_publishable
    assert "no base contract" in seen.warnings[0]


def test_vision_factors_are_published_where_the_base_applies_them(tmp_path):
    contract = contract_of("model.language_model", tower="model.language_model", serves_vision=True)

    assert seen_by(vision(contract), tmp_path, contract).num_modules == 15


def test_another_base_name_only_warns_and_tells_no_folder(tmp_path):
    seen = seen_by(plain(base_model_name_or_path="/home/ann/.cache/other-base-bnb-4bit"), tmp_path)

    assert seen.is_publishable
    assert len(seen.warnings) == 2
    assert "ann" not in " ".join(seen.warnings)


def test_an_unusual_scale_and_a_pattern_for_nothing_are_warned_about(tmp_path):
    seen = seen_by(plain(lora_alpha=512, alpha_pattern={"c_attn": 8}), tmp_path)

    assert [warning.partition(":")[0].split()[0] for warning in seen.warnings] == ["the", "the"]
    assert "128" in seen.warnings[0]
    assert "c_attn" in seen.warnings[1]


def test_overlapping_patterns_are_warned_about_since_saving_sorts_them(tmp_path):
    seen = seen_by(plain(alpha_pattern={"layers.0.self_attn.q_proj": 2, "q_proj": 8}), tmp_path)

    assert ["overlap" in warning for warning in seen.warnings] == [True]


def test_a_target_that_no_module_has_is_warned_about(tmp_path):
    seen = seen_by(plain(target_modules=[*TARGETS, "c_attn"]), tmp_path)

    assert seen.warnings == ("`target_modules` names `c_attn`: nothing was trained there",)


def test_the_nearest_module_is_the_hint(tmp_path):
    seen = seen_by(with_pair("model.layers.0.self_attn.qq_proj"), tmp_path)

    assert seen.findings[0].hint == "nearest in the base: `model.layers.N.self_attn.q_proj`"


def test_targets_may_be_full_paths_under_another_tower_name(tmp_path):
    paths = [f"model.language_model.layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attn.q_proj", "mlp.up_proj")]
    kept = {key: value for key, value in plain().tensors.items() if "q_proj" in key or "up_proj" in key}
    seen = seen_by(replace(plain(target_modules=paths), tensors=kept), tmp_path)

    assert seen.is_publishable


def test_a_missing_folder_is_a_wrong_request(tmp_path):
    with pytest.raises(InvalidRequest):
        inspect(tmp_path / "nowhere", TEXT)


def test_a_folder_that_nobody_may_read_is_a_wrong_request(tmp_path, monkeypatch):
    plain().write(tmp_path)

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "no", str(tmp_path))

    monkeypatch.setattr("adapters.contract.contract.read_folder", forbidden)
    with pytest.raises(InvalidRequest) as caught:
        inspect(tmp_path, TEXT)

    assert str(tmp_path) not in str(caught.value)


def test_weights_that_go_away_while_they_are_read_are_refused(tmp_path):
    tensor = next(iter(read_header(plain().write(tmp_path) / WEIGHTS).values()))
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(AdapterCorrupt):
        tensor.read()


def test_a_refusal_survives_pickling(tmp_path):
    error = pickle.loads(pickle.dumps(seen_by(plain(rank=16), tmp_path).findings[0]))

    assert (error.reason, error.limit, error.value) == ("rank_too_large", 8, 16)
    assert Q0.rpartition(".")[0].rpartition(".")[0] in error.message


def test_a_hostile_header_is_refused_in_no_time(tmp_path):
    folder = plain().write(tmp_path)
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 2**62) + b"{" * 1000)
    start = time.perf_counter()
    assert inspect(folder, TEXT).findings

    assert time.perf_counter() - start < 0.05


def test_the_contract_loads_neither_torch_nor_a_web_framework():
    code = (
        "import sys, adapters.contract, adapters.inspect_command, adapters.contract.canonical\n"
        "print(sorted({'torch', 'ray', 'fastapi', 'vllm', 'safetensors', 'peft'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert out.stdout.strip() == "[]"
