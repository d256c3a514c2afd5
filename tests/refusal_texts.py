"""The refusals of the publish contract as clients see them, so that their texts are reviewed like an interface.

`python -m tests.refusal_texts` writes `tests/unit/adapters/refusals.json` anew; look at the difference before committing it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adapters.contract import inspect
from adapters.errors import AdapterRefused
from tests.exporter_layouts import LAYOUTS
from tests.unit.adapters.test_contract import CASES

SNAPSHOT = Path(__file__).parent / "unit" / "adapters" / "refusals.json"


def collected(place: Path) -> dict[str, list[dict[str, Any]]]:
    """All findings by the name of their case. Folders are written below `place`."""
    return {name: [as_row(finding) for finding in findings] for name, findings in _refused(place)}


def as_row(finding: AdapterRefused) -> dict[str, Any]:
    return {
        "code": finding.reason,
        "error": finding.code,
        "message": finding.message,
        "limit": finding.limit,
        "value": finding.value,
        "hint": finding.hint,
    }


def text_of(snapshot: dict[str, list[dict[str, Any]]]) -> str:
    return json.dumps(snapshot, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _refused(place: Path) -> Iterator[tuple[str, tuple[AdapterRefused, ...]]]:
    for number, case in enumerate(CASES):
        folder = case.folder(place / f"case-{number}")
        yield case.name, inspect(folder, case.contract, case.options).findings
    for number, layout in enumerate(LAYOUTS):
        layout.write(place / f"layout-{number}")
        findings = inspect(place / f"layout-{number}", layout.contract, layout.options).findings
        if findings:
            yield layout.name, findings


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        SNAPSHOT.write_text(text_of(collected(Path(folder))))
