"""Real engines of many architectures, each on a toy base: what the command says of a base is what its engine takes.

Each test starts an engine of its own, without Ray.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest

from adapters.contract import PublishOptions, prepare
from adapters.registry import codec
from tests.live_engine import ask

TOWER = {"enable_tower_connector_lora": True}
# transformers 5 saves these two in another layout than vLLM 0.29 loads; names and shapes do not depend on the values.
UNREAD = {"load_format": "dummy"}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi3": {},
    "qwen3-moe": {},
    "gpt-oss": {},
    "qwen2-vl": TOWER,
    "qwen2.5-vl": TOWER,
    "qwen3-vl": TOWER,
    "qwen3-vl-moe": TOWER | UNREAD,
    "gemma3": TOWER | UNREAD,
}


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("toys") / name
            run("-m", "tests.toy_bases", name, str(made[name]))
        return made[name]

    return make


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="session")
def described(tmp_path_factory):
    """What `loramux base-contract` says of a folder that is served with these engine arguments, as its JSON."""

    def run_command(base: Path, engine: dict[str, Any]) -> dict[str, Any]:
        config = tmp_path_factory.mktemp("settings") / "loramux.yaml"
        config.write_text(json.dumps({"bases": [{"id": "toy", "engine": {"enable_lora": True, "max_lora_rank": 8} | engine}]}))
        loramux = str(Path(sys.executable).with_name("loramux"))
        return json.loads(run(loramux, "base-contract", str(base), "--id", "toy", "--config", str(config), "--json"))

    return run_command


@pytest.fixture(scope="session")
def examined(request, toy, described):
    """What engine and command say of each architecture that is asked for. Two at a time: a start keeps one core busy."""
    wanted = {item.callspec.params["engine_of"] for item in request.session.items if "engine_of" in _parameters(item)}

    def examine(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        base, engine = toy(name), ARCHITECTURES[name]
        return ask("describe", base, engine), described(base, engine)

    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(examine, name) for name in ARCHITECTURES if name in wanted}


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


@pytest.mark.parametrize("engine_of", ARCHITECTURES)
def test_a_base_is_described_as_its_engine_takes_it(examined, engine_of):
    live, described = examined[engine_of].result()
    engine = ARCHITECTURES[engine_of]
    assert described == live["contract"], "the command and the replica disagree"
    assert live["contract"]["serves_vision"] == (engine.get("enable_tower_connector_lora") is True)
    assert live["landed"] == live["parsed"], "the engine's reader leads canonical keys to other modules"
    assert live["count"] == len(live["contract"]["modules"]), "an adapter on all modules does not fill them all"


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_the_engine_adds_to_experts_what_peft_adds(toy, described, tmp_path, name):
    """PEFT keeps all experts of a layer in one pair of matrices; each engine wants another form of them."""
    base = toy(name)
    run("-m", "tests.peft_truth", str(base), str(tmp_path), "experts", "0.3")
    truth = json.loads((tmp_path / "truth.json").read_text())["kinds"]
    contract = codec.decode_contract(json.dumps(described(base, {})).encode())
    options = PublishOptions(keep_dtype=True)
    made = {kind: prepare(tmp_path / kind, contract, options, workdir=tmp_path / "canonical" / kind) for kind in truth}
    found = ask("experts", base, adapters={kind: str(tmp_path / "canonical" / kind) for kind in made})
    for kind, expected in truth.items():
        assert found[kind]["landed"] == made[kind].num_modules
        for weight in ("gate_up_proj", "down_proj"):
            delta = numpy.array(expected["deltas"][weight])
            assert numpy.abs(delta).max() > 0.1, "too weak to prove anything"
            # A merge rounds the sum of weight and delta to float32, not the delta.
            numpy.testing.assert_allclose(found[kind]["deltas"][weight], delta, atol=1e-5, err_msg=f"{kind} {weight}")


def test_a_vision_tower_without_lora_is_not_described(toy, described):
    contract = described(toy("qwen2.5-vl"), {})
    assert (contract["tower"], contract["serves_vision"]) == ("model.language_model", False)
    assert all(name.startswith("model.language_model.") for name in contract["modules"])


def test_quantised_weights_change_nothing_of_what_a_base_takes(toy, described, tmp_path):
    """Weights packed as GPTQ packs them; no kernel for them is asked for."""
    from safetensors.numpy import load_file, save_file

    plain = toy("llama")
    packed = tmp_path / "packed"
    packed.mkdir()
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    (packed / "config.json").write_text(json.dumps(config))
    run("-c", f"{_TO_FLOAT32}\nwiden({str(plain)!r}, {str(tmp_path)!r})")
    tensors = load_file(tmp_path / "wide.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(name)
        stem = name.removesuffix("weight")
        tensors[f"{stem}qweight"] = weight.T[::8].astype("int32").copy()
        tensors[f"{stem}scales"] = weight.T[::32].copy()
    save_file(tensors, packed / "model.safetensors")
    found, expected = described(packed, {}), described(plain, {})
    assert found.pop("fingerprint") != expected.pop("fingerprint")
    assert found == expected


# numpy has no bfloat16; torch, which has, stays out of this process.
_TO_FLOAT32 = """
def widen(source, out):
    from safetensors.torch import load_file, save_file
    tensors = load_file(source + '/model.safetensors')
    save_file({name: tensor.float() for name, tensor in tensors.items()}, out + '/wide.safetensors')
"""


def test_an_activation_error_leaves_no_ghost_and_no_other_answer_changes(toy):
    """A rank over the engine's limit, which the config hides, breaks the second step of a load, after the first was kept."""
    seen = ask("haunt", toy("llama"))
    assert seen["refused"] == "engine_refused"
    assert seen["ghosts"] == [1002], "no ghost to lay: the engine became transactional, so the removal may be needless"
    assert seen["after"] == {"registered": [1001], "slots": [1001, None], "landed": 0}
    assert seen["slots"] == [1001, 1003]
    assert seen["good"][0] == seen["good"][1] == seen["next"]
    assert seen["base"][0] == seen["base"][1] != seen["good"][0]


def test_an_adapter_that_was_read_ahead_answers_like_one_that_was_not(toy):
    seen = ask("staged", toy("llama"))
    assert seen["registered"] == [[1001], [1001, 1002]], "reading ahead takes no place"
    assert seen["landed"][0] == seen["landed"][1]
    assert seen["answers"][0] == seen["answers"][1]
    assert (seen["refused"], seen["missing"]) == ("engine_refused", "engine_refused")
    assert seen["left"] == [], "what is forgotten or refused stays nowhere"


def test_an_adapter_of_another_bases_shapes_is_refused_and_never_answers_as_the_base_would(toy):
    """vLLM takes it, into the corners of its places: whoever asks for it hears the base."""
    seen = ask("misfit", toy("llama"))
    assert all("its shapes are of another base: " in text and "wide" in text for text in seen["errors"]), seen
    assert seen["registered"] == []


def test_a_seeded_request_whose_prompt_is_read_in_parts_is_answered_and_the_same_again(toy):
    """vLLM turns the request's generator back, which those of CPUs can't: the engine died of it."""
    one, two = ask("seeded", toy("llama"), {"max_num_batched_tokens": 16, "enable_chunked_prefill": True})
    assert len(one) == 8 and one == two


def test_a_load_that_runs_out_of_memory_blames_no_adapter_and_leaves_nothing(toy):
    seen = ask("starved", toy("llama"))
    assert seen["errors"] == [["overloaded", "out_of_memory", True]] * 2
    assert seen["left"] == [[1001], [1001, None], []]
    assert seen["answers"][0] == seen["answers"][1]
