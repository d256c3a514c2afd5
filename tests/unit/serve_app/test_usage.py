"""The memory of a replica's last run: there and back, and harmless when it is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.names import AdapterRef
from adapters.types import FileDigest, ResolvedAdapter, content_digest
from serve_app.residency import usage
from serve_app.residency.usage import MAX_ROWS, Used


def used(name: str, value: float) -> Used:
    files = (FileDigest("adapter_config.json", 2, "a" * 64), FileDigest("adapter_model.safetensors", 10, "b" * 64, "c" * 64))
    return Used(ResolvedAdapter(AdapterRef("Qwen/Qwen3", name, 2), content_digest(files), files, 8, 4), value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return usage.usage_file(tmp_path / "cache", "Qwen/Qwen3", 1)


def test_what_was_used_comes_back_whole_and_the_busiest_first(path: Path):
    rows = [used("rare", 0.5), used("team/busy", 7.25), used("some", 3)]
    usage.write(path, rows)
    assert usage.read(path) == [rows[1], rows[2], rows[0]]


def test_digests_by_parts_come_back_too(path: Path):
    usage.write(path, [used("maze", 1)])
    assert [file.tree for file in usage.read(path)[0].adapter.files] == [None, "c" * 64]


def test_only_the_busiest_are_kept(path: Path):
    usage.write(path, [used(f"n{number}", number) for number in range(MAX_ROWS + 10)])
    found = usage.read(path)
    assert len(found) == MAX_ROWS
    assert found[-1].adapter.ref.name == "n10"


def test_bases_and_ranks_have_files_of_their_own(tmp_path: Path):
    paths = {usage.usage_file(tmp_path, base, rank) for base in ("a/b", "a%2Fb") for rank in (0, 1)}
    assert len(paths) == 4


def test_writing_leaves_nothing_beside_the_file(path: Path):
    usage.write(path, [used("a", 1)])
    usage.write(path, [used("b", 1)])
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"schema_version": 2, "adapters": []}',
        '{"schema_version": 1}',
        '{"schema_version": 1, "adapters": [{}]}',
        '{"schema_version": 1, "adapters": [{"ref": "b:n@1", "value": 1, "rank": 8, "num_modules": 1, "files": [{"sha": 1}]}]}',
    ],
)
def test_a_file_that_makes_no_sense_is_as_none(path: Path, text: str):
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert usage.read(path) == []


def test_a_file_that_is_not_there_is_no_trouble(path: Path):
    assert usage.read(path) == []
