"""Warms an engine before its replica is ready: the first request of a path compiles for seconds."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

from adapters.errors import EngineUnavailable
from adapters.names import AdapterRef
from adapters.types import CONFIG_FILE, WEIGHTS_FILE, BaseContract, LocalAdapter, ModuleShape
from serve_app.engine import asgi_call
from serve_app.engine.layers import GATE_UP
from serve_app.engine.vllm_engine import VllmEngine

WARM_INT_ID = 999
# Prompts of one token, of some, and several at once take different ways through an engine.
PROMPT_TOKENS = (1, 17, 64)
TOKEN = 1
CROWD = 64  # requests at once; together they fill a step of the engine, whose kernels are others than those of a few tokens
# Greedy, plain and truncated sampling, penalties and logprobs are separate code in the sampler.
SAMPLING = (
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 1, "top_p": 0.9, "top_k": 5},
    {"temperature": 1, "frequency_penalty": 0.1, "repetition_penalty": 1.1},
    {"temperature": 0, "logprobs": 2},
)


async def warm(engine: VllmEngine, contract: BaseContract) -> None:
    """Requests to the base and to an adapter that changes nothing. Raises EngineUnavailable when one is not answered."""
    await _ask_all(engine, contract.base)
    if contract.modules:
        await _warm_lora(engine, contract)


async def _warm_lora(engine: VllmEngine, contract: BaseContract) -> None:
    ref = AdapterRef(contract.base, "warm-up", 1)
    with tempfile.TemporaryDirectory(prefix="loramux-warm-") as folder:
        write_zero_adapter(Path(folder), contract)
        await engine.add(ref, WARM_INT_ID, LocalAdapter("", Path(folder), 0))
        try:
            await _ask_all(engine, str(ref))
        finally:
            await engine.remove(ref, WARM_INT_ID)


async def _ask_all(engine: VllmEngine, model: str) -> None:
    for tokens in PROMPT_TOKENS:
        await _ask(engine, model, tokens, SAMPLING[0])
    for sampling in SAMPLING:
        await _ask(engine, model, PROMPT_TOKENS[0], sampling)
    await asyncio.gather(*(_ask(engine, model, tokens, SAMPLING[1]) for tokens in PROMPT_TOKENS))
    crowd = min(CROWD, engine.max_requests)
    # each begins with a token of its own, so that no prompt is taken for another's beginning
    await asyncio.gather(*(_ask(engine, model, engine.step_tokens // crowd, SAMPLING[1], TOKEN + n) for n in range(crowd)))


async def _ask(engine: VllmEngine, model: str, tokens: int, sampling: dict[str, float], first: int = TOKEN) -> None:
    prompt = [first, *[TOKEN] * (min(tokens, engine.max_model_len - 4) - 1)]
    route, fields = (
        ("/v1/embeddings", {"input": prompt})
        if engine.is_pooling
        else ("/v1/completions", {"prompt": prompt, "max_tokens": 3, "ignore_eos": True, **sampling})
    )
    answer = await asgi_call.call(engine.app, route, json.dumps({"model": model, **fields}).encode(), {})
    body = b"".join([chunk async for chunk in answer.chunks()])
    await answer.aclose()
    if answer.status != 200:
        raise EngineUnavailable(f"the warm-up request was answered with {answer.status}: {body[:300].decode(errors='replace')}")


def write_zero_adapter(folder: Path, contract: BaseContract) -> None:
    """An adapter of rank 1 on every module of the base that changes nothing. A: [1, in_features], B: [out_features, 1]; where
    a module holds all experts of a layer, their number stands for the 1."""
    import numpy
    from safetensors.numpy import save_file

    tensors = {}
    for name, shape in contract.modules.items():
        key, count = _key(name, shape), shape.experts or 1
        tensors[f"{key}.lora_A.weight"] = numpy.zeros((count, shape.in_features), numpy.float32)
        tensors[f"{key}.lora_B.weight"] = numpy.zeros((shape.out_features, count), numpy.float32)
    save_file(tensors, folder / WEIGHTS_FILE)
    suffixes = sorted({name.rpartition(".")[2] for name in contract.modules})
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": suffixes, "bias": "none"}
    (folder / CONFIG_FILE).write_text(json.dumps(config))


def _key(name: str, shape: ModuleShape) -> str:
    """PEFT wraps a layer's experts twice, once for each 3-D weight: the inner one, gate and up, is called `base_layer`."""
    if shape.experts is None:
        return f"base_model.model.{name}"
    experts, _, weight = name.rpartition(".")
    return f"base_model.model.{experts}" + (".base_layer" if weight == GATE_UP else "")
