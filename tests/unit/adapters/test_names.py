"""The grammar of names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters import names
from adapters.errors import InvalidModelName, InvalidRequest
from adapters.names import AdapterRef, ModelName, parse_model_name

BASES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9/._-]{0,40}", fullmatch=True)
SEGMENTS = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True)
ADAPTERS = (SEGMENTS | st.builds("{}/{}".format, SEGMENTS, SEGMENTS)).filter(lambda name: name != "versions")
VERSIONS = st.integers(1, 999_999_999)


@given(BASES, ADAPTERS, VERSIONS)
def test_refs_round_trip(base: str, name: str, version: int) -> None:
    ref = AdapterRef(base, name, version)
    assert AdapterRef.parse(str(ref)) == ref


@given(BASES, ADAPTERS)
def test_model_names_round_trip(base: str, name: str) -> None:
    for text in (base, f"{base}:{name}", f"{base}:{name}@canary", f"{base}:{name}@latest"):
        assert str(parse_model_name(text)) == text


@given(BASES)
def test_base_keys_round_trip_and_are_one_segment(base: str) -> None:
    key = names.base_key(base)
    assert "/" not in key
    assert names.base_of_key(key) == base


@given(st.text(max_size=600))
def test_anything_else_is_an_invalid_model_name(text: str) -> None:
    try:
        assert isinstance(parse_model_name(text), ModelName)
    except InvalidModelName as error:
        assert len(str(error)) < 500


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3", ModelName("Qwen/Qwen3")),
        ("b:n", ModelName("b", "n", alias="production")),
        ("b:n@production", ModelName("b", "n", alias="production")),
        ("b:team/n@7", ModelName("b", "team/n", version=7)),
        ("b:n@latest", ModelName("b", "n", alias="latest")),
    ],
)
def test_the_forms(text: str, expected: ModelName) -> None:
    assert parse_model_name(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":n",
        "b:",
        "b:N",
        "b:n@",
        "b:n@0",
        "b:n@07",
        "b:n@v7",
        "b:n@Up",
        "b:a/b/c",
        "b:versions",
        "b:n:m",
        "b:n@1@2",
        "b n",
        "/b",
        "b:../x",
        "b:n@1234567890",
        "b:n\n",
        "b\n",
        "b:n@7\n",
        "b:" + "n" * 64,
        "x" * 513,
    ],
)
def test_what_does_not_parse(text: str) -> None:
    with pytest.raises(InvalidModelName):
        parse_model_name(text)


def test_hints() -> None:
    with pytest.raises(InvalidModelName, match="try `my-adapter`"):
        parse_model_name("b:My Adapter")
    with pytest.raises(InvalidModelName, match="try `@7`"):
        parse_model_name("b:n@v7")
    with pytest.raises(InvalidModelName):
        AdapterRef.parse("b:n")


def test_checks() -> None:
    assert (names.check_base_id("a/b"), names.check_adapter_name("t/n"), names.check_alias("canary")) == ("a/b", "t/n", "canary")
    for check, bad in [
        (names.check_base_id, "a:b"),
        (names.check_adapter_name, "Up"),
        (names.check_adapter_name, "versions"),
        (names.check_alias, "latest"),
        (names.check_alias, "v1"),
        (names.check_alias, "1x"),
        (names.check_alias, "a" * 33),
    ]:
        with pytest.raises(InvalidRequest):
            check(bad)
