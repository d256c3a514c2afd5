"""The settings: one file, the environment over it, and errors that say which key."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.errors import InvalidRequest
from serve_app.settings import load_settings, parse_settings

REGISTRY = {"url": "s3://bucket/prefix"}
BASES = [{"id": "Qwen/Qwen3-8B"}]


def test_defaults_fill_what_is_left_out():
    settings = parse_settings({"registry": REGISTRY, "bases": BASES})
    assert settings.gateway.port == 8000
    assert settings.bases[0].replicas == 1


def test_settings_are_frozen():
    settings = parse_settings({"registry": REGISTRY, "bases": BASES})
    with pytest.raises(ValueError, match="frozen"):
        settings.gateway.port = 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"registry": {**REGISTRY, "endpiont": "x"}, "bases": BASES},
            "`registry.endpiont` is no setting; did you mean `endpoint`",
        ),
        ({"registry": REGISTRY, "bases": BASES, "gatway": {}}, "did you mean `gateway`"),
        ({"registry": REGISTRY, "bases": [{"id": "a", "replica": 2}]}, "did you mean `replicas`"),
        ({"registry": REGISTRY, "bases": [{"id": "a:b"}]}, "no base id"),
        ({"registry": REGISTRY, "bases": []}, "`bases`"),
        ({"bases": BASES}, "`registry`"),
        ({"registry": REGISTRY, "bases": BASES * 2}, "listed twice"),
        ({"registry": REGISTRY, "bases": BASES, "gateway": {"port": 99999}}, "65535"),
        ({"registry": REGISTRY, "bases": [{"id": "a", "replicas": {"min_replicas": 3, "max_replicas": 2}}]}, "over max_replicas"),
    ],
)
def test_a_mistake_is_named(values, message):
    with pytest.raises(InvalidRequest, match=message):
        parse_settings(values)


def test_the_environment_lies_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "loramux.yaml"
    path.write_text("registry: {url: 's3://a/b'}\nbases: [{id: demo}]\n")
    monkeypatch.setenv("LORAMUX_GATEWAY__PORT", "9001")
    monkeypatch.setenv("LORAMUX_REGISTRY__POLL_INTERVAL_S", "0.25")
    settings = load_settings(path)
    assert (settings.gateway.port, settings.registry.poll_interval_s) == (9001, 0.25)


def test_a_variable_that_reaches_into_a_list_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LORAMUX_BASES__0__ID", "other")
    with pytest.raises(InvalidRequest, match="LORAMUX_BASES__0__ID"):
        parse_settings({"registry": REGISTRY, "bases": BASES})


def test_parsing_leaves_the_callers_values_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LORAMUX_GATEWAY__PORT", "9001")
    values = {"registry": dict(REGISTRY), "bases": BASES}
    parse_settings(values)
    assert values == {"registry": REGISTRY, "bases": BASES}


@pytest.mark.parametrize(("text", "message"), [("[1]", "not a mapping"), ("a: [", "not valid YAML")])
def test_a_file_that_is_no_settings_is_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "loramux.yaml"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=message):
        load_settings(path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(InvalidRequest, match=r"missing\.yaml"):
        load_settings(tmp_path / "missing.yaml")


def test_a_mistake_of_a_whole_section_shows_no_secret_of_it():
    registry = {"url": "s3://b/registry", "secret_access_key": "hush"}
    with pytest.raises(InvalidRequest) as caught:
        parse_settings({"registry": registry, "bases": [{"id": "demo"}], "drop": {"url": "s3://b/drop", "base": "dmo"}})
    assert str(caught.value) == "`drop.base` is `dmo`, which is none of the bases"


@pytest.mark.parametrize(
    ("base", "full_at"),
    [
        ({}, 64),
        ({"engine": {"max_num_seqs": 32}}, 32),
        ({"engine": {"max_num_seqs": 256}}, 64),
        ({"engine": {"max_num_seqs": 32}, "room": 100}, 100),
        ({"room": 100, "max_ongoing_requests": 50}, 50),
    ],
)
def test_a_replica_is_full_at_its_room_or_at_what_its_engine_runs_at_once(base, full_at):
    settings = parse_settings({"registry": REGISTRY, "bases": [{**BASES[0], **base}]})
    assert settings.bases[0].full_at == full_at
