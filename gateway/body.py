"""What the gateway reads of a request's body: the model, whether it streams, and who asks. The rest passes unread.

The top level is parsed into raw values, so a field that the gateway does not know reaches the engine byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from adapters.errors import InvalidRequest

# Fields that would let a client reach past the door: scheduling, transfer of KV caches, ids and cache keys.
DROPPED_FIELDS = frozenset({"priority", "cache_salt", "request_id"})
REFUSED_FIELDS = frozenset({"kv_transfer_params", "ec_transfer_params", "vllm_xargs"})
STICKY_FIELDS = ("user", "safety_identifier", "prompt_cache_key")

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Body:
    """A request's body at the door. `fields` are raw JSON values by name, without those that are not for clients."""

    model: str
    stream: bool
    sticky_key: str | None
    fields: dict[str, msgspec.Raw]

    def for_engine(self, model: str) -> bytes:
        """The body as JSON with `model` as its model."""
        return msgspec.json.encode(self.fields | {"model": msgspec.Raw(msgspec.json.encode(model))})


def read_body(raw: bytes) -> Body:
    """Raises InvalidRequest when the body is no JSON object, has no model, or holds a field that is not for clients."""
    fields = _parse(raw)
    refused = sorted(REFUSED_FIELDS & fields.keys())
    if refused:
        raise InvalidRequest(f"`{refused[0]}` is not a field for clients", param=refused[0])
    model = _typed(fields, "model", str)
    if not model:
        raise InvalidRequest("the body has no `model`", param="model")
    sticky = (_text_or_none(fields.get(name)) for name in STICKY_FIELDS)
    return Body(
        model=model,
        stream=bool(_typed(fields, "stream", bool)),
        sticky_key=next((key for key in sticky if key), None),
        fields={name: value for name, value in fields.items() if name not in DROPPED_FIELDS},
    )


def _parse(raw: bytes) -> dict[str, msgspec.Raw]:
    if not raw:
        raise InvalidRequest("the body is empty; a JSON object is expected")
    try:
        return _decoder.decode(raw)
    except msgspec.ValidationError:
        raise InvalidRequest("the body is not a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {str(error)[:120]}") from None


def _typed(fields: dict[str, msgspec.Raw], name: str, kind: type) -> object:
    """The field's value, None if it is absent or null. Raises InvalidRequest when it has another type."""
    if name not in fields:
        return None
    try:
        return msgspec.json.decode(fields[name], type=kind | None)
    except (msgspec.DecodeError, UnicodeDecodeError):
        words = {str: "a string", bool: "true or false"}
        raise InvalidRequest(f"`{name}` is not {words[kind]}", param=name) from None


def _text_or_none(value: msgspec.Raw | None) -> str | None:
    try:
        return msgspec.json.decode(value, type=str) if value is not None else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
