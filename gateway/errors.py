"""The one table from error classes to HTTP, and OpenAI's shape around it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

from adapters import errors as e


@dataclass(frozen=True, slots=True)
class Row:
    """How a class of errors looks on the wire. `should_retry` overrules the official client's own rule where it errs:
    left to itself it retries 408, 409, 429 and every 5xx."""

    status: int
    type: str
    should_retry: bool | None = None
    default_retry_after_s: float | None = None


ROWS: dict[type[e.LoraMuxError], Row] = {
    e.InvalidRequest: Row(400, "invalid_request_error"),
    e.Forbidden: Row(403, "invalid_request_error"),
    e.ModelNotFound: Row(404, "invalid_request_error"),
    e.VersionConflict: Row(409, "invalid_request_error", should_retry=False),
    e.VersionRetired: Row(410, "invalid_request_error", should_retry=False),
    e.BodyTooLarge: Row(413, "invalid_request_error", should_retry=False),
    e.AdapterRefused: Row(422, "invalid_request_error", should_retry=False),
    e.AdapterLoading: Row(503, "server_error", should_retry=False, default_retry_after_s=1),
    e.StoreError: Row(503, "server_error", default_retry_after_s=2),
    e.DiskFull: Row(503, "server_error", default_retry_after_s=5),
    e.Overloaded: Row(503, "server_error", default_retry_after_s=1),
    e.EngineUnavailable: Row(503, "server_error", default_retry_after_s=2),
    e.DeadlineExceeded: Row(504, "server_error", should_retry=False),
    e.LoraMuxError: Row(500, "server_error"),
}

CODES = frozenset(cls.code for cls in vars(e).values() if isinstance(cls, type) and issubclass(cls, e.LoraMuxError))


def row_of(error: e.LoraMuxError) -> Row:
    """The row of the nearest ancestor that has one."""
    return next(ROWS[cls] for cls in type(error).__mro__ if cls in ROWS)


def error_body(error: e.LoraMuxError) -> dict[str, Any]:
    """OpenAI's error object; reason, limit, value and hint stand beside its four fields where there are any."""
    body: dict[str, Any] = {
        "message": str(error),
        "type": row_of(error).type,
        "param": error.param,
        "code": error.code,
    }
    extra = {"reason": error.reason, "limit": error.limit, "value": error.value, "hint": error.hint}
    return body | {key: value for key, value in extra.items() if value is not None}


def error_json(error: e.LoraMuxError) -> bytes:
    return msgspec.json.encode({"error": error_body(error)})


def error_headers(error: e.LoraMuxError) -> dict[str, str]:
    """Advice on retries: `retry-after` in whole seconds, `retry-after-ms` beside it, `x-should-retry` where it is wrong."""
    row = row_of(error)
    after_s = error.retry_after_s if error.retry_after_s is not None else row.default_retry_after_s
    headers = {}
    if after_s is not None:
        headers |= {"retry-after": str(max(1, math.ceil(after_s))), "retry-after-ms": str(round(after_s * 1000))}
    if row.should_retry is not None:
        headers["x-should-retry"] = str(row.should_retry).lower()
    return headers


def error_event(error: e.LoraMuxError) -> bytes:
    """The error as the last event of a stream that has already begun."""
    return b"data: " + error_json(error) + b"\n\n"
