"""Embeddings from a pooling base, with and without an adapter."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest


@pytest.fixture(scope="module")
def embedder(stack, publish, artifacts: Path, pooling_base: Path) -> str:
    publish("tuned", artifacts / "pooling" / "adapter", base="embed")
    stack.wait_until(lambda: any(model["id"] == "embed:tuned" for model in stack.get("/v1/models")["data"]))
    return "embed:tuned"


def test_base_and_adapter_embed_differently_and_say_who_they_are(client, embedder):
    base = client.embeddings.create(model="embed", input="Hello there")
    tuned = client.embeddings.create(model=embedder, input="Hello there")
    assert (base.model, tuned.model) == ("embed", "embed:tuned@1")
    assert len(base.data[0].embedding) == len(tuned.data[0].embedding)
    assert base.data[0].embedding != tuned.data[0].embedding


def test_several_inputs_come_back_in_order(client, embedder):
    together = client.embeddings.create(model=embedder, input=["one", "two"])
    alone = client.embeddings.create(model=embedder, input="two")
    assert [row.index for row in together.data] == [0, 1]
    assert together.data[1].embedding == pytest.approx(alone.data[0].embedding, abs=1e-4)


def test_a_route_that_the_base_does_not_serve_is_a_400(client):
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="embed", messages=[{"role": "user", "content": "Hello"}])
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="demo", input="Hello")
