"""The registry's JSON: whole round trips, clear refusals."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters import errors
from adapters.names import AdapterRef
from adapters.registry import codec
from adapters.types import (
    AdapterEntry,
    AppliedRule,
    BaseContract,
    Directive,
    FileDigest,
    Head,
    HistoryRow,
    Manifest,
    ModuleShape,
    PendingMove,
    VersionEntry,
)

FILES = (FileDigest("adapter_config.json", 3, "aa"), FileDigest("adapter_model.safetensors", 2**40, "bb"))
MANIFEST = Manifest(
    AdapterRef("Qwen/Qwen3", "team/maze", 7),
    "d",
    FILES,
    16,
    32.0,
    ("q_proj",),
    "2026-01-01T00:00:00Z",
    "f",
    4,
    (AppliedRule("strip_prefix", 3),),
    ("careful",),
    "m",
    "ann",
    {"run": {"step": 3}},
    {"solved": 0.5},
)
DIRECTIVE = Directive("production", "engine", True, 2, "2026", "2027", 3600, "2025", "ann", "busy at noon")
MOVE = PendingMove("m", "production", 3, 2, "2027", "2026", "ann", "better", "gateway-1")
HEAD = Head(
    "b",
    "n",
    3,
    "id",
    {"production": 2},
    {"production": {2: 90, 3: 10}},
    frozenset({"production"}),
    (HistoryRow("production", None, 2, "2026", "ann", "go", "weights", {2: 90, 3: 10}, "m0"),),
    frozenset({1, 10, 2}),
    {10: "2026"},
    {2: {"run": "r1"}},
    ("id",),
    (DIRECTIVE,),
    {"production": MOVE},
    {"pins": [1]},
)
CONTRACT = BaseContract("b", "f", {"model.q": ModuleShape(64, 128)}, 32, "model.language_model", True, "Qwen3ForCausalLM")
SHOWN = VersionEntry(2, "d", FILES, 8, "2026", 4, True, True, {"run": "r1"})
ENTRY = AdapterEntry(
    "b", "n", 3, {"production": 2}, {2: SHOWN}, {"production": {2: 1, 3: 1}}, "e", (DIRECTIVE,), {"production": MOVE}
)
DECODERS = [codec.decode_manifest, codec.decode_head, codec.decode_contract, codec.decode_entries]
ENCODED = [
    codec.encode_manifest(MANIFEST, change_id="x"),
    codec.encode_head(HEAD),
    codec.encode_contract(CONTRACT),
    codec.encode_entries([ENTRY]),
]
BOTH = list(zip(DECODERS, ENCODED, strict=True))
VALUES = [MANIFEST, HEAD, CONTRACT, (ENTRY,)]
GARBAGE = [b"{}", b"[]", b'{"schema_version": 1}', b'{"schema_version": "1"}', b"[" * 100_000]


@pytest.mark.parametrize(("decode", "data", "value"), list(zip(DECODERS, ENCODED, VALUES, strict=True)))
def test_round_trips(decode, data: bytes, value: object) -> None:
    assert decode(data) == value
    assert json.loads(data)["schema_version"] == 1


@pytest.mark.parametrize(("decode", "data"), BOTH)
def test_unknown_keys_pass(decode, data: bytes) -> None:
    decode(json.dumps({**json.loads(data), "from_the_future": {"a": 1}}).encode())


def test_a_head_keeps_what_it_does_not_know() -> None:
    data = json.dumps({**json.loads(codec.encode_head(HEAD)), "from_the_future": {"version": 3}}).encode()
    again = json.loads(codec.encode_head(codec.decode_head(data)))
    assert (again["from_the_future"], again["pins"]) == ({"version": 3}, [1])


@pytest.mark.parametrize(("decode", "data"), BOTH)
def test_a_newer_schema_is_refused(decode, data: bytes) -> None:
    with pytest.raises(errors.StoreError, match="schema version 2") as caught:
        decode(json.dumps({**json.loads(data), "schema_version": 2}).encode())
    assert (caught.value.limit, caught.value.value) == (1, 2)


@pytest.mark.parametrize("decode", DECODERS)
@given(st.binary(max_size=40) | st.sampled_from(GARBAGE))
def test_garbage_is_refused(decode, data: bytes) -> None:
    with pytest.raises((errors.StoreError, errors.AdapterCorrupt), match="can't be read"):
        decode(data)


def test_a_broken_field_is_named() -> None:
    document = json.loads(codec.encode_manifest(MANIFEST))
    document["ref"]["version"] = "seven"
    with pytest.raises(errors.AdapterCorrupt, match=r"ref\.version"):
        codec.decode_manifest(json.dumps(document).encode())
