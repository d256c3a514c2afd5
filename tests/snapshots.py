"""Shapes of JSON, kept in a file: keys and kinds, not values. `LORAMUX_WRITE_SNAPSHOTS=1 pytest ...` writes what is true now."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

WRITE_VARIABLE = "LORAMUX_WRITE_SNAPSHOTS"


def shape(value: Any) -> Any:
    """Mappings keep their keys, lists become the shape of their first item, the rest the name of its kind."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return {"NoneType": "null", "str": "text", "bool": "truth", "int": "number", "float": "number"}[type(value).__name__]


def check_snapshot(path: Path, found: Any) -> None:
    """Raises AssertionError if `found` is not what the file holds."""
    if os.environ.get(WRITE_VARIABLE):
        path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    assert found == json.loads(path.read_text()), f"the shape changed; if it is meant, run again with {WRITE_VARIABLE}=1"
