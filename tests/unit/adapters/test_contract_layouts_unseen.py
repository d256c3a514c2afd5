"""Folders that no list of exporters had foreseen: found by playing the exporters, and by breaking what they leave."""

from __future__ import annotations

import json
import struct
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from adapters.contract import inspect
from adapters.inspect_command import as_data
from tests.adapter_folders import RANK, TEXT, VISION_MODULE, VLM, AdapterFolder, plain, safetensors_bytes
from tests.exporter_layouts import HEADED, NAMES, PREFIX, VLM_SERVED, pair, renamed_files
from tests.unit.adapters.test_archive import adapter_members, tar_of, zip_of

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


def digest_of(folder: AdapterFolder, path, contract=TEXT) -> str | None:
    seen = inspect(folder.write(path), contract)
    assert not seen.findings, seen.findings
    return seen.digest


def codes_of(source, contract=TEXT) -> list[str | None]:
    return [finding.reason for finding in inspect(source, contract).findings]


def with_embedding(**fields) -> AdapterFolder:
    """An adapter of the embedding beside the linears, as PEFT names it, not trained yet."""
    folder = plain(HEADED, **fields).minus(EMBEDDING).minus(HEAD)
    folder = folder.with_tensor(f"{PREFIX}{EMBEDDING}.lora_embedding_A", np.zeros((RANK, 32), np.float32))
    return folder.with_tensor(f"{PREFIX}{EMBEDDING}.lora_embedding_B", np.ones((16, RANK), np.float32))


def zeroed(folder: AdapterFolder, part: str) -> AdapterFolder:
    tensors = {key: value * 0 if part in key else value for key, value in folder.tensors.items()}
    return replace(folder, tensors=tensors)


@pytest.mark.parametrize("wrapper", ["_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"])
@pytest.mark.parametrize("name", ["", ".default"])
def test_a_wrapper_around_the_factor_itself_is_stripped_too(wrapper, name, tmp_path):
    wrapped = plain().renamed(lambda key: key.replace(".weight", f"{name}.{wrapper}.weight"))

    assert digest_of(wrapped, tmp_path / "odd") == digest_of(plain(), tmp_path / "plain")


@pytest.mark.parametrize("entry", ["_orig_mod.{path}", r"^_orig_mod\.{path}$"])
def test_a_pattern_that_names_a_compiled_model_holds_for_its_modules(entry, tmp_path):
    q0 = "model.layers.0.self_attn.q_proj"
    compiled = plain().renamed(lambda key: key.replace(PREFIX, f"{PREFIX}_orig_mod."))

    odd = compiled.configured(alpha_pattern={entry.format(path=q0): 32})

    assert digest_of(odd, tmp_path / "odd") == digest_of(plain().configured(alpha_pattern={q0: 32}), tmp_path / "plain")


def test_a_pattern_that_ends_in_anything_may_have_two_more_stars(tmp_path):
    odd = plain(r=2, rank_pattern={".*layers.*mlp.*": RANK, ".*layers.*self_attn.*$": RANK})

    assert digest_of(odd, tmp_path / "odd") == digest_of(plain(), tmp_path / "plain")


def test_what_velora_keeps_for_the_backward_pass_is_left_out(tmp_path):
    odd = plain().with_tensor(f"{PREFIX}model.layers.0.self_attn.q_proj.lora_velora_embed", np.ones(4, np.float32))

    seen = inspect(odd.write(tmp_path / "odd"), TEXT)

    assert seen.digest == digest_of(plain(), tmp_path / "plain")
    assert [rule.name for rule in seen.rules if rule.name.startswith("drop")] == ["drop-training-state"]


def test_a_tied_head_has_weights_although_peft_took_its_name_away(tmp_path):
    folder = pair(with_embedding(target_modules=[*NAMES, "embed_tokens"]), HEAD, 16, 32)

    assert codes_of(folder.write(tmp_path / "untied"), HEADED) == ["extra_tensors"]
    assert codes_of(folder.configured(ensure_weight_tying=True).write(tmp_path / "tied"), HEADED) == []


def test_a_linear_of_the_tower_with_a_name_of_megatron_is_meant_as_it_stands(tmp_path):
    module = VISION_MODULE.replace("attn.qkv", "mlp.linear_fc1")
    contract = replace(VLM_SERVED, modules={**VLM.modules, module: VLM.modules[VISION_MODULE]})
    attention = [name for name in NAMES if name not in ("gate_proj", "up_proj")]
    folder = pair(plain(VLM, target_modules=[*attention, "linear_fc1"]), module, 16, 48)

    assert codes_of(folder.write(tmp_path / "both"), contract) == []
    assert codes_of(folder.minus("gate_proj").minus("up_proj").write(tmp_path / "tower"), contract) == []


def test_an_untrained_embedding_does_not_pass_for_a_change(tmp_path):
    """PEFT begins with zeros in A there, and with noise in B."""
    untrained = zeroed(with_embedding(target_modules=[*NAMES, "embed_tokens"]), ".lora_B.")

    assert codes_of(untrained.write(tmp_path), HEADED) == ["changes_nothing"]


def test_an_adapter_whose_every_a_is_zero_changes_nothing(tmp_path):
    assert codes_of(zeroed(plain(), ".lora_A.").write(tmp_path)) == ["changes_nothing"]


@pytest.mark.parametrize("name", ["new_embeddings.safetensors", "non_lora_trainables.bin", "trainable_params.bin"])
def test_weights_that_were_trained_in_full_beside_the_adapter_are_extra_weights(name, tmp_path):
    (finding,) = inspect(plain().with_file(name, b"x" * 5000).write(tmp_path), TEXT).findings

    assert (finding.reason, finding.value) == ("extra_weights", name)
    assert "5000 bytes" in finding.message


def test_a_pickle_that_a_trainer_writes_with_nothing_in_it_is_passed_over(tmp_path):
    assert codes_of(plain().with_file("non_lora_state_dict.bin", b"x" * 1000).write(tmp_path)) == []


def test_an_older_language_model_is_not_taken_for_an_image_model(tmp_path):
    odd = plain().renamed(lambda key: key.replace("model.layers", "transformer.h").replace("self_attn", "attn"))

    assert codes_of(odd.write(tmp_path))[0] == "no_matching_module"


def test_an_image_model_of_transformers_is_named_as_such(tmp_path):
    odd = plain().renamed(lambda key: key.replace(f"{PREFIX}model.layers", "transformer.single_transformer_blocks"))

    assert codes_of(odd.write(tmp_path))[0] == "foreign_format"


def test_the_adapter_file_of_litgpt_is_known_by_its_name(tmp_path):
    renamed_files(plain(), lambda name: name.replace("adapter_model.safetensors", "lit_model.pth.lora"))(tmp_path)
    (finding,) = inspect(tmp_path, TEXT).findings

    assert (finding.reason, finding.value) == ("foreign_format", "LitGPT")


def test_numbers_of_thousands_of_digits_in_a_header_are_refused_and_can_be_told(tmp_path):
    digits = "9" * 4000
    header = f'{{"a":{{"dtype":"F32","shape":[{digits},{digits}],"data_offsets":[0,4]}}}}'.encode()
    plain().write(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"0000")

    seen = inspect(tmp_path, TEXT)

    assert [finding.reason for finding in seen.findings] == ["adapter_corrupt"]
    assert json.dumps(as_data(seen))


def test_what_a_desktop_puts_beside_the_folder_in_an_archive_is_passed_over(tmp_path):
    archive = zip_of(tmp_path / "a.zip", (".DS_Store", b"x"), *adapter_members(tmp_path, "adapter/"))

    assert codes_of(archive) == []


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_a_zip_of_another_compression_is_refused_before_it_is_unpacked(method, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as archive:
        for name, data in adapter_members(tmp_path):
            archive.writestr(name, data)
    (finding,) = inspect(tmp_path / "a.zip", TEXT).findings

    assert (finding.reason, finding.value) == ("archive_corrupt", method)


def test_a_compressed_tar_whose_checksum_is_wrong_is_refused(tmp_path):
    archive = tar_of(tmp_path / "a.tar.gz", *adapter_members(tmp_path))
    data = bytearray(archive.read_bytes())
    data[-8] ^= 1
    archive.write_bytes(data)

    assert codes_of(archive) == ["archive_corrupt"]


@pytest.mark.parametrize("name", ["training_args.bin", "optimizer.pt", "scheduler.bin", "rng_state_0.pth", "random_states_0.pkl"])
def test_what_a_trainer_keeps_to_go_on_with_is_not_taken_for_the_adapter(name, tmp_path):
    plain().with_file(name).write(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()

    assert codes_of(tmp_path) == ["no_tensors"]


def test_adapters_below_a_trainer_s_folder_are_named_although_its_own_state_lies_there(tmp_path):
    plain().write(tmp_path / "checkpoint-500")
    (tmp_path / "training_args.bin").write_bytes(b"x")
    (finding,) = inspect(tmp_path, TEXT).findings

    assert (finding.reason, finding.value) == ("ambiguous_folder", ["checkpoint-500"])


def test_a_merged_model_is_told_from_an_adapter_that_was_not_gathered(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({"w": np.ones(1, np.float32)}, {"w": "F32"}))
    (finding,) = inspect(tmp_path, TEXT).findings

    assert finding.reason == "no_tensors"
    assert "serve it as a base" in str(finding.hint)


def test_patterns_on_endless_names_are_refused_before_they_are_compared(tmp_path):
    """Without a base nothing else limits the names."""
    folder = plain(target_modules=None, alpha_pattern={f".*.*x{number}": 8 for number in range(400)})
    for number in range(100):
        folder = pair(folder, "a." * 105 + str(number), 2, 2)

    seen = inspect(folder.write(tmp_path), None, base="tiny/base")

    assert [finding.reason for finding in seen.findings] == ["config_invalid"]
