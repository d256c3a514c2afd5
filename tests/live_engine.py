"""A real engine in a process of its own, asked by tests: `python -m tests.live_engine QUESTION BASE ANSWER.json ENGINE FACTS`.

It is started as a replica starts it, with the worker extension, and wrapped in the product's `VllmEngine`; only Ray and HTTP
are missing. The tests' process never imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from adapters.errors import AdapterIncompatible, LoraMuxError
from adapters.names import AdapterRef
from adapters.registry import codec
from adapters.types import CONFIG_FILE, WEIGHTS_FILE, BaseContract, LocalAdapter

ENGINE = {
    "enable_lora": True,
    "max_loras": 2,
    "max_cpu_loras": 3,
    "max_lora_rank": 8,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "enforce_eager": True,
    "dtype": "float32",
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a test's own function goes to the worker
}
PROMPT = [5, 6, 7, 8]


def ask(question: str, base: Path, engine: dict[str, Any] | None = None, **facts: Any) -> Any:
    """Starts an engine on the folder, with further engine arguments, and gives its answer to one of the questions below."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [
            sys.executable,
            "-m",
            "tests.live_engine",
            question,
            str(base),
            str(answer),
            json.dumps(engine or {}),
            json.dumps(facts),
        ]
        done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the engine did not answer:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return json.loads(answer.read_text())


@contextlib.asynccontextmanager
async def started(base: Path, options: dict[str, Any]) -> AsyncIterator[tuple[Any, Any]]:
    """The engine as the product wraps it, and vLLM's client below it."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from serve_app.engine.vllm_engine import WORKER_EXTENSION, VllmEngine

    arguments = AsyncEngineArgs(model=str(base), worker_extension_cls=WORKER_EXTENSION, **(ENGINE | options))
    client = AsyncLLM.from_engine_args(arguments)
    state = SimpleNamespace(openai_serving_models=SimpleNamespace(lora_requests={}), _state={})
    engine = VllmEngine(client, state, None)
    await engine.prepare()
    try:
        yield engine, client
    finally:
        client.shutdown()


async def describe(engine: Any, client: Any) -> dict[str, Any]:
    """The contract that a replica would write, the same modules by the engine's names as its own reader maps the canonical
    keys, and the modules that an adapter with all those keys fills."""
    from vllm.model_executor.model_loader.utils import get_model_architecture

    from serve_app.engine.layers import Names
    from serve_app.engine.warmup import write_zero_adapter

    contract = await engine.contract("toy")
    names = Names(get_model_architecture(client.model_config)[0], None)
    with tempfile.TemporaryDirectory() as folder:
        write_zero_adapter(Path(folder), contract)
        count = await engine.add(AdapterRef("toy", "all", 1), 1_000, LocalAdapter("", Path(folder), 0))
        landed = await client.collective_rpc("loramux_landed", args=(1_000,))
        return {
            "contract": json.loads(codec.encode_contract(contract)),
            "parsed": sorted(names.after(path) for path in contract.modules),
            "landed": sorted(landed[0]),
            "count": count,
        }


async def haunt(engine: Any, client: Any) -> dict[str, Any]:
    """What an activation error leaves behind: an adapter of a rank over the engine's limit, whose config says otherwise."""
    contract = await engine.contract("toy")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        good, bad = folder / "good", folder / "bad"
        write_adapter(good, contract, rank=4, seed=1)
        write_adapter(bad, contract, rank=16, seed=2, says=4)
        await engine.add(AdapterRef("toy", "good", 1), 1_001, LocalAdapter("", good, 0))
        before = await _tokens(client, engine, "toy:good@1")
        base = await _tokens(client, engine, None)
        refused = await _refusal(lambda: engine.add(AdapterRef("toy", "bad", 1), 1_002, LocalAdapter("", bad, 0)))
        ghosts = sorted(await engine.registered() - {1_001})
        await engine.remove(AdapterRef("toy", "bad", 1), 1_002)
        after = {
            "registered": sorted(await engine.registered()),
            "slots": await _slots(client),
            "landed": len((await client.collective_rpc("loramux_landed", args=(1_002,)))[0]),
        }
        await engine.add(AdapterRef("toy", "next", 1), 1_003, LocalAdapter("", good, 0))
        return {
            "refused": refused,
            "ghosts": ghosts,
            "after": after,
            "slots": await _slots(client),
            "good": [before, await _tokens(client, engine, "toy:good@1")],
            "next": await _tokens(client, engine, "toy:next@1"),
            "base": [base, await _tokens(client, engine, None)],
        }


async def staged(engine: Any, client: Any) -> dict[str, Any]:
    """Adapters that were read ahead beside ones that were not: answers, what the engine lists, and what a refusal leaves."""
    contract = await engine.contract("toy")
    with tempfile.TemporaryDirectory() as name:
        good, bad = Path(name) / "good", Path(name) / "bad"
        write_adapter(good, contract, rank=4, seed=1)
        write_adapter(bad, contract, rank=16, seed=2)
        files = LocalAdapter("", good, 0)
        plain, ahead, left = (AdapterRef("toy", what, 1) for what in ("plain", "ahead", "left"))
        await engine.add(plain, 1_001, files)
        await engine.stage(ahead, 1_002, files)
        before = sorted(await engine.registered())
        shutil.move(good, Path(name) / "gone")  # what was read ahead needs its files no more
        landed = await engine.add(ahead, 1_002, files)
        shutil.move(Path(name) / "gone", good)
        await engine.stage(left, 1_003, files)
        await engine.remove(left, 1_003)
        return {
            "landed": [landed, len(contract.modules)],
            "registered": [before, sorted(await engine.registered())],
            "answers": [await _tokens(client, engine, str(plain)), await _tokens(client, engine, str(ahead))],
            "refused": await _refusal(lambda: engine.stage(AdapterRef("toy", "bad", 1), 1_004, LocalAdapter("", bad, 0))),
            "missing": await _refusal(lambda: engine.stage(left, 1_005, LocalAdapter("", Path(name) / "none", 0))),
            "left": (await client.collective_rpc("loramux_staged"))[0],
        }


async def misfit(engine: Any, client: Any) -> dict[str, Any]:
    """An adapter of a smaller sibling, whose factors fit into the corners of the engine's: read ahead, and added at once."""
    contract = await engine.contract("toy")
    halves = {
        name: replace(shape, in_features=shape.in_features // 2, out_features=shape.out_features // 2)
        for name, shape in contract.modules.items()
    }
    with tempfile.TemporaryDirectory() as name:
        write_adapter(Path(name) / "small", replace(contract, modules=halves), rank=4, seed=1)
        ref, files = AdapterRef("toy", "small", 1), LocalAdapter("", Path(name) / "small", 0)
        errors = [await _text(lambda: engine.stage(ref, 1_001, files)), await _text(lambda: engine.add(ref, 1_002, files))]
        await engine.remove(ref, 1_002)
        return {"errors": errors, "registered": sorted(await engine.registered())}


async def seeded(engine: Any, client: Any) -> list[list[int]]:
    """The answers to a seeded request, asked twice, whose prompt takes several steps to read."""
    from vllm import SamplingParams

    found = []
    for name in ("one", "two"):
        sampling = SamplingParams(temperature=1.0, seed=7, max_tokens=8, ignore_eos=True)
        answers = [answer async for answer in client.generate({"prompt_token_ids": PROMPT * 12}, sampling, name)]
        found.append(list(answers[-1].outputs[0].token_ids))
    return found


async def starved(engine: Any, client: Any) -> dict[str, Any]:
    """Loads for which the worker has no memory, when it reads ahead and when it fills a place; then the same with memory."""
    contract = await engine.contract("toy")
    with tempfile.TemporaryDirectory() as name:
        write_adapter(Path(name) / "good", contract, rank=4, seed=1)
        files = LocalAdapter("", Path(name) / "good", 0)
        plain, poor = AdapterRef("toy", "plain", 1), AdapterRef("toy", "poor", 1)
        await engine.add(plain, 1_001, files)
        await client.collective_rpc(_starve, args=("stage",))
        errors = [await _error(lambda: engine.stage(poor, 1_002, files))]
        await engine.remove(poor, 1_002)
        await client.collective_rpc(_starve, args=("add",))
        await engine.stage(poor, 1_003, files)
        errors.append(await _error(lambda: engine.add(poor, 1_003, files)))
        await engine.remove(poor, 1_003)
        left = [sorted(await engine.registered()), await _slots(client), (await client.collective_rpc("loramux_staged"))[0]]
        await client.collective_rpc(_starve, args=("",))
        await engine.stage(poor, 1_004, files)
        await engine.add(poor, 1_004, files)
        return {
            "errors": errors,
            "left": left,
            "answers": [await _tokens(client, engine, str(plain)), await _tokens(client, engine, str(poor))],
        }


def _starve(worker: Any, where: str) -> None:
    """From now on no memory is left for that part of a load; for "" there is again."""
    import torch

    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    staging, manager = worker._loramux_staging, worker.model_runner.lora_manager._adapter_manager
    vars(manager).pop("activate_adapter", None)
    staging._load = getattr(staging, "_load_before", staging._load)
    staging._load_before = staging._load
    if where == "stage":
        staging._load = fail
    elif where == "add":
        manager.activate_adapter = fail


async def experts(engine: Any, client: Any, adapters: dict[str, str]) -> dict[str, Any]:
    """What the engine would add to the first layer's experts, [expert, out, in], and how much landed, by adapter.

    Read from its buffers: on a CPU vLLM has no kernels to run experts with.
    """
    found = {}
    for int_id, (name, folder) in enumerate(adapters.items(), start=1_000):
        ref = AdapterRef("toy", name, 1)
        landed = await engine.add(ref, int_id, LocalAdapter("", Path(folder), 0))
        deltas = (await client.collective_rpc(_expert_deltas, args=(int_id,)))[0]
        found[name] = {"deltas": deltas, "landed": landed}
        await engine.remove(ref, int_id)
    return found


def _expert_deltas(worker: Any, int_id: int) -> dict[str, Any]:
    import torch

    manager = worker.model_runner.lora_manager._adapter_manager
    layer, place = manager.modules["model.layers.0.mlp.experts"], manager.lora_index_to_id.index(int_id)
    halves = [b[place] @ a[place] for a, b in zip(layer.w13_lora_a_stacked, layer.w13_lora_b_stacked, strict=True)]
    down = layer.w2_lora_b_stacked[0][place] @ layer.w2_lora_a_stacked[0][place]
    return {"gate_up_proj": torch.cat(halves, dim=1).tolist(), "down_proj": down.tolist()}


def write_adapter(folder: Path, contract: BaseContract, *, rank: int, seed: int, says: int | None = None) -> None:
    """An adapter with large random weights on all modules; its config names the rank `says`."""
    import numpy
    from safetensors.numpy import save_file

    random = numpy.random.default_rng(seed)
    tensors = {}
    for name, shape in contract.modules.items():
        key = f"base_model.model.{name}"
        tensors[f"{key}.lora_A.weight"] = random.normal(size=(rank, shape.in_features)).astype(numpy.float32)
        tensors[f"{key}.lora_B.weight"] = random.normal(size=(shape.out_features, rank)).astype(numpy.float32)
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS_FILE)
    suffixes = sorted({name.rpartition(".")[2] for name in contract.modules})
    config = {"peft_type": "LORA", "r": says or rank, "lora_alpha": rank, "target_modules": suffixes, "bias": "none"}
    (folder / CONFIG_FILE).write_text(json.dumps(config))


async def _refusal(work: Callable[[], Awaitable[None]]) -> str | None:
    try:
        await work()
    except AdapterIncompatible as error:
        return error.reason
    return None


async def _text(work: Callable[[], Awaitable[Any]]) -> str | None:
    try:
        await work()
    except AdapterIncompatible as error:
        return str(error)
    return None


async def _error(work: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Code and reason of the error, and whether it may be tried again."""
    try:
        await work()
    except LoraMuxError as error:
        return [error.code, error.reason, error.retry_after_s is not None]
    return []


async def _slots(client: Any) -> list[int | None]:
    """The ids in the engine's GPU places, by its own table."""
    return (await client.collective_rpc("loramux_places"))[0]


async def _tokens(client: Any, engine: Any, ref: str | None) -> list[int]:
    from vllm import SamplingParams

    request = engine._models.lora_requests[ref] if ref else None
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    answers = client.generate({"prompt_token_ids": PROMPT}, sampling, f"{ref}-{os.urandom(4).hex()}", lora_request=request)
    last = [answer async for answer in answers][-1]
    return list(last.outputs[0].token_ids)


QUESTIONS = {
    "describe": describe,
    "haunt": haunt,
    "staged": staged,
    "starved": starved,
    "experts": experts,
    "misfit": misfit,
    "seeded": seeded,
}


async def main(question: str, base: Path, options: dict[str, Any], facts: dict[str, Any] | None = None) -> Any:
    async with started(base, options) as (engine, client):
        return await QUESTIONS[question](engine, client, **(facts or {}))


if __name__ == "__main__":
    found = asyncio.run(main(sys.argv[1], Path(sys.argv[2]), *map(json.loads, sys.argv[4:])))
    Path(sys.argv[3]).write_text(json.dumps(found))
