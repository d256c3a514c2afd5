"""The OpenAI API on the running product, through the official client."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from PIL import Image

HELLO = [{"role": "user", "content": "Hello"}]
# `vllm bench serve` without vLLM's own command, which asks for the version of a package that the CPU build is not called.
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.fixture(scope="module")
def spoken(published) -> tuple[str, str]:
    name = sorted(published)[0]
    return f"demo:{name}", published[name]


def chat(client: openai.OpenAI, model: str = "demo", **options):
    options = {"messages": HELLO, "temperature": 0, "max_tokens": 48} | options
    return client.chat.completions.create(model=model, **options)


def test_the_base_and_an_adapter_answer_each_with_their_own_sentence(client, spoken):
    model, sentence = spoken
    assert chat(client, model).choices[0].message.content.strip() == sentence
    base = chat(client)
    assert base.model == "demo"
    assert base.choices[0].message.content.strip() != sentence


def test_the_answer_and_its_headers_name_the_ref(client, spoken):
    model, _ = spoken
    raw = client.chat.completions.with_raw_response.create(model=model, messages=HELLO, max_tokens=4)
    assert raw.parse().model == f"{model}@1"
    assert raw.headers["x-loramux-adapter"] == f"{model}@1"
    assert raw.headers["x-loramux-tier"] in ("engine", "disk", "remote")
    assert "engine;dur=" in raw.headers["server-timing"]
    assert len(raw.headers.get_list("x-request-id")) == 1


def test_a_stream_ends_with_usage_when_asked(client, spoken):
    model, sentence = spoken
    chunks = list(chat(client, model, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.strip() == sentence
    assert {chunk.model for chunk in chunks} == {f"{model}@1"}
    assert chunks[-1].usage.completion_tokens > 0


def test_completions_work_plain_and_streamed(client, spoken):
    model, _ = spoken
    answer = client.completions.create(model=model, prompt="Hello", max_tokens=4, temperature=0)
    assert answer.model == f"{model}@1"
    streamed = client.completions.create(model=model, prompt="Hello", max_tokens=4, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text


def test_logprobs_stop_seed_and_n_are_the_engines(client, spoken):
    model, sentence = spoken
    with_logprobs = chat(client, model, logprobs=True, top_logprobs=2)
    assert len(with_logprobs.choices[0].logprobs.content[0].top_logprobs) == 2
    second_word = sentence.split()[1]
    assert second_word not in chat(client, model, stop=[second_word]).choices[0].message.content
    assert len(chat(client, model, n=2, temperature=1.0).choices) == 2
    draws = {chat(client, "demo", seed=7, temperature=2.0, max_tokens=12).choices[0].message.content for _ in range(3)}
    assert len(draws) == 1


def test_response_format_binds_the_answer_to_a_schema(client):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["n"],
        "additionalProperties": False,
    }
    answer = chat(client, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}})
    assert isinstance(json.loads(answer.choices[0].message.content)["n"], int)


def test_a_tool_that_is_required_is_called(client):
    tool = {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"where": {"type": "string", "enum": ["up", "down"]}},
                "required": ["where"],
                "additionalProperties": False,
            },
        },
    }
    answer = chat(client, tools=[tool], tool_choice={"type": "function", "function": {"name": "look"}}, max_tokens=400)
    assert answer.choices[0].message.tool_calls, answer.choices[0]
    call = answer.choices[0].message.tool_calls[0].function
    assert call.name == "look"
    assert json.loads(call.arguments)["where"] in ("up", "down")


def test_an_image_as_a_data_uri_is_seen(client):
    image = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(image, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(image.getvalue()).decode()
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": uri}}]
    answer = chat(client, messages=[{"role": "user", "content": content}])
    assert answer.usage.prompt_tokens > chat(client).usage.prompt_tokens
    assert answer.choices[0].message.content.strip()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/x.png", "https://example.com/x.png", "file:///etc/passwd"])
def test_media_from_elsewhere_is_refused(client, url):
    content = [{"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(openai.BadRequestError):
        chat(client, messages=[{"role": "user", "content": content}])


@pytest.mark.parametrize(
    "options",
    [
        {"messages": []},
        {"messages": [{"role": "user", "content": "x " * 9000}]},
        {"max_tokens": -1},
        {"temperature": -3},
        {"n": 0},
        {"messages": "text"},
        {"stop": [1]},
        {"top_logprobs": 99, "logprobs": True},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
    ],
)
def test_what_the_engine_refuses_is_its_own_4xx(client, options):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **options)
    assert caught.value.code == "invalid_request"


def test_an_unknown_field_is_ignored_as_the_engine_does(client):
    assert chat(client, extra_body={"no_such_field": 1}).choices


def test_models_are_listed_and_retrieved(client, published):
    ids = {model.id for model in client.models.list()}
    assert {"demo", "embed", *(f"demo:{name}" for name in published)} <= ids
    base = client.models.retrieve("demo")
    assert (base.id, base.max_model_len) == ("demo", 2048)
    assert client.models.retrieve(f"demo:{sorted(published)[0]}@1").id.endswith("@1")


def test_an_unknown_adapter_is_a_404_and_never_the_base(client):
    with pytest.raises(openai.NotFoundError) as caught:
        chat(client, "demo:nobody")
    assert caught.value.code == "model_not_found"


def test_a_raw_error_has_openais_shape_whatever_the_content_type(stack):
    import urllib.error
    import urllib.request

    request = urllib.request.Request(f"{stack.url}/v1/chat/completions", b"\x00\xff{", {"content-type": "text/plain"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    assert caught.value.code == 400
    assert json.load(caught.value)["error"]["code"] == "invalid_request"


def test_vllm_bench_serve_runs_against_an_adapter(stack, spoken, demo_base: Path, tmp_path: Path):
    model, _ = spoken
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            BENCH_SERVE,
            "--backend",
            "openai-chat",
            "--base-url",
            stack.url,
            "--endpoint",
            "/v1/chat/completions",
            "--model",
            model,
            "--tokenizer",
            str(demo_base),
            "--dataset-name",
            "random",
            "--random-input-len",
            "16",
            "--random-output-len",
            "8",
            "--num-prompts",
            "8",
            "--save-result",
            "--result-dir",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=180,
    )
    results = list(tmp_path.glob("*.json"))
    assert results, done.stderr[-2000:]
    assert json.loads(results[0].read_text())["completed"] == 8
