"""What adapter authors do over HTTP: look, promote, share, roll back, protect, retire, tag, pull."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile

import pytest

from adapters.names import AdapterRef
from adapters.registry import layout
from adapters.types import By
from tests.unit.gateway.conftest import prepared

PARROT = {"base": "demo", "name": "parrot"}


async def post(http, verb: str, status: int = 200, headers: dict[str, str] | None = None, **body):
    answer = await http.post(f"/registry/v1/{verb}", json=PARROT | body, headers=headers or {})
    assert answer.status_code == status, answer.text
    return answer


async def error_of(http, verb: str, status: int, headers: dict[str, str] | None = None, **body) -> dict:
    return (await post(http, verb, status, headers, **body)).json()["error"]


async def get(http, path: str, status: int = 200, **query):
    answer = await http.get(f"/registry/v1/{path}", params=query)
    assert answer.status_code == status, answer.text
    return answer


# Aliases


async def test_a_move_answers_with_what_is_true_now_and_this_gateway_already_answers_by_it(http, app):
    answer = await post(http, "promote", version=2, message="better", who="ann")
    body = answer.json()
    assert body["aliases"] == {"production": 2}
    assert body["seen"] is True
    assert body["generation"] == app.state.parts.view.generation
    assert answer.headers["etag"] == f'"{body["revision"]}"'
    shown = await http.get("/v1/models/demo:parrot@2")
    assert shown.status_code == 200


async def test_weights_share_an_alias_and_a_rollback_ends_that(http):
    shared = (await post(http, "weights", weights={"1": 90, "2": 10})).json()
    assert shared["weights"] == {"production": {"1": 90, "2": 10}}
    assert shared["aliases"] == {"production": 1}
    back = (await post(http, "rollback")).json()
    assert (back["weights"], back["aliases"]) == ({}, {"production": 1})


async def test_rollback_to_a_version_that_was_never_live_is_refused_with_those_that_were(http):
    await post(http, "promote", version=2)
    error = await error_of(http, "rollback", 409, version=9)
    assert error["reason"] == "never_live"
    assert "1, 2" in error["message"]
    assert (await post(http, "rollback", version=1)).json()["aliases"] == {"production": 1}


async def test_an_alias_can_be_taken_away(http):
    await post(http, "promote", version=2, alias="canary")
    assert (await post(http, "unset", alias="canary")).json()["aliases"] == {"production": 1}


async def test_a_protected_alias_moves_only_for_callers_that_say_so(http):
    assert (await post(http, "protect")).json()["protected"] == ["production"]
    error = await error_of(http, "promote", 403, version=2)
    assert (error["code"], error["reason"]) == ("forbidden", "alias_protected")
    assert "unlock" in error["hint"]
    assert (await post(http, "promote", version=2, unlock=True)).json()["aliases"] == {"production": 2}
    assert (await post(http, "protect", on=False)).json()["protected"] == []


# Who was faster


@pytest.mark.parametrize("form", ['"{}"', 'W/"{}"', "{}", ' "{}" '])
async def test_if_match_takes_the_etag_in_every_form_that_proxies_leave(http, form):
    seen = (await get(http, "adapter", **PARROT)).headers["etag"].strip('"')
    await post(http, "promote", headers={"if-match": form.format(seen)}, version=2)
    error = await error_of(http, "promote", 409, {"if-match": form.format(seen)}, version=1)
    assert error["code"] == "version_conflict"
    assert error["limit"] == int(seen)
    assert error["value"] > int(seen)


@pytest.mark.parametrize("value", ["seven", '"1", "2"', '"', '"-1"', "1.5", '"' + "9" * 40 + '"'])
async def test_an_if_match_that_is_no_revision_is_a_400_and_moves_nothing(http, value):
    error = await error_of(http, "promote", 400, {"if-match": value}, version=2)
    assert error["reason"] == "bad_if_match"
    assert (await get(http, "adapter", **PARROT)).json()["aliases"] == {"production": 1}


async def test_if_match_star_and_an_empty_expectation_move_whatever_is_there(http):
    await post(http, "promote", headers={"if-match": "*"}, version=2)
    await post(http, "promote", version=1, expected_revision=None)


async def test_header_and_body_that_expect_different_revisions_are_refused(http):
    error = await error_of(http, "promote", 409, {"if-match": '"3"'}, version=2, expected_revision=4)
    assert error["param"] == "expected_revision"


async def test_the_history_says_who_when_from_to_and_why(http):
    await post(http, "promote", headers={"x-loramux-user": "bea"}, version=2, message="loss 0.3", now=True)
    await post(http, "rollback", headers={"x-loramux-user": "bea"}, who="ann", message="too chatty")
    rows = (await get(http, "history", **PARROT, alias="production")).json()["history"]
    told = [(row["kind"], row["from_version"], row["to_version"], row["who"], row["message"]) for row in rows]
    assert told == [
        ("rollback", 2, 1, "ann", "too chatty"),
        ("promote", 1, 2, "bea", "loss 0.3"),
        ("promote", None, 1, None, None),
    ]
    page = (await get(http, "history", **PARROT, limit=1, before=1)).json()
    assert [row["to_version"] for row in page["history"]] == [2]
    assert page["has_more"] is True


async def test_what_was_live_at_a_time_is_told_with_the_row_that_decided_it(http):
    await post(http, "promote", version=2)
    first = (await get(http, "history", **PARROT)).json()["history"][-1]["at"]
    then = (await get(http, "live", **PARROT, at=first)).json()
    assert (then["version"], then["row"]["to_version"]) == (1, 1)
    now = (await get(http, "live", **PARROT, at="2999-01-01T00:00:00+02:00")).json()
    assert now["version"] == 2
    assert len((await get(http, "history", **PARROT, at=first)).json()["history"]) == 1
    before = (await get(http, "live", **PARROT, at="2001-01-01")).json()
    assert (before["version"], before["row"]) == (None, None)
    assert (await get(http, "live", 400, **PARROT, at="yesterday")).json()["error"]["param"] == "at"


# Versions


async def test_a_retired_version_answers_410_and_can_come_back(http):
    assert (await post(http, "retire", version=2)).json()["retired"] == [2]
    answer = await http.get("/v1/models/demo:parrot@2")
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "version_retired")
    assert (await post(http, "restore", version=2)).json()["retired"] == []
    assert (await http.get("/v1/models/demo:parrot@2")).status_code == 200


async def test_a_version_that_an_alias_names_is_not_retired(http):
    error = await error_of(http, "retire", 409, version=1)
    assert error["reason"] == "in_use"


async def test_tags_are_written_and_taken_away(http):
    await post(http, "tag", version=1, tags={"eval": "passed", "owner": "ann"})
    assert (await post(http, "tag", version=1, tags={"owner": None})).json()["tags"] == {"1": {"eval": "passed"}}
    await error_of(http, "tag", 400, version=1, tags={"no blank": "x"})


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("promote", {"version": 9}),
        ("retire", {"version": 9}),
        ("restore", {"version": 9}),
        ("tag", {"version": 9, "tags": {"a": "b"}}),
        ("weights", {"weights": {"9": 1}}),
    ],
)
async def test_an_unknown_version_is_a_404(http, verb, body):
    assert (await error_of(http, verb, 404, **body))["code"] == "model_not_found"


@pytest.mark.parametrize("verb", ["promote", "rollback", "unset", "protect", "retire", "restore", "tag", "weights"])
@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"7", b'{"base": 1}', b'{"base": "demo", "name": "parrot", "version": true}', b"[" * 50_000, b"\xff"],
)
async def test_a_hostile_body_is_a_400(http, verb, raw):
    answer = await http.post(f"/registry/v1/{verb}", content=raw, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


async def test_an_unknown_field_or_filter_is_refused(http):
    assert "versoin" in (await error_of(http, "promote", 400, version=1, versoin=2))["message"]
    assert (await get(http, "adapters", 400, nmae="parrot")).json()["error"]["param"] == "nmae"


async def test_a_body_over_the_limit_is_a_413(http):
    error = await error_of(http, "promote", 413, version=1, message="x" * 200_000)
    assert (error["code"], error["limit"]) == ("body_too_large", 100_000)


async def test_a_body_without_its_content_type_is_told_what_is_missing(http):
    answer = await http.post("/registry/v1/promote", content=json.dumps(PARROT | {"version": 1}))
    assert answer.status_code == 400
    assert "content-type: application/json" in answer.json()["error"]["message"]


# Looking


async def test_show_holds_aliases_since_when_manifests_history_and_tags(http, registry):
    await registry.tag(AdapterRef("demo", "parrot", 2), {"eval": "passed"})
    await registry.promote("demo", "parrot", "canary", 2, By("ann", "try it"))
    await http.post("/registry/v1/refresh")
    shown = (await get(http, "adapter", **PARROT)).json()
    assert shown["alias_rows"]["canary"]["version"] == 2
    assert shown["alias_rows"]["canary"]["since"] == shown["history"][0]["at"]
    assert [manifest["version"] for manifest in shown["manifests"]] == [2, 1]
    newest = shown["manifests"][0]
    assert (newest["aliases"], newest["tags"], newest["rank"]) == (["canary"], {"eval": "passed"}, 8)
    assert {file["name"] for file in newest["files"]} == {"adapter_config.json", "adapter_model.safetensors"}
    assert [version["version"] for version in shown["versions"]] == [1, 2]


async def test_the_versions_of_an_adapter_are_listed(http):
    listed = (await get(http, "versions", **PARROT)).json()
    assert [(version["version"], version["retired"]) for version in listed["versions"]] == [(1, False), (2, False)]
    await get(http, "versions", 404, base="demo", name="nobody")


async def test_one_version_is_shown_by_number_or_alias(http):
    assert (await get(http, "version", **PARROT)).json()["ref"] == "demo:parrot@1"
    for chosen in ({"version": 2}, {"alias": "latest"}):
        assert (await get(http, "version", **PARROT, **chosen)).json()["ref"] == "demo:parrot@2"
    await get(http, "version", 404, **PARROT, alias="canary")
    await get(http, "version", 404, **PARROT, version=9)


async def test_an_unknown_adapter_is_a_404_with_near_names_and_no_call_to_the_store(http, registry, monkeypatch):
    async def never(*_):
        raise AssertionError("the store was asked")

    monkeypatch.setattr(registry.store, "get", never)
    error = (await get(http, "adapter", 404, base="demo", name="parot")).json()["error"]
    assert "parrot" in error["hint"]


async def test_lists_are_filtered(http, registry):
    await registry.publish("demo", "team/crow", prepared(b"crow"))
    await registry.tag(AdapterRef("demo", "team/crow", 1), {"eval": "passed"})
    await registry.retire(AdapterRef("demo", "parrot", 2))
    await http.post("/registry/v1/refresh")

    async def names(**query) -> list[str]:
        return [row["name"] for row in (await get(http, "adapters", **query)).json()["adapters"]]

    assert await names() == ["parrot", "team/crow"]
    assert await names(base="other") == []
    assert await names(prefix="team/") == ["team/crow"]
    assert await names(name="arr") == ["parrot"]
    assert await names(alias="production") == ["parrot"]
    assert await names(tag="eval:passed") == await names(tag="eval") == ["team/crow"]
    assert await names(tag="eval:failed") == []
    assert await names(retired="true") == ["parrot"]
    rows = (await get(http, "adapters", retired="true")).json()["adapters"]
    assert [version["version"] for version in rows[0]["versions"]] == [2]


async def test_pages_of_the_list_hold_every_adapter_once(http, registry):
    for number in range(7):
        await registry.publish("demo", f"bird-{number}", prepared(b"%d" % number))
    await http.post("/registry/v1/refresh")
    found, query = [], {"limit": 3}
    for _ in range(10):
        page = (await get(http, "adapters", **query)).json()
        found += [row["name"] for row in page["adapters"]]
        if not page["has_more"]:
            break
        query["after"] = page["last"]
    assert found == [f"bird-{number}" for number in range(7)] + ["parrot"]
    await get(http, "adapters", 400, after="nonsense")
    await get(http, "adapters", 400, limit=0)


# Pulling


async def test_a_pull_is_a_tar_of_the_two_files(http):
    answer = await get(http, "pull", **PARROT, version=2)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}
    assert files == {"adapter_config.json": b"{}", "adapter_model.safetensors": b"two"}
    assert answer.headers["x-loramux-adapter"] == "demo:parrot@2"
    assert answer.headers["x-loramux-digest"].startswith("sha256:")
    assert int(answer.headers["content-length"]) == len(answer.content)


async def test_one_file_is_pulled_with_its_digest(http):
    answer = await get(http, "pull", **PARROT, alias="latest", file="adapter_model.safetensors")
    assert answer.content == b"two"
    digest = base64.b64encode(hashlib.sha256(b"two").digest()).decode()
    assert answer.headers["repr-digest"] == f"sha-256=:{digest}:"
    await get(http, "pull", 400, **PARROT, file="../../secret")


async def test_a_retired_version_is_pulled_and_a_collected_one_is_gone(http, registry):
    await post(http, "retire", version=2)
    assert (await get(http, "pull", **PARROT, version=2)).status_code == 200
    await registry.collect(AdapterRef("demo", "parrot", 2))
    await http.post("/registry/v1/refresh")
    assert (await get(http, "pull", 410, **PARROT, version=2)).json()["error"]["reason"] == "collected"


async def test_files_that_are_not_what_was_published_never_come_through_whole(http, registry):
    version = (await registry.entry("demo", "parrot")).versions[2]
    await registry.store.put(layout.blob_key(version.digest, "adapter_model.safetensors"), b"owt")
    error = (await get(http, "pull", 422, **PARROT, version=2, file="adapter_model.safetensors")).json()["error"]
    assert (error["code"], error["reason"]) == ("adapter_corrupt", "digest_differs")


async def test_a_pull_names_what_is_missing(http):
    await get(http, "pull", 400)
    await get(http, "pull", 400, base="demo")
    await get(http, "pull", 404, **PARROT, version=9)
    await get(http, "pull", 404, **PARROT, alias="canary")
    await get(http, "pull", 404, base="demo", name="nobody")
