"""Whether the bytes of a file that is being fetched are the right ones, decided while they come."""

from __future__ import annotations

import asyncio
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from adapters.tree_digest import TREE_PART_BYTES, tree_of
from adapters.types import FileDigest

Data = bytes | memoryview

# One core stays free for what answers requests meanwhile.
HASHING_THREADS = max(1, min(8, (os.cpu_count() or 1) - 1))


class Check(Protocol):
    """Takes all of a file's ranges, in any order."""

    async def take(self, start: int, data: Data) -> None:
        """Hashes `data`, which lies at `start`, in a thread."""
        ...

    def is_right(self) -> bool:
        """Whether all that was taken is what the file must hold."""
        ...

    def close(self) -> None: ...


def check_of(file: FileDigest) -> Check:
    """By parts if the manifest has the digest of those: then several threads hash at once."""
    return PartsCheck(file.tree) if file.tree is not None else WholeCheck(file.sha256)


class WholeCheck:
    """SHA-256 from the beginning to the end: a range waits for its turn."""

    def __init__(self, sha256: str) -> None:
        self._sha256 = sha256
        self._hash = hashlib.sha256()
        # A thread of its own, which finds the next range there already instead of waiting for the event loop.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter-hash")
        self._turns: dict[int, asyncio.Future[None]] = {}
        self._turn(0).set_result(None)

    async def take(self, start: int, data: Data) -> None:
        await self._turn(start)
        hashed = asyncio.get_running_loop().run_in_executor(self._thread, self._hash.update, data)
        self._turn(start + len(data)).set_result(None)
        await hashed

    def _turn(self, start: int) -> asyncio.Future[None]:
        return self._turns.setdefault(start, asyncio.get_running_loop().create_future())

    def is_right(self) -> bool:
        return self._hash.hexdigest() == self._sha256

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class PartsCheck:
    """The digest by parts (`adapters.tree_digest`): ranges are whole parts but for the file's end."""

    def __init__(self, tree: str) -> None:
        self._tree = tree
        self._threads = ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="adapter-hash")
        self._digests: dict[int, list[bytes]] = {}

    async def take(self, start: int, data: Data) -> None:
        self._digests[start] = await asyncio.get_running_loop().run_in_executor(self._threads, hash_parts, data)

    def is_right(self) -> bool:
        return tree_of([digest for start in sorted(self._digests) for digest in self._digests[start]]) == self._tree

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def hash_parts(data: Data) -> list[bytes]:
    view = memoryview(data)
    return [hashlib.sha256(view[at : at + TREE_PART_BYTES]).digest() for at in range(0, len(view), TREE_PART_BYTES)]
