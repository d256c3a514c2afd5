"""Exports on disk: which are there and whole, what was known of them when they were saved, and which content they hold.

An export is `global_step_N/policy/` with the adapter's two files, and perhaps others. Beside it lies `saved.json`, which the
publisher writes when it is offered the export, so that whoever scans after a crash still knows its metrics.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from adapters.adoption.candidates import Candidate, Looker
from adapters.settings import StoreSettings
from adapters.store import open_store
from adapters.types import content_digest
from training.publishing.origin import file_digest

RECORD = "saved.json"
POLICY = "policy"

_EXPORT = re.compile(rf"global_step_\d+/{POLICY}/")


@dataclass(frozen=True, slots=True)
class Export:
    """An adapter in `folder` as it was after `step` of a run, with what was known of it then. `run` and `spec_digest` are None
    where nobody said."""

    step: int
    folder: Path
    metrics: Mapping[str, float] = field(default_factory=dict)
    run: str | None = None
    spec_digest: str | None = None


def export_digest(folder: Path) -> str:
    """Of the adapter's files as they lie there, before the publish contract rewrites anything. Raises OSError."""
    return content_digest(tuple(file_digest(file) for file in sorted(folder.glob("adapter_*")) if file.is_file()))


def record(export: Export, digest: str) -> None:
    """Writes `saved.json` beside the export. Raises OSError."""
    if export.folder.name != POLICY:
        return
    row = asdict(export) | {"folder": POLICY, "metrics": finite(export.metrics), "export_digest": digest}
    draft = export.folder.parent / f".{RECORD}.{os.getpid()}"
    draft.write_text(json.dumps(row, sort_keys=True) + "\n")
    draft.replace(export.folder.parent / RECORD)


def recorded(export: Export, digest: str) -> Export:
    """The export with what `saved.json` says of it; one that tells of other content, or is no JSON, says nothing."""
    try:
        row = json.loads((export.folder.parent / RECORD).read_text())
        if row["export_digest"] != digest:
            return export
        return Export(export.step, export.folder, finite(row["metrics"]), row["run"], row["spec_digest"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return export


def finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that a manifest can hold: a loss that became NaN must not keep an adapter from being a version."""
    return {
        str(key): float(value)
        for key, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


class Exports:
    """Looks for exports below `export_path`, again and again. One is ready when both files are whole (trainers that write in
    place show them half done) and nothing changed for `settle_s` and between two looks."""

    def __init__(self, export_path: Path, *, settle_s: float = 0.0) -> None:
        self.path = export_path.absolute()
        self._looker = Looker(open_store(StoreSettings(url=self.path.as_uri())), default_name="export", settle_s=settle_s)

    async def look(self) -> tuple[tuple[Export, ...], tuple[str, ...]]:
        """Those that are ready, by step, and what the others wait for. The first look finds none ready. Raises StoreError."""
        found = [one for one in await self._looker.look() if one.step is not None and _EXPORT.fullmatch(one.prefix)]
        waiting = tuple(f"step {one.step}: {one.reason}" for one in found if not one.is_ready)
        return tuple(self._export(one) for one in found if one.is_ready), waiting

    def _export(self, candidate: Candidate) -> Export:
        assert candidate.step is not None
        return Export(candidate.step, self.path / candidate.prefix.rstrip("/"))
