"""The digest of a large file by its parts: it can be checked by many threads at once, in whatever order the parts come.

The SHA-256 of a whole file keeps one thread busy for most of a fast fetch. The tree's digest is the SHA-256 over the SHA-256s of
the file's parts of `TREE_PART_BYTES`. It stands beside the file's own digest, which alone says what the file is.
"""

from __future__ import annotations

import hashlib

TREE_PART_BYTES = 8 * 2**20


class TreeDigest:
    """Takes a file from its beginning to its end, in pieces of any size."""

    def __init__(self) -> None:
        self._root = hashlib.sha256()
        self._part = hashlib.sha256()
        self._part_bytes = 0
        self._num_parts = 0

    def update(self, data: bytes | memoryview) -> None:
        """Takes the next bytes of the file."""
        rest = memoryview(data)
        while rest:
            if self._part_bytes == TREE_PART_BYTES:
                self._end_part()
            piece = rest[: TREE_PART_BYTES - self._part_bytes]
            self._part.update(piece)
            self._part_bytes += len(piece)
            rest = rest[len(piece) :]

    def hexdigest(self) -> str | None:
        """The tree's digest; None for a file of one part, which gains nothing by it. Ends the taking."""
        if self._num_parts == 0:
            return None
        self._end_part()
        return self._root.hexdigest()

    def _end_part(self) -> None:
        self._root.update(self._part.digest())
        self._part, self._part_bytes = hashlib.sha256(), 0
        self._num_parts += 1


def tree_of(part_digests: list[bytes]) -> str:
    """The tree's digest (hex) of a file whose parts have these SHA-256s, in order."""
    return hashlib.sha256(b"".join(part_digests)).hexdigest()
