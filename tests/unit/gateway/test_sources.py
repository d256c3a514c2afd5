"""Publishing from an address: what policy allows, and what only looks as if it did."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from adapters.errors import Forbidden, InvalidRequest
from adapters.settings import StoreSettings
from gateway.app import Outside, build_app
from gateway.settings import GatewaySettings
from gateway.sources import check_source
from tests.adapter_folders import TEXT, plain
from tests.scripted_backend import ScriptedBackend

ALLOWED = ("s3://bucket/runs", "s3://other/", "s3://third/a/b/")
BASE = "tiny/base"


@pytest.mark.parametrize(
    ("source", "address"),
    [
        ("s3://bucket/runs", "s3://bucket/runs"),
        ("s3://bucket/runs/", "s3://bucket/runs"),
        ("s3://bucket/runs/7/policy", "s3://bucket/runs/7/policy"),
        ("S3://BUCKET/runs/7", "s3://bucket/runs/7"),
        ("s3://other", "s3://other"),
        ("s3://other/anything", "s3://other/anything"),
        ("s3://third/a/b/c", "s3://third/a/b/c"),
    ],
)
def test_what_lies_below_an_allowed_address_is_allowed(source, address):
    assert check_source(source, ALLOWED) == address


@pytest.mark.parametrize(
    "source",
    ["s3://bucket", "s3://bucket/runs-secret/7", "s3://bucket/run", "s3://third/a", "s3://bucket.evil/runs", "file:///etc"],
)
def test_what_lies_elsewhere_is_forbidden_and_the_message_does_not_say_what_would_be_allowed(source):
    with pytest.raises(Forbidden) as caught:
        check_source(source, ALLOWED)
    assert caught.value.reason == "source_not_allowed"
    assert not any(word in str(caught.value) for word in ("bucket", "runs", "other", "third"))


@pytest.mark.parametrize(
    "source",
    [
        "s3://bucket/runs/../secret",
        "s3://bucket/runs/./7",
        "s3://bucket/runs//7",
        "s3://bucket/runs/%2e%2e/secret",
        "s3://bucket/runs/..%2fsecret",
        "s3://bucket/runs\\..\\secret",
        "s3://bucket/runs/7?versionId=3",
        "s3://bucket/runs/7#x",
        "s3://user@bucket/runs/7",
        "s3://bucket/runs/*",
        "s3:///runs/7",
        "https://bucket/runs/7",
        "file://host/runs",
        "bucket/runs/7",
        "",
        "s3://bucket/runs/\u2025/7",
        "s3://bucket/runs/\x007",
        "s3://[bucket/runs",
    ],
)
def test_what_could_mean_two_things_is_refused(source):
    with pytest.raises(InvalidRequest) as caught:
        check_source(source, (*ALLOWED, "file:///"))
    assert caught.value.param == "source"


def test_nothing_is_allowed_by_default():
    with pytest.raises(Forbidden):
        check_source("s3://bucket/runs", GatewaySettings().allowed_sources)


@pytest.fixture
async def http(registry, tmp_path: Path):
    await registry.put_base(TEXT)
    settings = GatewaySettings(allowed_sources=(f"file://{tmp_path}/drop",))
    outside = Outside(sources=StoreSettings(url="memory://registry"))
    app = build_app(settings, registry, ScriptedBackend(bases=(BASE,)), outside=outside)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://gateway") as client:
        yield client


async def publish(http, source: str, status: int, **fields) -> dict:
    body = {"base": BASE, "name": "crow", "source": source} | fields
    answer = await http.post("/registry/v1/publish-source", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_a_folder_below_an_allowed_address_becomes_a_version(http, tmp_path):
    plain().write(tmp_path / "drop" / "run" / "policy")
    source = f"file://{tmp_path}/drop/run/policy"
    made = await publish(http, source, 201, promote="canary", message="step 7")
    assert (made["ref"], made["aliases"]) == (f"{BASE}:crow@1", {"canary": 1})
    assert (await publish(http, source, 200))["created"] is False


async def test_a_source_is_refused_with_the_contracts_own_words(http, tmp_path):
    plain(rank=16).write(tmp_path / "drop" / "bad")
    error = (await publish(http, f"file://{tmp_path}/drop/bad", 422))["error"]
    assert (error["reason"], error["limit"], error["value"]) == ("rank_too_large", 8, 16)


async def test_an_empty_address_is_a_404_and_a_foreign_one_a_403(http, tmp_path):
    (tmp_path / "drop").mkdir()
    (tmp_path / "secret").mkdir()
    await publish(http, f"file://{tmp_path}/drop/nothing", 404)
    error = (await publish(http, f"file://{tmp_path}/secret", 403))["error"]
    assert error["reason"] == "source_not_allowed"
    assert str(tmp_path) not in error["message"]
