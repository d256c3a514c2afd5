"""Prepared adapters for tests: real digests over small made-up bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from adapters.types import CONFIG_FILE, WEIGHTS_FILE, FileDigest, PreparedAdapter, content_digest


def prepared(content: str | bytes = "one", path: Path | None = None) -> PreparedAdapter:
    """An adapter whose weights are `content`; in a file at `path` if one is given."""
    weights = content.encode() if isinstance(content, str) else content
    config = b'{"r": 8}'
    if path is not None:
        path.write_bytes(weights)
    files = (_file(CONFIG_FILE, config), _file(WEIGHTS_FILE, weights))
    return PreparedAdapter(
        config=config,
        weights=path or weights,
        files=files,
        digest=content_digest(files),
        rank=8,
        alpha=16.0,
        modules=("q_proj", "v_proj"),
        num_modules=4,
        base_fingerprint="f" * 8,
        warnings=("small",),
    )


def _file(name: str, data: bytes) -> FileDigest:
    return FileDigest(name, len(data), hashlib.sha256(data).hexdigest())
