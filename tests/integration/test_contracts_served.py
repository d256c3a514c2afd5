"""What is served is what was trained: answers against PEFT's own, counts of what landed, the contract a replica writes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from safetensors.numpy import load_file, save_file

from adapters.contract import PublishOptions, prepare
from adapters.publishing import Publication, publish_folder
from adapters.registry import Registry, codec
from adapters.store import open_store
from adapters.types import WEIGHTS_FILE

# Two float32 implementations of one model differ in the order of their sums: some 1e-6 of logits around 10, a few layers deep.
SAME_NUMBERS = 1e-3
# bfloat16 keeps 8 bits: each factor is off by at most 2^-9 of itself, so each delta by 2^-8, and what it does to a log
# probability by some of that. The adapters move log probabilities by at most 3.
ROUNDED_ONCE = 0.03


@pytest.fixture(scope="session")
def truth(demo_base: Path, tmp_path_factory) -> dict:
    """Log probabilities of a fixed prompt by transformers and PEFT; the adapters lie in folders under `folder`."""
    folder = tmp_path_factory.mktemp("peft")
    command = [sys.executable, "-m", "tests.peft_truth", str(demo_base), str(folder), "scales", "0.05"]
    subprocess.run(command, check=True, capture_output=True)
    return json.loads((folder / "truth.json").read_text()) | {"folder": folder}


@pytest.fixture(scope="session")
def registry(stack) -> Registry:
    return Registry(open_store(stack.registry))


@pytest.fixture(scope="session")
def served(stack, client) -> Callable[[str], list[float]]:
    """The log probabilities that the running product gives to a prompt's tokens, all but the first."""

    def run(model: str, prompt: list[int]) -> list[float]:
        answer = client.completions.create(model=model, prompt=prompt, max_tokens=1, echo=True, logprobs=1, temperature=0)
        assert answer.model.startswith(model)
        return answer.choices[0].logprobs.token_logprobs[1 : len(prompt)]

    return run


@pytest.fixture(scope="session")
def published_kinds(stack, truth) -> set[str]:
    """All kinds twice: as they are published by default, and in float32 as `<kind>-f32`."""

    async def work() -> None:
        registry = Registry(open_store(stack.registry))
        for kind in truth["kinds"]:
            for name, keep in ((kind, False), (f"{kind}-f32", True)):
                wanted = Publication("demo", name, truth["folder"] / kind, promote="production", who="tests")
                await publish_folder(registry, wanted, PublishOptions(keep_dtype=keep))

    asyncio.run(work())
    names = {f"demo:{kind}{end}" for kind in truth["kinds"] for end in ("", "-f32")}
    stack.wait_until(lambda: names <= {model["id"] for model in stack.get("/v1/models")["data"]})
    return names


def distance(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


KINDS = (
    "uniform",
    "alpha-pattern",
    "rank-pattern",
    "both-patterns",
    "rslora",
    "rslora-patterns",
    "some-modules",
    "one-layer",
)


def test_the_kinds_below_are_those_that_peft_made(truth):
    assert tuple(truth["kinds"]) == KINDS


def test_the_base_answers_as_in_transformers(served, truth):
    assert distance(served("demo", truth["prompt"]), truth["base"]) < SAME_NUMBERS


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_adapter_answers_as_peft_itself(served, truth, published_kinds, kind):
    """In float32 nothing is rounded; in bfloat16 the folded weights are, once. The base is always far away."""
    peft = truth["kinds"][kind]["logprobs"]
    assert distance(peft, truth["base"]) > 10 * ROUNDED_ONCE, "too weak to prove anything"
    assert distance(served(f"demo:{kind}-f32", truth["prompt"]), peft) < SAME_NUMBERS
    assert distance(served(f"demo:{kind}", truth["prompt"]), peft) < ROUNDED_ONCE


async def test_prompts_are_scored_side_by_side_without_a_mix_up(aclient, truth, published_kinds):
    """Log probabilities of a prompt have a row for each token, which kernels that count on one for each request don't survive."""
    kinds = [None, *KINDS[:3]] * 2

    async def score(kind: str | None, tokens: int) -> list[float]:
        model, prompt = f"demo:{kind}-f32" if kind else "demo", truth["prompt"][:tokens]
        answer = await aclient.completions.create(model=model, prompt=prompt, max_tokens=1, echo=True, logprobs=1)
        return answer.choices[0].logprobs.token_logprobs[1:tokens]

    found = await asyncio.gather(*(score(kind, 10 + 2 * place) for place, kind in enumerate(kinds)))
    for kind, scores in zip(kinds, found, strict=True):
        expected = truth["kinds"][kind]["logprobs"] if kind else truth["base"]
        assert distance(scores, expected[: len(scores)]) < SAME_NUMBERS


async def test_an_adapter_that_the_engine_would_apply_in_part_is_refused_and_leaves_nothing(
    stack, registry, ask, aclient, published, artifacts, tmp_path
):
    """Its keys of a layer beyond the base's are dropped by the engine without a word; its manifest counts them."""
    name, sentence = sorted(published.items())[0]
    await asyncio.to_thread(_with_a_layer_too_many, artifacts / "adapters" / name, tmp_path / "folder")
    prepared = prepare(tmp_path / "folder", None, workdir=tmp_path / "work", base="demo")  # no contract: nothing to compare with
    made = await registry.publish("demo", "too-deep", prepared)
    await registry.promote("demo", "too-deep", "production", 1)
    await asyncio.to_thread(
        stack.wait_until, lambda: any(model["id"] == "demo:too-deep" for model in stack.get("/v1/models")["data"])
    )
    others = asyncio.gather(*(ask(f"demo:{name}", f"Hello {number}") for number in range(4)))
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        await aclient.completions.create(model="demo:too-deep", prompt="Hello", max_tokens=2)
    assert caught.value.code == "adapter_incompatible"
    assert "not_all_applied" in str(caught.value.body)
    assert f"{prepared.num_modules - 7} of the {prepared.num_modules} modules" in caught.value.message
    assert await others == [(f"demo:{name}@1", sentence)] * 4
    view = await asyncio.to_thread(stack.residency, audit=True)
    assert view["int_ids"] == view["engine_ids"], "a ghost stayed in the engine"
    assert str(made.ref) not in view["resident"]


def _with_a_layer_too_many(source: Path, out: Path) -> None:
    """A copy of an adapter whose layer 1 is there a second time, as layer 5."""
    out.mkdir()
    for file in source.iterdir():
        if file.is_file() and file.name != WEIGHTS_FILE:
            (out / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / WEIGHTS_FILE)
    tensors |= {key.replace("layers.1.", "layers.5."): tensor for key, tensor in tensors.items() if "layers.1." in key}
    save_file(tensors, out / WEIGHTS_FILE)


@pytest.mark.parametrize("base", ["demo", "embed"])
async def test_the_command_describes_a_base_as_its_live_replica_does(stack, registry, demo_base, pooling_base, tmp_path, base):
    folder, out = {"demo": demo_base, "embed": pooling_base}[base], tmp_path / "contract.json"
    command = ["base-contract", str(folder), "--id", base, "--config", str(stack.config), "--out", str(out)]
    loramux = Path(sys.executable).with_name("loramux")
    await asyncio.to_thread(subprocess.run, [str(loramux), *command], check=True, capture_output=True)
    assert codec.decode_contract(out.read_bytes()) == await registry.base(base)
