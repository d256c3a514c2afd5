"""The canonical form against the two libraries that define what it means: PEFT for the weights, vLLM for the loading."""

from __future__ import annotations

import numpy as np
import pytest

from adapters.contract import prepare
from adapters.contract.landing import BaseMap
from tests.adapter_folders import PREFIX, SHAPES, TEXT, TEXT_NAMES, VLM, moved, plain, read_safetensors
from tests.exporter_layouts import MOE_VLM, SINGLE, experts_adapter

SINGLE_NAMES = {f"experts.{number}.{name}" for number in range(3) for name in ("gate_proj", "up_proj", "down_proj")}

pytestmark = pytest.mark.integration


def model_like(contract):
    """A torch model with the modules of `contract` and nothing else."""
    import torch

    root = torch.nn.Module()
    root.prepare_inputs_for_generation = None  # PEFT asks causal models for it
    for path, shape in contract.modules.items():
        *parents, name = path.split(".")
        parent = root
        for part in parents:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        parent.add_module(name, torch.nn.Linear(shape.in_features, shape.out_features, bias=False))
    return root


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 8}, "alpha_pattern": {"down_proj": 24, "o_proj": 3}},
        {"rank_pattern": {"layers.0.self_attn.o_proj": 2, "o_proj": 8}, "use_rslora": True},
    ],
    ids=str,
)
def test_an_adapter_that_peft_saved_keeps_its_deltas(fields, tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    names = sorted({name.rpartition(".")[2] for name in SHAPES})
    config = LoraConfig(r=4, lora_alpha=16, target_modules=names, init_lora_weights=False, **fields)
    model = get_peft_model(model_like(TEXT), config)
    model.save_pretrained(str(tmp_path / "in"))
    prepared = prepare(tmp_path / "in", TEXT, workdir=tmp_path / "out")
    tensors = read_safetensors(prepared.weights)

    for path in TEXT.modules:
        wanted = model.base_model.model.get_submodule(path).get_delta_weight("default").detach().numpy()
        found = tensors[f"{PREFIX}{path}.lora_B.weight"] @ tensors[f"{PREFIX}{path}.lora_A.weight"]
        assert np.abs(found - wanted).max() <= 2**-6 * np.abs(wanted).max(), path


def test_peft_loads_the_published_folder(tmp_path):
    from peft import PeftModel

    folder = plain(rank_pattern={}, alpha_pattern={"q_proj": 4})
    prepare(folder.write(tmp_path / "in"), TEXT, workdir=tmp_path / "out")
    model = PeftModel.from_pretrained(model_like(TEXT), str(tmp_path / "out"))
    delta = model.base_model.model.get_submodule("model.layers.0.self_attn.q_proj").get_delta_weight("default").numpy()
    a, b = (folder.tensors[f"{PREFIX}model.layers.0.self_attn.q_proj.lora_{side}.weight"] for side in "AB")

    np.testing.assert_allclose(delta, b @ a, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("name", TEXT_NAMES)
@pytest.mark.parametrize(
    ("contract", "root", "engine_root", "model_class"),
    [
        (TEXT, "model", "model", ("qwen3", "Qwen3ForCausalLM")),
        (VLM, "model.language_model", "language_model.model", ("qwen3_vl", "Qwen3VLForConditionalGeneration")),
    ],
    ids=["text", "vlm"],
)
def test_every_module_reaches_the_engine_under_its_own_name(contract, root, engine_root, model_class, name, tmp_path):
    import importlib

    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    prepare(moved(plain(contract), f"{root}.layers", name).write(tmp_path / "in"), contract, workdir=tmp_path / "out")
    module, class_name = model_class
    engine_class = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), class_name)
    helper = PEFTHelper.from_local_dir(str(tmp_path / "out"), None)
    loaded = LoRAModel.from_local_checkpoint(
        str(tmp_path / "out"),
        {name.rpartition(".")[2] for name in SHAPES},
        helper,
        lora_model_id=1,
        device="cpu",
        weights_mapper=engine_class.hf_to_vllm_mapper.get_rename_mapper(),
    )

    layers = [path for path in contract.modules if ".layers." in path]
    assert set(loaded.loras) == {path.replace(root, engine_root, 1) for path in layers}
    assert helper.vllm_lora_scaling_factor == 1


@pytest.mark.parametrize("layout", ["stacked", "swapped", "single"])
@pytest.mark.parametrize(
    ("contract", "model_class", "expert_names", "roots"),
    [
        (SINGLE, ("qwen3_moe", "Qwen3MoeForCausalLM"), SINGLE_NAMES, ("model", "model")),
        (
            MOE_VLM,
            ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
            {"experts"},
            ("model.language_model", "language_model.model"),
        ),
    ],
    ids=["single linears", "one module"],
)
def test_experts_reach_the_engine_in_the_form_that_it_takes(layout, contract, model_class, expert_names, roots, tmp_path):
    import importlib

    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    prepare(experts_adapter(layout).write(tmp_path / "in"), contract, workdir=tmp_path / "out")
    module, class_name = model_class
    engine_class = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), class_name)
    mapper = getattr(engine_class, "hf_to_vllm_mapper", None)
    loaded = LoRAModel.from_local_checkpoint(
        str(tmp_path / "out"),
        {"q_proj", "k_proj", "v_proj", "o_proj"} | expert_names,
        PEFTHelper.from_local_dir(str(tmp_path / "out"), None),
        lora_model_id=1,
        device="cpu",
        weights_mapper=mapper.get_rename_mapper() if mapper else None,
    )
    stored = {BaseMap(contract).stored_path(path) for path in contract.modules if ".layers." in path}

    assert getattr(engine_class, "is_3d_moe_weight", False) is (contract is MOE_VLM)
    assert set(loaded.loras) == {path.replace(*roots, 1) for path in stored}
