"""Every setting as a row of the table in serve_app/README.md. `python -m tests.repo.settings_table` prints the table."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from adapters.settings import Section
from serve_app.settings import Settings

HEADER = "| key | default | what |\n| --- | --- | --- |"
UNITS = ((2**30, "GiB"), (2**20, "MiB"))


def fields(section: type[Section] = Settings, above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Key and field of every value that a user can set, in the order of the file; a list's items are `key[]`."""
    for name, field in section.model_fields.items():
        parts = _parts(field.annotation)
        nested = [part for part in parts if isinstance(part, type) and issubclass(part, Section)]
        if len(nested) < len(parts) or not nested:
            yield f"{above}{name}", field
        for part in nested:
            listed = "[]" if typing.get_origin(field.annotation) is tuple else ""
            yield from fields(part, f"{above}{name}{listed}.")


def _parts(annotation: object) -> list[object]:
    """The types that a union or tuple is made of, `None` and `...` left out; others stand for themselves."""
    parts = [part for part in typing.get_args(annotation) if part not in (type(None), ...)]
    return parts or [annotation]


def row(key: str, field: FieldInfo) -> str:
    return f"| `{key}` | {_default(field)} | {field.description} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, SecretStr) or value in (None, (), {}):
        return "none"
    if isinstance(value, int) and not isinstance(value, bool):
        for size, unit in UNITS:
            if value >= size and value % size == 0:
                return f"`{value}` ({value // size} {unit})"
    return f"`{value if isinstance(value, (str, Path)) else repr(value)}`"


if __name__ == "__main__":
    print(HEADER, *(row(key, field) for key, field in fields()), sep="\n")
