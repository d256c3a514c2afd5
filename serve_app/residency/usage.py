"""What a replica's adapters were used for, kept beside the node cache, so that the busiest come back first after a restart.

One file for each base and rank: one process writes it, and a replica that takes a rank over takes its traffic over too. The rows
hold all that loading takes, so that a restart needs no store as long as the files are still on the disk.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adapters.errors import LoraMuxError
from adapters.names import AdapterRef, base_key
from adapters.types import FileDigest, ResolvedAdapter, content_digest

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
MAX_ROWS = 512


@dataclass(frozen=True, slots=True)
class Used:
    """An adapter and its popularity (`adapters.popularity`), the decayed number of its uses."""

    adapter: ResolvedAdapter
    value: float


def usage_file(cache_dir: Path, base: str, rank: int) -> Path:
    return cache_dir / ".usage" / f"{base_key(base)}.{rank}.json"


def read(path: Path) -> list[Used]:
    """The rows, the busiest first; none for a file that is missing or damaged, for it only saves time. Blocks."""
    try:
        document = json.loads(path.read_text())
        if document["schema_version"] != SCHEMA_VERSION:
            return []
        rows = [_decoded(row) for row in document["adapters"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError, LoraMuxError) as error:
        log.warning("the usage of the last run can't be read: %s", type(error).__name__)
        return []
    return sorted(rows, key=lambda used: (-used.value, used.adapter.ref))


def write(path: Path, rows: Iterable[Used]) -> None:
    """Replaces the file as a whole with the MAX_ROWS busiest rows. Blocks; raises OSError."""
    busiest = sorted(rows, key=lambda used: -used.value)[:MAX_ROWS]
    document = {"schema_version": SCHEMA_VERSION, "adapters": [_encoded(used) for used in busiest]}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        new.write_text(json.dumps(document))
        os.replace(new, path)
    finally:
        with suppress(FileNotFoundError):
            new.unlink()


def _encoded(used: Used) -> dict[str, Any]:
    adapter = used.adapter
    return {
        "ref": str(adapter.ref),
        "value": round(used.value, 6),
        "rank": adapter.rank,
        "num_modules": adapter.num_modules,
        "files": [asdict(file) for file in adapter.files],
    }


def _decoded(row: dict[str, Any]) -> Used:
    files = tuple(FileDigest(**file) for file in row["files"])
    ref = AdapterRef.parse(row["ref"])
    adapter = ResolvedAdapter(ref, content_digest(files), files, int(row["rank"]), int(row["num_modules"]))
    return Used(adapter, float(row["value"]))
