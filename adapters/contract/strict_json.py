"""JSON from strangers: an object, no key twice, no NaN, no bottomless nesting."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from adapters.contract.refusals import refusal, shown


def parse_object(data: bytes, *, what: str, code: str) -> dict[str, Any]:
    """The JSON object in `data`, keys in file order. Raises the refusal `code`, which names `what` and the fault."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = shown(_first_double(key for key, _ in pairs))
            raise refusal(code, f"{what} has the key `{twice}` more than once", limit=1, value=twice)
        return found

    def no_constant(name: str) -> Any:
        raise refusal(code, f"{what} holds {name}, which is no JSON number", limit="JSON", value=name)

    try:
        parsed = json.loads(data.decode("utf-8-sig"), object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise refusal(
            code, f"{what} is not valid JSON", limit="JSON", value=shown(getattr(error, "msg", type(error).__name__))
        ) from None
    if not isinstance(parsed, dict):
        raise refusal(code, f"{what} is not a JSON object", limit="object", value=type(parsed).__name__)
    return parsed


def _first_double(keys: Iterable[str]) -> str:
    seen: set[str] = set()
    return next((key for key in keys if key in seen or seen.add(key)), "")  # type: ignore[func-returns-value]
