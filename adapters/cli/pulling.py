"""A version's files on this disk: read in ranges, verified by digest, visible only when whole."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO

from adapters.errors import AdapterCorrupt, DiskFull, InvalidRequest, StoreMissing, VersionRetired
from adapters.registry import layout
from adapters.store import Store
from adapters.types import FileDigest, Manifest

RANGE_BYTES = 8 * 2**20

Progress = Callable[[int, int], None]


async def pull_version(store: Store, manifest: Manifest, folder: Path, progress: Progress | None = None) -> bool:
    """Leaves exactly the version's files in `folder`; False if they lay there already.

    Raises InvalidRequest for a folder that holds something else, AdapterCorrupt for bytes that are not what the manifest says,
    VersionRetired for a collected version, DiskFull, and store errors.
    """
    if _lies_there(folder, manifest):
        return False
    work = _work_folder(folder)
    try:
        await _fetch(store, manifest, work, progress)
        os.replace(work, folder)  # an empty folder gives way
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return True


@contextlib.asynccontextmanager
async def pulled(store: Store, manifests: tuple[Manifest, ...], progress: Progress | None = None) -> AsyncIterator[list[Path]]:
    """The versions' files in folders that vanish afterwards. Raises what `pull_version` raises."""
    with tempfile.TemporaryDirectory(prefix="loramux-") as work:
        folders = []
        for number, manifest in enumerate(manifests):
            folders.append(Path(work) / str(number))
            await pull_version(store, manifest, folders[-1], progress)
        yield folders


def _lies_there(folder: Path, manifest: Manifest) -> bool:
    if not folder.is_dir() or not any(folder.iterdir()):
        return False
    if all(_is_whole(folder / file.name, file) for file in manifest.files):
        return True
    raise InvalidRequest("the folder holds something else", value=str(folder), hint="name another one, or empty it")


def _work_folder(folder: Path) -> Path:
    """Beside the folder that is to be, so that a rename makes it visible at once."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        work.chmod(0o755)
    except OSError as error:
        raise InvalidRequest("the folder can't be made", value=str(folder), hint=error.strerror) from None
    return work


async def _fetch(store: Store, manifest: Manifest, work: Path, progress: Progress | None) -> None:
    done = 0
    for file in manifest.files:
        seen = hashlib.sha256()
        with (work / file.name).open("wb") as sink:
            for start in range(0, file.size_bytes, RANGE_BYTES):
                data = await _range(store, manifest, file, start)
                seen.update(data)
                _write(sink, data, manifest.size_bytes)
                done += len(data)
                if progress:
                    progress(done, manifest.size_bytes)
        if seen.hexdigest() != file.sha256:
            raise AdapterCorrupt(f"the stored `{file.name}` is not what its manifest says", reason="digest_mismatch")


async def _range(store: Store, manifest: Manifest, file: FileDigest, start: int) -> bytes:
    try:
        return await store.get_range(
            layout.blob_key(manifest.digest, file.name), start, min(RANGE_BYTES, file.size_bytes - start)
        )
    except StoreMissing:
        raise VersionRetired(
            f"the files of `{manifest.ref}` are gone", reason="collected", hint="publish the same content again to bring it back"
        ) from None


def _write(sink: BinaryIO, data: bytes, need_bytes: int) -> None:
    try:
        sink.write(data)
    except OSError as error:
        raise DiskFull("the files can't be written here", limit=error.strerror, value=f"{need_bytes} bytes") from None


def _is_whole(path: Path, file: FileDigest) -> bool:
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256
