"""Warms an engine before its replica is ready: the first request of a path compiles for seconds."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from adapters.errors import EngineUnavailable
from adapters.names import AdapterRef
from adapters.types import CONFIG_FILE, WEIGHTS_FILE, BaseContract, LocalAdapter
from serve_app import asgi_call
from serve_app.engine_vllm import VllmEngine

WARM_INT_ID = 999
WARM_PROMPT = "Hello"


async def warm(engine: VllmEngine, contract: BaseContract) -> None:
    """One request to the base and one to a zero adapter. Raises EngineUnavailable when either is not answered."""
    await _ask(engine, contract.base)
    if contract.modules:
        await _warm_lora(engine, contract)


async def _warm_lora(engine: VllmEngine, contract: BaseContract) -> None:
    ref = AdapterRef(contract.base, "warm-up", 1)
    with tempfile.TemporaryDirectory(prefix="loramux-warm-") as folder:
        write_zero_adapter(Path(folder), contract)
        await engine.add(ref, WARM_INT_ID, LocalAdapter("", Path(folder), 0))
        try:
            await _ask(engine, str(ref))
        finally:
            await engine.remove(ref, WARM_INT_ID)


async def _ask(engine: VllmEngine, model: str) -> None:
    route, fields = ("/v1/embeddings", {"input": WARM_PROMPT}) if engine.is_pooling else (
        "/v1/completions", {"prompt": WARM_PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    )
    answer = await asgi_call.call(engine.app, route, json.dumps({"model": model, **fields}).encode(), {})
    body = b"".join([chunk async for chunk in answer.chunks()])
    await answer.aclose()
    if answer.status != 200:
        raise EngineUnavailable(f"the warm-up request was answered with {answer.status}: {body[:300].decode(errors='replace')}")


def write_zero_adapter(folder: Path, contract: BaseContract) -> None:
    """An adapter of rank 1 on every module of the base that changes nothing. A: [1, in_features], B: [out_features, 1]."""
    import numpy
    from safetensors.numpy import save_file

    tensors = {}
    for name, shape in contract.modules.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = numpy.zeros((1, shape.in_features), numpy.float32)
        tensors[f"base_model.model.{name}.lora_B.weight"] = numpy.zeros((shape.out_features, 1), numpy.float32)
    save_file(tensors, folder / WEIGHTS_FILE)
    suffixes = sorted({name.rpartition(".")[2] for name in contract.modules})
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": suffixes, "bias": "none"}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
