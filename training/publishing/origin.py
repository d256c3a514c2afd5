"""Where versions come from and where they go, as values."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapters.names import check_adapter_name, check_alias, check_base_id
from adapters.types import FileDigest, content_digest
from training.publishing.gate import Gate

WHO = "trainer"
KIND = "trained"
REVISION_VARIABLE = "LORAMUX_CODE_REVISION"


@dataclass(frozen=True, slots=True)
class Target:
    """The adapter `name` of `base` that exports become versions of, and the `alias` that moves to those that pass the gate; None
    moves nothing. With `keep_dtype` the version holds the very numbers that were evaluated; without, float32 becomes bfloat16.
    Raises InvalidRequest for names that are none."""

    base: str
    name: str
    alias: str | None = None
    gate: Gate = field(default_factory=Gate)
    keep_dtype: bool = True

    def __post_init__(self) -> None:
        check_base_id(self.base)
        check_adapter_name(self.name)
        if self.alias is not None:
            check_alias(self.alias)


@dataclass(frozen=True, slots=True)
class Origin:
    """What every manifest of a run says. `evaluation` is how the gate's metric was measured: the set, its digest, how replies
    were decoded; versions are compared only where it is the same. Without a `base_digest` it is that of the weights in
    `base_path`, read when the first version is made."""

    run: str
    spec_digest: str | None = None
    base_digest: str | None = None
    base_path: Path | None = None
    code_revision: str | None = None
    evaluation: Mapping[str, Any] = field(default_factory=dict)


def weights_digest(folder: Path) -> str | None:
    """SHA-256 of a base's weights, file by file; None where there are none. Raises OSError."""
    files = tuple(file_digest(file) for file in sorted(folder.glob("*.safetensors")))
    return content_digest(files) if files else None


def file_digest(file: Path) -> FileDigest:
    """Raises OSError."""
    with file.open("rb") as opened:
        return FileDigest(file.name, file.stat().st_size, hashlib.file_digest(opened, "sha256").hexdigest())


def code_revision(folder: Path = Path(__file__).parent) -> str | None:
    """The commit of the checkout that `folder` is in, with `-dirty` behind it where tracked files differ; None outside of one.
    LORAMUX_CODE_REVISION goes over it, for a job that has the source without its history."""
    if said := os.environ.get(REVISION_VARIABLE):
        return said
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return f"{commit}-dirty" if _git(folder, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
