"""The engine as a replica sees it: vLLM's OpenAI layer and its LoRA calls (0.29).

What is known of vLLM's insides lies in this package alone: `worker` and `staging` run in its workers, `layers` reads its layers.
`tests/integration/test_contracts_engine.py` says what is relied on. The engine client, the app state and the arguments come from
`serve_app.replica`, the one file that knows Ray LLM's insides.
"""

from __future__ import annotations

import asyncio
import logging
import re
import tempfile
import types
from pathlib import Path
from typing import Any

import msgspec

from adapters.errors import AdapterIncompatible, EngineUnavailable, InternalError, InvalidRequest, LoraMuxError, Overloaded
from adapters.names import AdapterRef
from adapters.types import BaseContract, LocalAdapter
from serve_app.engine.layers import Modules, describe_base
from serve_app.engine.staging import ANOTHER_BASE, StageRequest, StagingFailed, lora_request, stage

WORKER_EXTENSION = "serve_app.engine.worker.WorkerExtension"
# Of a worker's error only the text comes back: what torch says of the device, of pinned and of plain memory, and the system.
_NO_MEMORY = re.compile("out of memory|(can't|cannot|unable to) allocate", re.IGNORECASE)
NO_MEMORY_RETRY_S = 5.0

logger = logging.getLogger(__name__)


class VllmEngine:
    """A started engine: answers OpenAI requests in process, and takes and forgets adapters."""

    def __init__(self, client: Any, app_state: Any, args: Any) -> None:
        self._client = client
        self._models = app_state.openai_serving_models
        self._doors: list[str] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # goes with this process
        self._adding = asyncio.Lock()
        self.app = _build_app(app_state, args)
        if getattr(app_state, "serving_embedding", None) is not None:
            _answer_with_ref(app_state.serving_embedding, self._models)

    @property
    def max_model_len(self) -> int:
        return self._client.model_config.max_model_len

    @property
    def max_requests(self) -> int:
        """Requests that run at once."""
        return self._client.vllm_config.scheduler_config.max_num_seqs

    @property
    def step_tokens(self) -> int:
        """Tokens that one step takes."""
        return self._client.vllm_config.scheduler_config.max_num_batched_tokens

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

    async def stage(self, ref: AdapterRef, int_id: int, files: LocalAdapter) -> None:
        """Reads the adapter ahead, beside the engine's loop, so that `add` has little left to do; several at once are fine.

        Raises AdapterIncompatible when the engine refuses it, Overloaded when its memory is out, EngineUnavailable when it is
        dead. `remove` forgets it again.
        """
        if not self._doors:
            return
        try:
            await stage(self._doors, StageRequest(str(ref), int_id, str(files.path)))
        except StagingFailed as error:
            raise self._load_error(ref, error) from error
        except OSError as error:
            raise EngineUnavailable("the engine does not answer") from error

    async def add(self, ref: AdapterRef, int_id: int, files: LocalAdapter) -> int:
        """Loads the adapter; how many modules of the base it fills, each counted as Hugging Face names it.

        One at a time: the engine takes all that waits before its next step, and every running stream would wait for all of it.
        Raises what `stage` raises.
        """
        request = StageRequest(str(ref), int_id, str(files.path))
        async with self._adding:
            try:
                workers = await self._client.collective_rpc("loramux_add", args=(request.name, int_id, request.path))
            except Exception as error:
                raise self._load_error(ref, error) from error
        self._models.lora_requests[str(ref)] = lora_request(request)
        return len(set().union(*workers))  # a worker holds some of the layers, or some of the experts

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
        """Mends the engine's workers and opens their doors; call it once, before the first request."""
        if self.lora is None:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="loramux-doors-")
        doors = await self._client.collective_rpc("loramux_prepare", args=(self._folder.name,))
        if _are_here(doors):
            self._doors = doors
        else:
            logger.warning("a worker of this engine is on another host: adapters are read inside its loop")

    async def contract(self, base: str) -> BaseContract:
        """What this base takes, read from the engine's own layers."""
        modules: Modules = {}
        if self.lora is not None:
            for found in await self._client.collective_rpc("loramux_lora_modules"):
                modules |= found
        return describe_base(base, self._client.model_config, self.lora.max_lora_rank if self.lora else 0, modules)

    def _load_error(self, ref: AdapterRef, error: Exception) -> LoraMuxError:
        return EngineUnavailable("the engine died") if self.is_dead else translate_load_error(ref, error)


def _are_here(doors: list[str]) -> bool:
    """Whether all workers run on this host."""
    return all(Path(door).is_socket() for door in doors)


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


def translate_load_error(ref: AdapterRef, error: Exception) -> LoraMuxError:
    """What an engine that lives says of a load that failed: Overloaded (`out_of_memory`), which may be tried again, since that is
    not the adapter's fault; AdapterIncompatible (`engine_refused`) for all else. The engine's text may name paths: it stays in
    the log."""
    if _is_out_of_memory(error):
        text = f"the engine has no memory left to load `{ref}` now"
        return Overloaded(text, reason="out_of_memory", retry_after_s=NO_MEMORY_RETRY_S)
    return AdapterIncompatible(f"the engine refused `{ref}`: {_class_of(error)}", reason="engine_refused")


def _is_out_of_memory(error: Exception) -> bool:
    kind = error.kind if isinstance(error, StagingFailed) else type(error).__name__
    return kind.endswith("MemoryError") or _NO_MEMORY.search(str(error)) is not None


def _class_of(error: Exception) -> str:
    """The error's class, or its text where that names no paths and helps more."""
    text = str(error).splitlines()[0] if str(error) else ""
    if "max_lora_rank" in text:
        return text[:200]
    if ANOTHER_BASE in text:
        return text[text.index(ANOTHER_BASE) :][:300]
    return error.kind if isinstance(error, StagingFailed) else type(error).__name__


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
