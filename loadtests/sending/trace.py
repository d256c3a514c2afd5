"""A plan in aiperf's words: a fixed schedule, one line a request, each with its whole body."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from loadtests.workload import Planned

# aiperf wants a tokenizer and, where bodies are given whole, asks it nothing: tokens are counted by the server.
TOKENIZER = {
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
    "tokenizer.json": {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"},
    },
}


def lines(planned: Sequence[Planned], models: Mapping[int, str] | Sequence[str]) -> str:
    """The session id carries the request's number through aiperf into its exports."""
    return "".join(json.dumps(_line(request, models[request.number])) + "\n" for request in planned)


def _line(request: Planned, model: str) -> dict[str, Any]:
    return {"session_id": str(request.number), "timestamp": request.at_s * 1e3, "payload": body(request, model)}


def body(request: Planned, model: str) -> dict[str, Any]:
    """A streamed chat request; images stand before the prompt."""
    content: str | list[dict[str, Any]] = request.prompt
    if request.images:
        pictures = [{"type": "image_url", "image_url": {"url": url}} for url in request.images]
        content = [*pictures, {"type": "text", "text": request.prompt}]
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if request.whole_length else {}),
    }
