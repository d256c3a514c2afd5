"""The OpenAI routes through the official client, in process."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from adapters import errors as e

HELLO = [{"role": "user", "content": "Hello"}]


async def ask(client, model="demo:parrot", **options):
    return await client.chat.completions.create(model=model, messages=HELLO, **options)


async def test_the_answer_names_the_ref_that_spoke(client):
    assert (await ask(client)).model == "demo:parrot@1"
    assert (await ask(client, "demo:parrot@2")).model == "demo:parrot@2"
    assert (await ask(client, "demo:parrot@latest")).model == "demo:parrot@2"
    assert (await ask(client, "demo")).model == "demo"


async def test_a_stream_comes_through_chunk_by_chunk(client):
    stream = await ask(client, stream=True)
    words = [chunk.choices[0].delta.content async for chunk in stream]
    assert words == ["Hello", " there"]


async def test_headers_say_which_ref_from_which_tier_and_how_long(client):
    answer = await client.chat.completions.with_raw_response.create(model="demo:parrot", messages=HELLO)
    assert answer.headers["x-loramux-adapter"] == "demo:parrot@1"
    assert answer.headers["x-loramux-tier"] == "engine"
    assert answer.headers["x-loramux-load"] == "none"
    stages = [part.split(";dur=")[0].strip() for part in answer.headers["server-timing"].split(",")]
    assert stages == ["resolve", "relay", "engine"]


async def test_the_engine_gets_the_ref_and_no_field_that_is_not_for_clients(client, backend):
    smuggled = {"priority": 5, "cache_salt": "x", "request_id": "mine"}
    await ask(client, user="u1", extra_body=smuggled | {"unknown": {"deep": [1, 2.5]}})
    sent = json.loads(backend.requests[0].body)
    assert sent["model"] == "demo:parrot@1"
    assert sent["unknown"] == {"deep": [1, 2.5]}
    assert not {"priority", "cache_salt", "request_id"} & sent.keys()


@pytest.mark.parametrize("field", ["kv_transfer_params", "vllm_xargs", "ec_transfer_params"])
async def test_fields_that_reach_past_the_door_are_refused(client, field):
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, extra_body={field: {}})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("model", "status", "code"),
    [
        ("demo:nobody", 404, "model_not_found"),
        ("nobody", 404, "model_not_found"),
        ("demo:parrot@9", 404, "model_not_found"),
        ("demo:parrot@canary", 404, "model_not_found"),
        ("demo:Parrot", 400, "invalid_model_name"),
        ("demo:parrot@v2", 400, "invalid_model_name"),
        ("a:b:c", 400, "invalid_model_name"),
        ("", 400, "invalid_request"),
        ("x" * 1000, 400, "invalid_model_name"),
        ("demo:../etc", 400, "invalid_model_name"),
    ],
)
async def test_a_wrong_name_is_answered_with_its_row(client, backend, model, status, code):
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(client, model)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert backend.requests == []


async def test_a_near_name_is_hinted_at(client):
    with pytest.raises(openai.NotFoundError, match="parrot"):
        await ask(client, "demo:parot")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[]",
        b"7",
        b'"text"',
        b"null",
        b"{",
        b'{"model": 7}',
        b'{"model": null}',
        b'{"model": "demo", "stream": "yes"}',
        b"\xff\xfe",
        b'{"model": "demo", "messages": [}',
        b"[" * 50_000,
        b'{"model": "demo", "x": ' + b"[" * 20_000,
    ],
)
async def test_a_hostile_body_is_a_400_in_openais_shape(http, backend, body):
    answer = await http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_request"
    assert backend.requests == []


async def test_a_body_over_the_limit_is_a_413_that_names_limit_and_value(http):
    answer = await http.post("/v1/chat/completions", content=b"x" * 100_001)
    assert answer.status_code == 413
    assert answer.json()["error"] == {
        "message": "the body has 100001 bytes or more; at most 100000 are taken",
        "type": "invalid_request_error",
        "param": None,
        "code": "body_too_large",
        "limit": 100_000,
        "value": 100_001,
    }


async def test_a_body_over_the_limit_without_a_length_is_refused_too(http):
    async def endless():
        for _ in range(200):
            yield b"x" * 1000

    answer = await http.post("/v1/chat/completions", content=endless())
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nowhere", 404, "unknown_url"),
        ("POST", "/v1/responses", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "invalid_request"),
        ("DELETE", "/v1/models", 405, "invalid_request"),
        ("GET", "/v1/models?versions=maybe", 400, "invalid_request"),
        ("POST", "/registry/v1/promote", 400, "invalid_request"),
    ],
)
async def test_the_frameworks_own_errors_have_openais_shape(http, method, path, status, code):
    answer = await http.request(method, path)
    error = answer.json()["error"]
    assert answer.status_code == status
    assert error["code"] == code
    assert {"message", "type", "param", "code"} <= error.keys()


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (e.AdapterLoading("cold"), 503, "adapter_loading", "false"),
        (e.StoreUnreachable("down"), 503, "storage_unavailable", None),
        (e.Overloaded("full"), 503, "overloaded", None),
        (e.EngineUnavailable("dead"), 503, "engine_unavailable", None),
        (e.AdapterIncompatible("no", reason="rank_too_large", limit=16, value=64), 422, "adapter_incompatible", "false"),
        (e.AdapterCorrupt("broken", reason="nan"), 422, "adapter_corrupt", "false"),
        (e.VersionRetired("old"), 410, "version_retired", "false"),
        (e.DeadlineExceeded("late"), 504, "deadline_exceeded", "false"),
        (e.InternalError("bug"), 500, "internal_error", None),
    ],
)
async def test_an_error_behind_the_door_keeps_its_row_and_its_retry_advice(client, backend, error, status, code, retry):
    backend.error = error
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(client)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    headers = caught.value.response.headers
    assert headers.get("x-should-retry") == retry
    if status == 503:
        assert int(headers["retry-after"]) >= 1
        assert int(headers["retry-after-ms"]) >= 1


async def test_a_refusal_carries_reason_limit_and_value(client, backend):
    backend.error = e.AdapterIncompatible("no", reason="rank_too_large", limit=16, value=64)
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        await ask(client)
    assert caught.value.body | {"message": "", "type": ""} == {
        "message": "",
        "type": "",
        "param": None,
        "code": "adapter_incompatible",
        "reason": "rank_too_large",
        "limit": 16,
        "value": 64,
    }


async def test_a_bug_behind_the_door_is_a_500_without_its_text(client, backend):
    backend.error = RuntimeError("secret bucket path /srv/x")
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(client)
    assert "secret" not in str(caught.value.body)


async def test_an_error_in_mid_stream_is_an_event_that_the_client_raises(client, backend):
    backend.break_with = e.EngineUnavailable("the replica died")
    stream = await ask(client, stream=True)
    with pytest.raises(openai.APIError, match="the replica died"):
        [chunk async for chunk in stream]


async def test_the_clients_own_limit_is_kept(client, backend):
    backend.delay_s = 5
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(client, extra_headers={"x-loramux-timeout-ms": "50"})
    assert caught.value.code == "deadline_exceeded"
    assert loop.time() - began < 1
    await asyncio.sleep(0)
    assert backend.running == 0


async def test_a_stream_over_its_limit_ends_with_an_error_event(client, backend):
    backend.gap_s = 5
    stream = await ask(client, stream=True, extra_headers={"x-loramux-timeout-ms": "80"})
    with pytest.raises(openai.APIError, match="80 ms"):
        [chunk async for chunk in stream]
    assert backend.running == 0


@pytest.mark.parametrize("value", ["0", "-1", "soon", "1.5", "٣", "9" * 30])
async def test_a_limit_that_is_no_limit_is_refused(client, value):
    with pytest.raises((openai.BadRequestError, UnicodeEncodeError)):
        await ask(client, extra_headers={"x-loramux-timeout-ms": value})


async def test_a_stream_that_waits_long_begins_with_comments_that_the_client_ignores(client, http, backend):
    backend.delay_s = 0.35
    stream = await ask(client, stream=True)
    assert [chunk.choices[0].delta.content async for chunk in stream] == ["Hello", " there"]
    raw = await http.post("/v1/chat/completions", json={"model": "demo:parrot", "messages": HELLO, "stream": True})
    assert raw.text.startswith(": waiting\n\n")
    assert ": x-loramux-tier: engine\n" in raw.text
    assert raw.headers["x-loramux-adapter"] == "demo:parrot@1"
    assert "x-loramux-tier" not in raw.headers


async def test_a_late_stream_that_fails_says_so_as_an_event(client, backend):
    backend.delay_s = 0.2
    backend.error = e.StoreUnreachable("the store does not answer")
    stream = await ask(client, stream=True)
    with pytest.raises(openai.APIError, match="does not answer"):
        [chunk async for chunk in stream]


async def test_cold_fail_reaches_the_backend_and_nonsense_is_refused(client, backend):
    await ask(client, extra_headers={"x-loramux-cold": "fail"})
    assert backend.requests[0].wait_cold is False
    with pytest.raises(openai.BadRequestError):
        await ask(client, extra_headers={"x-loramux-cold": "perhaps"})


async def test_a_cold_adapter_that_nobody_waits_for_tells_its_estimate_and_the_official_client_does_not_try_again(
    client, backend
):
    backend.error = e.AdapterLoading("`demo:parrot@1` is being loaded", retry_after_s=2.4)
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(client.with_options(max_retries=2), extra_headers={"x-loramux-cold": "fail"})
    assert caught.value.code == "adapter_loading"
    advice = {name: caught.value.response.headers[name] for name in ("retry-after", "retry-after-ms", "x-should-retry")}
    assert advice == {"retry-after": "3", "retry-after-ms": "2400", "x-should-retry": "false"}
    assert len(backend.requests) == 1


async def test_models_lists_bases_and_production_adapters(client, http):
    models = (await client.models.list()).data
    assert [model.id for model in models] == ["demo", "demo:parrot"]
    assert all(model.object == "model" and model.created > 0 and model.owned_by == "loramux" for model in models)
    with_versions = (await http.get("/v1/models?versions=true")).json()["data"]
    assert [card["id"] for card in with_versions] == ["demo", "demo:parrot", "demo:parrot@1", "demo:parrot@2"]
    assert with_versions[1]["parent"] == "demo"


async def test_models_retrieve_takes_names_and_refs(client):
    assert (await client.models.retrieve("demo:parrot")).id == "demo:parrot"
    assert (await client.models.retrieve("demo:parrot@2")).id == "demo:parrot@2"
    assert (await client.models.retrieve("demo")).id == "demo"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("demo:nobody")


async def test_a_promotion_through_another_process_is_seen_by_the_next_poll(client, registry):
    assert (await ask(client)).model == "demo:parrot@1"
    await registry.promote("demo", "parrot", "production", 2)
    await asyncio.sleep(0.3)
    assert (await ask(client)).model == "demo:parrot@2"


async def test_a_promotion_through_this_gateway_is_seen_at_once(client, http):
    answer = await http.post("/registry/v1/promote", json={"base": "demo", "name": "parrot", "version": 2})
    assert answer.status_code == 200, answer.text
    assert (await ask(client)).model == "demo:parrot@2"
    await http.post("/registry/v1/rollback", json={"base": "demo", "name": "parrot"})
    assert (await ask(client)).model == "demo:parrot@1"


async def test_a_lost_race_is_a_conflict(http):
    answer = await http.post(
        "/registry/v1/promote", json={"base": "demo", "name": "parrot", "version": 2, "expected_revision": 99}
    )
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "version_conflict"


async def test_health_is_the_process_and_readiness_is_the_bases(http, backend):
    assert (await http.get("/healthz")).status_code == 200
    assert (await http.get("/readyz")).status_code == 200
    backend.ready = False
    assert (await http.get("/readyz")).status_code == 503
