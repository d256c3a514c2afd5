"""What `/openapi.json` says: the shape of errors, which of them a route answers with, and what FastAPI can't see by itself."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field

WHEN = {
    400: "A malformed body, field, header or name.",
    403: "Not allowed: a protected alias without `unlock`, a source that policy does not allow.",
    404: "No such base, adapter, alias or version.",
    409: "The adapter moved on since the caller looked.",
    410: "The version was taken out of service.",
    413: "The body is over the limit.",
    422: "The adapter is refused; `reason`, `limit`, `value` and `hint` say why.",
    500: "Something that should never happen.",
    503: "Storage, engine or a place is not to be had now; `retry-after` says when to come again.",
    504: "The limit on time passed.",
}
RETRY_HEADERS = {
    "retry-after": {"description": "Whole seconds.", "schema": {"type": "string"}},
    "retry-after-ms": {"description": "The same in milliseconds.", "schema": {"type": "string"}},
}
REVISION_HEADER = {"etag": {"description": "The adapter's revision, quoted.", "schema": {"type": "string"}}}
ANSWER_HEADERS = {
    "x-request-id": "Id of the request, also in the log.",
    "x-loramux-adapter": "The ref that answered.",
    "x-loramux-tier": "Where the adapter was: `engine`, `disk`, `remote`; `base` if none was asked for.",
    "x-loramux-load": "`leader`, `follower` or `none`.",
    "x-loramux-sticky": "`key` or `none`, where the alias shares its traffic.",
    "server-timing": "Stages in ms.",
}


# `v` and digits alone would look like a version.
ALIAS_PATTERN = "([a-uw-z][a-z0-9-]{0,31}|v([0-9]{0,15}[a-z-][a-z0-9-]{0,15})?)"
_SEGMENT = "[a-z0-9][a-z0-9._-]{0,62}"
MODEL_PATTERN = f"^[A-Za-z0-9][A-Za-z0-9/._-]{{0,199}}(:({_SEGMENT}/)?{_SEGMENT}(@([1-9][0-9]{{0,8}}|{ALIAS_PATTERN}))?)?$"
ModelId = Annotated[
    str,
    Field(description="`base`, `base:name`, `base:name@7` or `base:name@alias`.", json_schema_extra={"pattern": MODEL_PATTERN}),
]


class Problem(BaseModel):
    """OpenAI's error object, with our sub-code, limit and value beside it."""

    model_config = ConfigDict(extra="allow")

    message: str
    type: str
    param: str | None = None
    code: str
    reason: str | None = None
    limit: Any = None
    value: Any = None
    hint: str | None = None


class ErrorAnswer(BaseModel):
    """Every error on every route."""

    error: Problem


class FreeAnswer(BaseModel):
    """An answer that the engine shapes."""

    model_config = ConfigDict(extra="allow")


class ModelRequest(BaseModel):
    """A request of OpenAI's API. The gateway reads these fields; the engine checks all others."""

    model_config = ConfigDict(extra="allow")

    model: ModelId
    stream: bool | None = Field(default=None, description="Whether the answer comes as server-sent events.")


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may answer with these errors, and with those that any route may."""
    rows: dict[int | str, dict[str, Any]] = {}
    for status in sorted({*statuses, 400, 500, 503}):
        rows[status] = {"model": ErrorAnswer, "description": WHEN[status]}
        if status == 503:
            rows[status]["headers"] = RETRY_HEADERS
    return rows


def answers(
    model: type[BaseModel], *, headers: dict[str, Any] | None = None, status: int = 200
) -> dict[int | str, dict[str, Any]]:
    """The `responses` row of a success."""
    return {status: {"model": model, "description": "Done.", **({"headers": headers} if headers else {})}}


def spoken(*content_types: str) -> dict[int | str, dict[str, Any]]:
    """The `responses` row of an answer that the engine makes, with the headers that the gateway puts on it."""
    headers = {name: {"description": text, "schema": {"type": "string"}} for name, text in ANSWER_HEADERS.items()}
    content = {
        kind: {"schema": {"type": "object"} if kind == "application/json" else {"type": "string"}} for kind in content_types
    }
    return {200: {"description": "The engine's answer.", "headers": headers, "content": content}}


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its JSON body by itself."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def header(name: str, about: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A request header that a route reads by itself, for `openapi_extra`."""
    return {"name": name, "in": "header", "required": False, "description": about, "schema": schema}


def documented(app: FastAPI) -> None:
    """Makes the app answer with our document. FastAPI's own 422 is taken out: what it finds wrong is a 400 here."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _without_unused(_without_nulls(_without_validation_rows(_raw(app))))
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _raw(app: FastAPI) -> dict[str, Any]:
    about = "OpenAI's API over many LoRA adapters, and the registry of their versions."
    return get_openapi(title=app.title, version=app.version, description=about, routes=app.routes)


def _without_validation_rows(document: dict[str, Any]) -> dict[str, Any]:
    for path in document["paths"].values():
        for operation in path.values():
            row = operation["responses"].get("422", {})
            if "HTTPValidationError" in str(row):
                del operation["responses"]["422"]
    return document


def _without_nulls(document: dict[str, Any]) -> dict[str, Any]:
    """A value of a query or a header that may be left out is not null when it is there."""
    for path in document["paths"].values():
        for parameter in (parameter for operation in path.values() for parameter in operation.get("parameters", [])):
            branches = parameter["schema"].pop("anyOf", [])
            kept = [branch for branch in branches if branch.get("type") != "null"]
            parameter["schema"] |= kept[0] if len(kept) == 1 else {"anyOf": kept} if kept else {}
    return document


def _without_unused(document: dict[str, Any]) -> dict[str, Any]:
    schemas = document.get("components", {}).get("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return document
