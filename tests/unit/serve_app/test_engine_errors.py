"""vLLM's error answers, as ours."""

from __future__ import annotations

import json

import pytest

from adapters.errors import EngineUnavailable, InternalError, InvalidRequest
from serve_app.engine_vllm import translate_error


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
