"""vLLM's errors, as ours."""

from __future__ import annotations

import json

import pytest

from adapters.errors import AdapterIncompatible, EngineUnavailable, InternalError, InvalidRequest, Overloaded
from adapters.names import AdapterRef
from serve_app.engine.staging import StagingFailed
from serve_app.engine.vllm_engine import translate_error, translate_load_error

REF = AdapterRef("demo", "parrot", 1)


def answer(message: str, param: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, "type": "x", "param": param, "code": 1}}).encode()


def test_a_4xx_keeps_its_text_and_param():
    error = translate_error(400, answer("too long", "input_tokens"))
    assert (type(error), error.message, error.param) == (InvalidRequest, "too long", "input_tokens")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, InvalidRequest), (422, InvalidRequest), (501, InvalidRequest), (503, EngineUnavailable), (500, InternalError)],
)
def test_each_status_has_its_class(status, kind):
    assert type(translate_error(status, answer("text"))) is kind


def test_a_5xx_passes_nothing_on():
    assert "secret" not in str(translate_error(500, answer("secret path")))


def test_a_local_file_is_the_clients_mistake():
    assert isinstance(
        translate_error(500, answer("Cannot load local files without `--allowed-local-media-path`.")), InvalidRequest
    )


@pytest.mark.parametrize("body", [b"", b"nonsense", b"[]", b"{}", b'{"error": 1}'])
def test_a_body_that_is_no_error_is_still_translated(body):
    assert isinstance(translate_error(400, body), InvalidRequest)
    assert isinstance(translate_error(500, body), InternalError)


@pytest.mark.parametrize(
    "error",
    [
        StagingFailed("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 MiB."),
        StagingFailed("MemoryError", ""),
        StagingFailed("AcceleratorError", "CUDA error: out of memory"),
        StagingFailed("RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."),
        StagingFailed("OSError", "[Errno 12] Cannot allocate memory"),
        # its class stays in the engine's process
        Exception("Call to collective_rpc method failed: CUDA out of memory. Tried to allocate 20.00 MiB."),
    ],
)
def test_a_load_without_memory_may_be_tried_again_and_blames_no_adapter(error):
    seen = translate_load_error(REF, error)
    assert (type(seen), seen.reason) == (Overloaded, "out_of_memory")
    assert seen.retry_after_s is not None
    assert "Tried" not in str(seen)


def test_any_other_failed_load_is_the_adapters_fault_and_passes_no_path_on():
    seen = translate_load_error(REF, StagingFailed("ValueError", "/cache/abc/adapter_model.safetensors is no adapter"))
    assert (type(seen), seen.reason) == (AdapterIncompatible, "engine_refused")
    assert "/cache" not in str(seen)
