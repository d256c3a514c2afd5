"""Asks a running gateway over HTTP, as any client would: is there a real answer, what is in the engines."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

from adapters.errors import EngineUnavailable
from gateway.settings import GatewaySettings

READY_TIMEOUT_S = 300
RETRY_AFTER_S = 0.5
ANSWER_TIMEOUT_S = 30

# A base serves some of these; which ones, its engine knows.
QUESTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 24, "temperature": 0}),
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 8, "temperature": 0}),
    ("/v1/embeddings", {"input": "Hello"}),
)


def url(settings: GatewaySettings) -> str:
    host = "127.0.0.1" if settings.host == "0.0.0.0" else settings.host
    return f"http://{host}:{settings.port}"


def first_answer(settings: GatewaySettings, base: str) -> str:
    """What the base says, once it says something: `/v1/models` answers long before an engine does.

    Raises EngineUnavailable after READY_TIMEOUT_S, with the last problem.
    """
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            return _ask(settings, base)
        except (urllib.error.URLError, OSError, KeyError, ValueError) as error:
            if time.monotonic() > deadline_s:
                raise EngineUnavailable(f"`{base}` gave no answer within {READY_TIMEOUT_S} s: {error}") from error
        time.sleep(RETRY_AFTER_S)


def residency(settings: GatewaySettings) -> dict[str, dict[str, Any]] | None:
    """What is in the engines, by base; None while the gateway doesn't answer."""
    try:
        with urllib.request.urlopen(f"{url(settings)}/registry/v1/residency", timeout=5) as response:
            return json.load(response)
    except (urllib.error.URLError, OSError, ValueError):
        return None


def _ask(settings: GatewaySettings, base: str) -> str:
    for route, fields in QUESTIONS:
        try:
            return _spoken(_post(f"{url(settings)}{route}", {"model": base, **fields}))
        except urllib.error.HTTPError as error:
            if error.code != 400:  # not a route of this base
                raise
    raise ValueError("it serves no route that we know")


def _post(address: str, fields: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(address, json.dumps(fields).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
        return json.load(response)


def _spoken(answer: dict[str, Any]) -> str:
    if "data" in answer:
        return f"an embedding of {len(answer['data'][0]['embedding'])} numbers"
    choice = answer["choices"][0]
    return (choice["message"]["content"] if "message" in choice else choice["text"]).strip()
