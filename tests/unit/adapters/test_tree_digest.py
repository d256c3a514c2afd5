"""The digest of a file by its parts."""

from __future__ import annotations

import hashlib

import pytest

from adapters.tree_digest import TREE_PART_BYTES, TreeDigest, tree_of


def digest_of(data: bytes, piece_bytes: int) -> str | None:
    digest = TreeDigest()
    for start in range(0, len(data), piece_bytes):
        digest.update(data[start : start + piece_bytes])
    return digest.hexdigest()


@pytest.mark.parametrize("size", [0, 1, TREE_PART_BYTES])
def test_a_file_of_one_part_needs_none(size: int) -> None:
    assert digest_of(b"x" * size, 2**20) is None


@pytest.mark.parametrize("size", [TREE_PART_BYTES + 1, 2 * TREE_PART_BYTES, 2 * TREE_PART_BYTES + 5])
def test_pieces_of_any_size_give_the_digest_over_the_parts(size: int) -> None:
    data = hashlib.shake_256(b"seed").digest(2**16) * (size // 2**16 + 1)
    data = data[:size]
    parts = [hashlib.sha256(data[start : start + TREE_PART_BYTES]).digest() for start in range(0, size, TREE_PART_BYTES)]
    for piece_bytes in (1_000_003, TREE_PART_BYTES, TREE_PART_BYTES + 1, 3 * TREE_PART_BYTES):
        assert digest_of(data, piece_bytes) == tree_of(parts)
