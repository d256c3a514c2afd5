"""What survives a power loss: files that were synced to the disk are marked as that, and others are hashed after the next boot.

The mark is that nobody may write them. It lies in the file itself, goes with it, and can't be older than what it vouches for.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from contextlib import suppress
from pathlib import Path

from adapters.types import ADAPTER_FILES, FileDigest

_WRITABLE = 0o222
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """The same for all processes until the machine starts anew; where it can't be known, none is ever the same."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return uuid.uuid4().hex


def is_sealed(folder: Path) -> bool:
    """Whether the adapter's files in `folder` are marked as synced; False also if it went away."""
    try:
        return not any((folder / name).stat().st_mode & _WRITABLE for name in ADAPTER_FILES)
    except (FileNotFoundError, NotADirectoryError):
        return False


def seal(folder: Path) -> None:
    """Syncs the adapter's files in `folder`, and that they are there, to the disk; then marks them. Raises OSError."""
    files = [folder / name for name in ADAPTER_FILES]
    for path in (*files, folder, folder.parent):
        _sync(path)
    for path in files:
        # Of somebody else's files, or on a disk that keeps no modes: unsealed, they are hashed after the next boot.
        with suppress(PermissionError):
            path.chmod(path.stat().st_mode & ~_WRITABLE)


def read_digests(folder: Path) -> tuple[FileDigest, ...]:
    """The files of `folder` by name, hashed; those that are gone are left out."""
    found: list[FileDigest] = []
    for name in sorted(names(folder)):
        with suppress(FileNotFoundError), (folder / name).open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            found.append(FileDigest(name, size_bytes, hashlib.file_digest(file, "sha256").hexdigest()))
    return tuple(found)


def names(folder: Path) -> list[str]:
    """What lies in `folder`; nothing if somebody removed it."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
