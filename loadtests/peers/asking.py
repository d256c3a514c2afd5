"""One short answer, so that an adapter is where answers come from."""

from __future__ import annotations

import httpx2

from loadtests.peers.peer import NotPut

TIMEOUT_S = 120.0


def ask_once(url: str, model: str) -> None:
    """Raises NotPut without a good answer."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    try:
        with httpx2.Client(trust_env=False, timeout=TIMEOUT_S) as http:
            answer = http.post(f"{url}/v1/chat/completions", json=body)
    except httpx2.HTTPError as error:
        raise NotPut(model, "engine", f"{type(error).__name__}: {error}") from error
    if answer.is_error:
        raise NotPut(model, "engine", f"{answer.status_code}: {answer.text[:300]}")
