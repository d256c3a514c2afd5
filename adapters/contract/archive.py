"""Adapters as services hand them out: a tar or zip file, unpacked with strict members and hard limits.

Nothing of an archive is believed: names, sizes and counts are checked, bytes are counted while they come out of the decompressor.
"""

from __future__ import annotations

import gzip
import io
import stat
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from adapters.contract.refusals import refusal, shown
from adapters.errors import AdapterRefused, InvalidRequest
from adapters.types import ADAPTER_FILES

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".zip")
MAX_MEMBERS = 2000
MAX_DEPTH = 8
MAX_NAME_CHARS = 255
# A zip file's list of members is read as a whole before the first of them.
MAX_DIRECTORY_BYTES = 4 * 2**20

_CHUNK = 2**20
# The decompressors of other kinds may take any amount of memory before they give the first byte.
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_DESKTOP_FILES = frozenset({".DS_Store", "Thumbs.db", "desktop.ini"})
# What tarfile may read in one piece: long names and attributes are read whole, before anybody can look at them.
_MAX_READ = 4 * 2**20
_BROKEN = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    gzip.BadGzipFile,
    EOFError,
    struct.error,
    NotImplementedError,
    ValueError,
)


@contextmanager
def opened(source: Path, max_bytes: int) -> Iterator[Path]:
    """The folder that `source` is, or the unpacked folder that it holds, which is gone afterwards.

    A single folder around everything is stepped into. `max_bytes` limits what is unpacked, headers and all. Raises
    InvalidRequest if `source` is neither a folder nor an archive, and the refusals `archive_unsafe`, `archive_too_large` and
    `archive_corrupt`.
    """
    if source.is_dir():
        yield source
        return
    if not source.is_file():
        raise InvalidRequest("the source is not there", param="source")
    if not is_archive(source.name):
        text = f"the source is neither a folder nor an archive ({', '.join(SUFFIXES)})"
        raise InvalidRequest(text, param="source", limit=list(SUFFIXES), hint="give the folder that holds the two files")
    with tempfile.TemporaryDirectory(prefix="loramux-archive-") as place:
        _unpack(source, _Folder(Path(place), max_bytes))
        yield _inner(Path(place))


def is_archive(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def _unpack(source: Path, folder: _Folder) -> None:
    try:
        with source.open("rb") as file:
            if source.name.lower().endswith(".zip"):
                _unpack_zip(file, folder)
            elif file.read(2) == b"\x1f\x8b":
                file.seek(0)
                with gzip.GzipFile(fileobj=file) as plain:
                    counted = _Counted(plain, folder.max_bytes)
                    _unpack_tar(counted, folder)
                    # The checksum is at the very end, behind the padding that a tar ends with.
                    while counted.read(_CHUNK):
                        pass
            else:
                file.seek(0)
                _unpack_tar(_Counted(file, folder.max_bytes), folder)
    except AdapterRefused:
        raise
    except _BROKEN as error:
        text = "the archive is broken or of another kind than its name says"
        raise refusal("archive_corrupt", text, limit="a whole tar or zip file", value=type(error).__name__) from None


def _unpack_tar(file: _Counted, folder: _Folder) -> None:
    with tarfile.open(fileobj=file, mode="r:") as tar:  # type: ignore[call-overload]
        while (member := tar.next()) is not None:
            tar.members.clear()  # the list would grow with each member
            folder.count()
            if member.isdir():
                continue
            if not member.isreg() or member.size < 0:
                raise _unsafe("a link or a special file", member.name)
            if (data := tar.extractfile(member)) is not None:
                folder.add(member.name, member.size, data)


def _unpack_zip(file: BinaryIO, folder: _Folder) -> None:
    _check_directory(file)
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            folder.count()
            mode = info.external_attr >> 16
            if info.is_dir():
                continue
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
                raise _unsafe("a link or a special file", info.filename)
            if info.flag_bits & 1:
                raise _unsafe("an encrypted file", info.filename)
            if info.compress_type not in _COMPRESSIONS:
                raise refusal(
                    "archive_corrupt",
                    "a member is compressed in a way that is not taken",
                    limit="deflate",
                    value=info.compress_type,
                )
            with archive.open(info) as data:
                folder.add(info.filename, info.file_size, data)


def _check_directory(file: BinaryIO) -> None:
    """Refuses a list of members that is too long, before it is read."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - 65_557))
    tail = file.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) < at + 22:
        raise zipfile.BadZipFile
    members, length = struct.unpack("<H", tail[at + 10 : at + 12])[0], struct.unpack("<I", tail[at + 12 : at + 16])[0]
    if members > MAX_MEMBERS:
        raise _too_many(members)
    if length > MAX_DIRECTORY_BYTES:
        raise _too_large(MAX_DIRECTORY_BYTES, length)
    file.seek(0)


class _Counted(io.RawIOBase):
    """A tar's bytes, only forwards, in small pieces and up to a limit."""

    def __init__(self, file: IO[bytes], limit: int) -> None:
        self._file = file
        self._limit = limit

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_READ:
            raise tarfile.ReadError("a header larger than any that is needed")
        self._check(self._file.tell() + size)
        return self._file.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET or offset < self._file.tell():
            raise tarfile.ReadError("the archive points backwards")
        self._check(offset)
        return self._file.seek(offset)

    def tell(self) -> int:
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def _check(self, position: int) -> None:
        # Padding to whole records follows the last member, and each has a header.
        most = self._limit + MAX_MEMBERS * 2 * tarfile.BLOCKSIZE + _MAX_READ
        if position > most:
            raise _too_large(self._limit, position)


class _Folder:
    """Where members go, with what they have used of the limits."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self._bytes = 0
        self._members = 0

    def count(self) -> None:
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise _too_many(self._members)

    def add(self, name: str, size: int, data: IO[bytes]) -> None:
        """Writes one member; `size` is what the archive says of it."""
        parts = _checked_parts(name)
        if not parts:
            return
        if self._bytes + size > self.max_bytes:
            raise _too_large(self.max_bytes, self._bytes + size)
        target = self.path.joinpath(*parts)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                while piece := data.read(_CHUNK):
                    self._bytes += len(piece)
                    if self._bytes > self.max_bytes:
                        raise _too_large(self.max_bytes, self._bytes)
                    file.write(piece)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            raise _unsafe("two members of one name", name) from None


def _checked_parts(name: str) -> list[str]:
    """The parts of a member's name; none for what a desktop adds by itself."""
    if name.startswith("/") or "\\" in name or not name.isprintable() or ":" in name[:2]:
        raise _unsafe("a name that is no relative path", name)
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise _unsafe("a name that leaves the folder", name)
    if len(parts) > MAX_DEPTH or any(len(part.encode(errors="replace")) > MAX_NAME_CHARS for part in parts):
        raise _unsafe("a name that is too long or too deep", name)
    if parts and ("__MACOSX" in parts or parts[-1].startswith("._") or parts[-1] in _DESKTOP_FILES):
        return []
    return parts


def _inner(folder: Path) -> Path:
    """The folder itself, or the only one that lies in it, and so on."""
    for _ in range(MAX_DEPTH):
        entries = list(folder.iterdir())
        if any(entry.name in ADAPTER_FILES for entry in entries) or len(entries) != 1 or not entries[0].is_dir():
            break
        folder = entries[0]
    return folder


def _unsafe(what: str, name: str) -> AdapterRefused:
    text = f"the archive holds {what}: `{shown(name)}`"
    return refusal("archive_unsafe", text, limit="plain files below one folder", value=shown(name))


def _too_many(members: int) -> AdapterRefused:
    text = f"the archive has more than {MAX_MEMBERS} members"
    return refusal("archive_too_large", text, limit=MAX_MEMBERS, value=members)


def _too_large(limit: int, size: int) -> AdapterRefused:
    return refusal("archive_too_large", f"the archive unpacks to more than {limit} bytes", limit=limit, value=size)
