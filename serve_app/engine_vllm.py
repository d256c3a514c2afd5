"""The one file that knows vLLM's insides (0.29): its OpenAI layer, its LoRA calls and its layers' names and shapes.

`tests/integration/test_engine_vllm.py` says what is relied on. The engine client, the app state and the arguments come from
`serve_app.replica`, the one file that knows Ray LLM's insides.
"""

from __future__ import annotations

import hashlib
import json
import types
from pathlib import Path
from typing import Any

import msgspec

from adapters.errors import AdapterIncompatible, EngineUnavailable, InternalError, InvalidRequest, LoraMuxError
from adapters.names import AdapterRef
from adapters.types import BaseContract, LocalAdapter, ModuleShape

WORKER_EXTENSION = "serve_app.engine_vllm.WorkerExtension"
TEXT_TOWER = "language_model"


class VllmEngine:
    """A started engine: answers OpenAI requests in process, and takes and forgets adapters."""

    def __init__(self, client: Any, app_state: Any, args: Any) -> None:
        self._client = client
        self._models = app_state.openai_serving_models
        self.app = _build_app(app_state, args)
        if getattr(app_state, "serving_embedding", None) is not None:
            _answer_with_ref(app_state.serving_embedding, self._models)

    @property
    def max_model_len(self) -> int:
        return self._client.model_config.max_model_len

    @property
    def is_pooling(self) -> bool:
        return self._client.model_config.runner_type == "pooling"

    @property
    def is_dead(self) -> bool:
        return bool(self._client.errored)

    @property
    def lora(self) -> Any | None:
        """vLLM's LoRAConfig, None when the base takes no adapters."""
        return self._client.vllm_config.lora_config

    async def add(self, ref: AdapterRef, int_id: int, files: LocalAdapter) -> None:
        """Loads the adapter. Raises AdapterIncompatible when the engine refuses it, EngineUnavailable when it is dead."""
        from vllm.lora.request import LoRARequest

        request = LoRARequest(lora_name=str(ref), lora_int_id=int_id, lora_path=str(files.path))
        try:
            await self._client.add_lora(request)
        except Exception as error:
            raise self._load_error(ref, error) from error
        self._models.lora_requests[str(ref)] = request

    async def remove(self, ref: AdapterRef, int_id: int) -> None:
        """Forgets the adapter, in the OpenAI layer and in the engine; an unknown id is fine."""
        known = self._models.lora_requests.get(str(ref))
        if known is not None and known.lora_int_id == int_id:
            del self._models.lora_requests[str(ref)]
        try:
            await self._client.remove_lora(int_id)
        except Exception as error:
            raise EngineUnavailable("the engine does not answer") from error

    async def registered(self) -> set[int]:
        """The integer ids that the engine itself lists."""
        return set(await self._client.list_loras())

    async def prepare(self) -> None:
        """Mends the engine's workers; call it once, before the first request."""
        if self.lora is not None:
            await self._client.collective_rpc("loramux_prepare")

    async def contract(self, base: str) -> BaseContract:
        """What this base takes, read from the engine's own layers."""
        modules: dict[str, ModuleShape] = {}
        if self.lora is not None:
            found = (await self._client.collective_rpc("loramux_lora_modules"))[0]
            modules = {name: ModuleShape(*shape) for name, shape in sorted(found.items())}
        config = self._client.model_config
        return BaseContract(
            base=base,
            fingerprint=_fingerprint(config.model),
            modules=modules,
            max_rank=self.lora.max_lora_rank if self.lora else 0,
            tower=_tower(modules),
            serves_vision=bool(self.lora and self.lora.enable_tower_connector_lora),
            architecture=config.architecture,
        )

    def _load_error(self, ref: AdapterRef, error: Exception) -> Exception:
        if self.is_dead:
            return EngineUnavailable("the engine died")
        # The engine's text may name paths; its class is all that a client can use, the log has the rest.
        return AdapterIncompatible(f"the engine refused `{ref}`: {_class_of(error)}", reason="engine_refused")


class WorkerExtension:
    """Mixed into the engine's worker, where the model lives."""

    def loramux_prepare(self) -> None:
        """Mends what would answer wrongly, before the first request."""
        _spare_the_base_on_cpu()

    def loramux_lora_modules(self) -> dict[str, tuple[int, int]]:
        """Each linear module that takes LoRA, by its Hugging Face path: (in_features, out_features)."""
        manager = self.model_runner.lora_manager._adapter_manager
        original = _names_before(getattr(manager.model, "hf_to_vllm_mapper", None))
        shapes: dict[str, tuple[int, int]] = {}
        for name, layer in manager.modules.items():
            linear = layer.base_layer
            if not hasattr(linear, "input_size"):
                continue  # embeddings and the head: adapters on them are refused
            names = manager.packed_modules.get(name, [name])
            for part, out_features in zip(names, _out_features(linear, len(names)), strict=True):
                shapes[original(part)] = (linear.input_size, out_features)
        return shapes


def _spare_the_base_on_cpu() -> None:
    """The CPU kernels take "no adapter", index -1, for the last place: whoever sits there would answer for the base, as soon as
    two requests share a step. A is applied first and B to its result, so zeros after A are enough."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink
    if getattr(shrink, "spares_the_base", False):
        return

    def bgmv_shrink(inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, indices, scaling)
        output[indices < 0] = 0

    bgmv_shrink.spares_the_base = True  # type: ignore[attr-defined]
    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = bgmv_shrink


def _out_features(linear: Any, parts: int) -> list[int]:
    if parts == 1:
        return [linear.output_size]
    if hasattr(linear, "total_num_kv_heads"):
        q = linear.total_num_heads * linear.head_size
        kv = linear.total_num_kv_heads * linear.head_size
        return [q, kv, linear.total_num_kv_heads * getattr(linear, "v_head_size", linear.head_size)]
    return list(linear.output_sizes)


def _names_before(mapper: Any) -> Any:
    """The inverse of the model's renaming of prefixes."""
    if mapper is None:
        return lambda name: name
    forward = mapper.get_rename_mapper()
    pairs = [(old, new) for old, new in forward.orig_to_new_prefix.items() if new]

    def original(name: str) -> str:
        candidates = (old + name[len(new) :] for old, new in pairs if name.startswith(new))
        return next((old for old in candidates if forward._map_name(old + ".weight") == name + ".weight"), name)

    return original


def _tower(modules: dict[str, ModuleShape]) -> str | None:
    """The prefix of the text layers in a vision-language base, None in a text base."""
    for name in modules:
        before, found, _ = name.partition(f"{TEXT_TOWER}.")
        if found:
            return before + TEXT_TOWER
    return None


def _fingerprint(model: str) -> str:
    """Tells bases apart: SHA-256 over the config and a sample of the weights; over the id alone when it is no local folder."""
    digest = hashlib.sha256()
    folder = Path(model)
    if not (folder / "config.json").is_file():
        return hashlib.sha256(model.encode()).hexdigest()
    config = json.loads((folder / "config.json").read_text())
    volatile = ("transformers_version", "_name_or_path")
    digest.update(json.dumps({k: v for k, v in config.items() if k not in volatile}, sort_keys=True).encode())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}".encode() + _sample(file))
    return digest.hexdigest()


def _sample(file: Path, sample_bytes: int = 2**20) -> bytes:
    with file.open("rb") as stream:
        start = stream.read(sample_bytes)
        stream.seek(max(0, file.stat().st_size - sample_bytes))
        return start + stream.read(sample_bytes)


def translate_error(status: int, body: bytes) -> LoraMuxError:
    """vLLM's own error as ours. Its 4xx texts are meant for clients; of its 5xx nothing is passed on."""
    try:
        error = msgspec.json.decode(body)["error"]
        message, param = str(error["message"])[:500], error.get("param")
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        message, param = "the engine refused the request", None
    if status == 501:
        return InvalidRequest(f"this base does not serve that route: {message}", param="model")
    if status == 503:
        return EngineUnavailable("the engine takes no more requests now")
    if "--allowed-local-media-path" in message:  # a client's mistake that vLLM answers with a 500
        return InvalidRequest("media from files are not taken; send a data URI", param="messages")
    if 400 <= status < 500:
        return InvalidRequest(message, param=param)
    return InternalError("the engine failed on this request")


def _class_of(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else ""
    if "max_lora_rank" in text:
        return text[:200]
    return type(error).__name__


def _build_app(app_state: Any, args: Any) -> Any:
    """vLLM's OpenAI routes and error handlers, without the middleware and the other routes of its own server."""
    from fastapi import FastAPI
    from vllm.entrypoints.openai.chat_completion.api_router import attach_router as attach_chat
    from vllm.entrypoints.openai.completion.api_router import attach_router as attach_completion
    from vllm.entrypoints.pooling.embed.api_router import router as embed_router
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    attach_chat(app)
    attach_completion(app)
    app.include_router(embed_router)
    init_exception_handler(app)
    app.state._state.update(app_state._state)
    for absent in ("openai_serving_chat", "openai_serving_completion"):  # a pooling base has none, and its routes say so
        if not hasattr(app.state, absent):
            setattr(app.state, absent, None)
    app.state.args = args
    # The error handler of a dead engine flips a flag of a server that isn't here; Serve's health check restarts the replica.
    app.state.server = types.SimpleNamespace()
    return app


def _answer_with_ref(embedding: Any, models: Any) -> None:
    """vLLM answers embeddings with the base's name, whoever spoke; every other route answers with the adapter's."""
    init_ctx = embedding._init_ctx

    async def init_ctx_with_ref(*args: Any, **kwargs: Any) -> Any:
        ctx = await init_ctx(*args, **kwargs)
        ctx.model_name = models.model_name(ctx.lora_request)
        return ctx

    embedding._init_ctx = init_ctx_with_ref
