"""Asking a gateway whether a version is there, and whether it answers other than its base."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from adapters.cli.gateway import Gateway
from adapters.errors import (
    AdapterLoading,
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
    LoraMuxError,
    ModelNotFound,
    Overloaded,
    StoreError,
)

PROMPTS = ("Hello", "The capital of France is", "Once upon a time", "Question: what is 2 + 3?\nAnswer:")
GREEDY_TOKENS = 24
PAUSE_S = 0.25
LEAST_NOISE = 1e-5  # nats; what two runs of one model may differ by without a reason

# A base serves some of these; which ones, its engine knows.
SHORTEST: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 1, "temperature": 0}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0}),
    ("/v1/embeddings", {"input": "Hello"}),
)
PASSING = (AdapterLoading, Overloaded, StoreError, ModelNotFound)


@dataclass(frozen=True, slots=True)
class PromptProbe:
    """One prompt: how much the log probabilities of the base's own answer moved (nats), and what each says greedily."""

    prompt: str
    max_delta: float
    mean_delta: float
    base_says: str | None = None
    says: str | None = None

    @property
    def greedy_differs(self) -> bool:
        return self.base_says != self.says


@dataclass(frozen=True, slots=True)
class Probe:
    """A version against its base. `unit` is `logprob`, or `embedding` for a base that embeds; `noise` is the base against
    itself; below twice that nothing is believed."""

    ref: str
    base: str
    unit: str
    noise: float
    prompts: tuple[PromptProbe, ...]

    @property
    def max_delta(self) -> float:
        return max(prompt.max_delta for prompt in self.prompts)

    @property
    def mean_delta(self) -> float:
        return statistics.fmean(prompt.mean_delta for prompt in self.prompts)

    @property
    def differs(self) -> bool:
        return self.max_delta > 2 * max(self.noise, LEAST_NOISE) or any(prompt.greedy_differs for prompt in self.prompts)

    def as_data(self) -> dict[str, Any]:
        prompts = [asdict(prompt) | {"greedy_differs": prompt.greedy_differs} for prompt in self.prompts]
        return {
            "ref": self.ref,
            "base": self.base,
            "differs": self.differs,
            "unit": self.unit,
            "max_delta": self.max_delta,
            "mean_delta": self.mean_delta,
            "noise": self.noise,
            "greedy_differs": sum(prompt.greedy_differs for prompt in self.prompts),
            "prompts": prompts,
            "error": None,
        }


def wait_ready(gateway: Gateway, ref: str, timeout_s: float) -> None:
    """Returns when the gateway has answered from `ref`. A gateway that doesn't know it yet is made to look.

    Raises what the gateway says, and DeadlineExceeded with the last trouble.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(EngineUnavailable, ModelNotFound):
            gateway.post("/registry/v1/refresh", {})
        try:
            return _shortest(gateway, ref)
        except EngineUnavailable as error:
            if error.reason == "gateway_unreachable":
                raise
            trouble: LoraMuxError = error
        except PASSING as error:
            _check_served(gateway, ref, error)
            trouble = error
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(
                f"`{ref}` was not ready in time: {trouble.message}", limit=f"{timeout_s:g} s", reason=trouble.code
            )
        time.sleep(PAUSE_S)


def probe(gateway: Gateway, ref: str) -> Probe:
    """Raises what the gateway says."""
    base = ref.partition(":")[0]
    try:
        return _by_logprobs(gateway, ref, base)
    except (InvalidRequest, ModelNotFound):
        return _by_embeddings(gateway, ref, base)


def lines(data: dict[str, Any]) -> list[str]:
    """A probe for people; no difference is said as such."""
    if data["error"]:
        return [f"probe: failed: {data['error']['message']}"]
    unit = {"logprob": "log probabilities of the base's answers moved", "embedding": "embeddings moved"}[data["unit"]]
    moved = (
        f"{unit} by {data['max_delta']:.3g} at most, {data['mean_delta']:.3g} on average (the base itself: {data['noise']:.2g})"
    )
    greedy = f"{data['greedy_differs']} of {len(data['prompts'])} greedy answers differ"
    if not data["differs"]:
        return [
            f"probe: NO DIFFERENCE to {data['base']}: {moved}",
            "       check what was trained, and that the adapter was saved",
        ]
    return [f"probe: differs from {data['base']}: {moved}" + (f"; {greedy}" if data["unit"] == "logprob" else "")]


def _by_logprobs(gateway: Gateway, ref: str, base: str) -> Probe:
    found, noises = [], []
    for prompt in PROMPTS:
        base_says = _greedy(gateway, base, prompt)
        text = prompt + base_says
        of_base = _logprobs(gateway, base, text)
        noises.append(max(_deltas(of_base, _logprobs(gateway, base, text))))
        deltas = _deltas(of_base, _logprobs(gateway, ref, text))
        found.append(PromptProbe(prompt, max(deltas), statistics.fmean(deltas), base_says, _greedy(gateway, ref, prompt)))
    return Probe(ref, base, "logprob", max(noises), tuple(found))


def _by_embeddings(gateway: Gateway, ref: str, base: str) -> Probe:
    def embedded(model: str, prompt: str) -> list[float]:
        return gateway.post("/v1/embeddings", {"model": model, "input": prompt})["data"][0]["embedding"]

    found, noises = [], []
    for prompt in PROMPTS:
        of_base = embedded(base, prompt)
        noises.append(max(_deltas(of_base, embedded(base, prompt))))
        deltas = _deltas(of_base, embedded(ref, prompt))
        found.append(PromptProbe(prompt, max(deltas), statistics.fmean(deltas)))
    return Probe(ref, base, "embedding", max(noises), tuple(found))


def _greedy(gateway: Gateway, model: str, prompt: str) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": GREEDY_TOKENS, "temperature": 0}
    return gateway.post("/v1/completions", body)["choices"][0]["text"]


def _logprobs(gateway: Gateway, model: str, text: str) -> list[float]:
    """Of the text's own tokens, the first left out since nothing stands before it; and of the one that is made after them."""
    body = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    values = gateway.post("/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"]
    return [value for value in values[:-1] if value is not None]


def _deltas(old: list[float], new: list[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(old, new, strict=False)] or [0.0]


def _check_served(gateway: Gateway, ref: str, error: LoraMuxError) -> None:
    """A version that isn't there yet is worth waiting for; one of a base that isn't served never comes. Raises ModelNotFound."""
    base = ref.partition(":")[0]
    if isinstance(error, ModelNotFound) and base not in gateway.models():
        raise ModelNotFound(f"`{base}` is not served by this gateway", reason="base_not_served") from None


def _shortest(gateway: Gateway, ref: str) -> None:
    asked: list[Callable[[], Any]] = [
        lambda route=route, fields=fields: gateway.post(route, {"model": ref, **fields}) for route, fields in SHORTEST
    ]
    refused: LoraMuxError | None = None
    for ask in asked:
        try:
            ask()
        except InvalidRequest as error:  # not a route of this base
            refused = error
        else:
            return
    assert refused is not None
    raise refused
