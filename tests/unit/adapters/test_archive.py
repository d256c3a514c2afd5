"""Archives of strangers: unpacked when they are what they say, refused by code when they are not, never outside the folder."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import time
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from adapters.contract import inspect, opened
from adapters.contract.archive import MAX_MEMBERS
from adapters.errors import AdapterRefused, InvalidRequest
from tests.adapter_folders import TEXT, plain

ROOM = 2**20


def tar_of(path: Path, *members: tuple[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def zip_of(path: Path, *members: tuple[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return path


def adapter_members(tmp_path: Path, below: str = "") -> list[tuple[str, bytes]]:
    folder = plain().write(tmp_path / "folder")
    return [(below + file.name, file.read_bytes()) for file in sorted(folder.iterdir())]


def digest_of(source: Path) -> str | None:
    with opened(source, ROOM) as folder:
        return inspect(folder, TEXT).digest


def refused(source: Path, max_bytes: int = ROOM) -> AdapterRefused:
    with pytest.raises(AdapterRefused) as caught, opened(source, max_bytes):
        pass
    return caught.value


@pytest.mark.parametrize("below", ["", "./", "tuned/", "run/global_step_3/lora_adapter/"])
@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tgz", "a.zip", "A.ZIP"])
def test_an_adapter_in_any_archive_is_the_adapter(name, below, tmp_path):
    members = adapter_members(tmp_path, below)
    if name.lower().endswith(".zip"):
        source = zip_of(tmp_path / name, *members)
    else:
        source = tar_of(tmp_path / name, *members, mode="w" if name.endswith(".tar") else "w:gz")

    assert digest_of(source) == digest_of(tmp_path / "folder") is not None


def test_what_a_desktop_adds_is_passed_over(tmp_path):
    extra = [("__MACOSX/tuned/._adapter_config.json", b"x"), ("tuned/._adapter_config.json", b"x")]
    source = zip_of(tmp_path / "a.zip", *adapter_members(tmp_path, "tuned/"), *extra)

    assert digest_of(source) == digest_of(tmp_path / "folder")


def test_the_unpacked_folder_is_gone_afterwards(tmp_path):
    with opened(tar_of(tmp_path / "a.tar.gz", ("x", b"1")), ROOM) as folder:
        assert (folder / "x").read_bytes() == b"1"

    assert not folder.exists()


def test_a_folder_is_opened_as_it_is(tmp_path):
    with opened(tmp_path, 0) as folder:
        assert folder == tmp_path


def test_a_file_of_another_kind_is_a_wrong_request(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    for name in ("adapter_model.safetensors", "nowhere.zip"):
        with pytest.raises(InvalidRequest), opened(tmp_path / name, ROOM):
            pass


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../outside", "a/../../outside", "a\\b", "C:x", "a\x07b", "x/" * 9 + "y", "n" * 300]
)
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_name_that_leaves_the_folder_is_refused(name, kind, tmp_path):
    source = tar_of(tmp_path / "a.tar", (name, b"x"), mode="w") if kind == "tar" else zip_of(tmp_path / "a.zip", (name, b"x"))
    error = refused(source)

    assert (error.reason, bool(error.limit), bool(error.value)) == ("archive_unsafe", True, True)
    assert {file.name for file in tmp_path.iterdir()} == {source.name}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE])
def test_links_and_devices_in_a_tar_are_refused(kind, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        info = tarfile.TarInfo("adapter_config.json")
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)

    assert refused(tmp_path / "a.tar").reason == "archive_unsafe"


def test_a_link_in_a_zip_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        info = zipfile.ZipInfo("adapter_config.json")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")

    assert refused(tmp_path / "a.zip").reason == "archive_unsafe"


@pytest.mark.parametrize("names", [("a", "a"), ("a", "a/b"), ("a/b", "a")])
def test_two_members_of_one_name_are_refused(names, tmp_path):
    source = tar_of(tmp_path / "a.tar", *((name, b"x") for name in names), mode="w")

    assert refused(source).reason == "archive_unsafe"


def test_too_many_members_are_refused(tmp_path):
    members = [(f"f{number}", b"") for number in range(MAX_MEMBERS + 1)]

    for source in (tar_of(tmp_path / "a.tar.gz", *members), zip_of(tmp_path / "a.zip", *members)):
        error = refused(source)
        assert (error.reason, error.limit, error.value) == ("archive_too_large", MAX_MEMBERS, MAX_MEMBERS + 1)


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_a_bomb_is_refused_before_it_is_unpacked(kind, tmp_path):
    zeros = b"\0" * (64 * 2**20)
    source = tmp_path / f"a.{kind}"
    tar_of(source, ("x", zeros)) if kind == "tar.gz" else zip_of(source, ("x", zeros))
    del zeros
    tracemalloc.start()
    error = refused(source)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert source.stat().st_size < 200_000
    assert (error.reason, error.limit) == ("archive_too_large", ROOM)
    assert peak < 8 * 2**20


def test_a_zip_that_lies_about_a_size_is_stopped_while_it_unpacks(tmp_path):
    source = zip_of(tmp_path / "a.zip", ("x", b"\0" * (8 * 2**20)))
    data = bytearray(source.read_bytes())
    at = data.rindex(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", 10)
    source.write_bytes(bytes(data))

    assert refused(source).reason in ("archive_too_large", "archive_corrupt")


def test_bytes_between_members_count_too(tmp_path):
    source = tmp_path / "a.tar.gz"
    with gzip.open(source, "wb") as file:
        info = tarfile.TarInfo("x")
        info.size = 10**12
        file.write(info.tobuf())
        for _ in range(20):
            file.write(b"\0" * 2**20)

    assert refused(source).reason == "archive_too_large"


def test_a_header_of_many_megabytes_is_not_read(tmp_path):
    source = tmp_path / "a.tar.gz"
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 200 * 2**20
    with gzip.open(source, "wb") as file:
        file.write(info.tobuf())
        file.write(b"a" * 2**20)

    assert refused(source, 2**33).reason == "archive_corrupt"


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.zip"])
@pytest.mark.parametrize("data", [b"", b"nonsense", b"\x1f\x8b\x08\x00garbage", b"PK\x05\x06" + b"\xff" * 30, b"x" * 2000])
def test_what_is_no_archive_is_refused(name, data, tmp_path):
    (tmp_path / name).write_bytes(data)
    error = refused(tmp_path / name)

    assert error.reason in ("archive_corrupt", "archive_too_large")
    assert str(tmp_path) not in str(error)


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip"])
def test_an_archive_cut_off_anywhere_is_refused(kind, tmp_path):
    members = adapter_members(tmp_path)
    source = tmp_path / f"a.{kind}"
    if kind == "zip":
        zip_of(source, *members)
    else:
        tar_of(source, *members, mode="w" if kind == "tar" else "w:gz")
    data, whole = source.read_bytes(), digest_of(tmp_path / "folder")
    for cut in range(1, len(data), 997):
        source.write_bytes(data[:cut])
        try:
            with opened(source, ROOM) as folder:
                seen = inspect(folder, TEXT)
                assert seen.findings or seen.digest == whole  # only padding was cut off
        except AdapterRefused as error:
            assert error.reason == "archive_corrupt"


def test_an_archive_that_points_backwards_ends(tmp_path):
    info = tarfile.TarInfo("x")
    block = bytearray(info.tobuf(format=tarfile.GNU_FORMAT))
    block[124:136] = b"\xff" * 8 + struct.pack(">i", -512)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    (tmp_path / "a.tar").write_bytes(bytes(block) * 4)
    start = time.monotonic()

    assert refused(tmp_path / "a.tar").reason in ("archive_corrupt", "archive_unsafe")
    assert time.monotonic() - start < 5
