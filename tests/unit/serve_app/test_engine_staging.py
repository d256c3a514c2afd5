"""The door through which adapters are read ahead of the engine's loop. What vLLM makes of them: `test_contracts_engine`."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from serve_app.engine import staging as engine_staging
from serve_app.engine.staging import Door, Piece, StageRequest, Staging, StagingFailed, cut, read_header, stage

REQUEST = StageRequest("base:name@1", 7, "/somewhere")


def door(folder: Path, work, name: str = "door") -> str:
    Door(folder / name, work, lambda: None)
    return str(folder / name)


async def test_every_worker_reads_the_adapter(tmp_path: Path):
    seen: list[tuple[int, StageRequest]] = []
    doors = [door(tmp_path, lambda request, n=n: seen.append((n, request)), str(n)) for n in range(2)]
    await stage(doors, REQUEST)
    assert sorted(seen, key=lambda row: row[0]) == [(0, REQUEST), (1, REQUEST)]


async def test_a_worker_that_cannot_read_says_what_kind_of_error_it_was(tmp_path: Path):
    def fail(request: StageRequest) -> None:
        raise ValueError("rank 16 is over max_lora_rank")

    with pytest.raises(StagingFailed, match="max_lora_rank") as caught:
        await stage([door(tmp_path, fail)], REQUEST)
    assert caught.value.kind == "ValueError"


async def test_a_shut_door_is_an_error_of_the_system(tmp_path: Path):
    with pytest.raises(OSError):
        await stage([str(tmp_path / "nobody")], REQUEST)


async def test_adapters_are_read_at_the_same_time(tmp_path: Path):
    both = threading.Barrier(2, timeout=10)
    one = door(tmp_path, lambda request: both.wait())
    await asyncio.gather(stage([one], REQUEST), stage([one], StageRequest("base:other@1", 8, "/other")))


async def test_whoever_asked_and_went_away_leaves_the_door_open(tmp_path: Path):
    go = threading.Event()
    one = door(tmp_path, lambda request: go.wait(10))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stage([one], REQUEST), 0.05)
    go.set()
    await stage([one], REQUEST)


class Manager:
    """vLLM's worker manager, as far as `Staging` knows it."""

    def __init__(self) -> None:
        self.loads: list[int] = []
        self.merges: list[object] = []
        self.removed: list[int] = []
        self._adapter_manager = SimpleNamespace(_is_moe=False, modules={}, _create_merged_loras_inplace=self.merges.append)

    def _load_adapter(self, request) -> SimpleNamespace:
        self.loads.append(request.lora_int_id)
        return SimpleNamespace(id=request.lora_int_id, loras={})

    def remove_adapter(self, int_id: int) -> bool:
        self.removed.append(int_id)
        return True


@pytest.fixture
def manager(monkeypatch) -> Manager:
    monkeypatch.setattr(engine_staging, "lora_request", lambda request: SimpleNamespace(lora_int_id=request.int_id))
    return Manager()


def test_what_was_staged_is_taken_once_and_read_once(manager: Manager):
    staging = Staging(manager)
    staging.stage(REQUEST)
    assert manager._load_adapter(SimpleNamespace(lora_int_id=7)).id == 7
    assert manager.loads == [7]
    assert staging.ids() == []
    manager._load_adapter(SimpleNamespace(lora_int_id=7))
    assert manager.loads == [7, 7]


def test_what_was_not_staged_is_read_as_ever(manager: Manager):
    Staging(manager)
    assert manager._load_adapter(SimpleNamespace(lora_int_id=9)).id == 9


def test_removing_an_adapter_forgets_what_was_staged_for_it(manager: Manager):
    staging = Staging(manager)
    staging.stage(REQUEST)
    assert manager.remove_adapter(7) is True
    assert (staging.ids(), manager.removed) == ([], [7])


def test_neighbours_share_a_piece_as_long_as_it_is_not_too_large():
    offsets = {"c": (60, 90), "a": (0, 40), "b": (40, 60), "d": (90, 100)}
    assert cut(offsets, 60) == [Piece(0, 60, ("a", "b")), Piece(60, 100, ("c", "d"))]


def test_a_tensor_larger_than_a_piece_stands_alone():
    assert cut({"a": (0, 10), "b": (10, 200), "c": (200, 210)}, 50) == [
        Piece(0, 10, ("a",)),
        Piece(10, 200, ("b",)),
        Piece(200, 210, ("c",)),
    ]


def test_a_file_without_tensors_has_no_pieces():
    assert cut({}, 50) == []


def header_of(path: Path, content: bytes):
    path.write_bytes(content)
    with path.open("rb") as file:
        return read_header(file.fileno())


def weights(about: dict, data: bytes = b"") -> bytes:
    header = json.dumps(about).encode()
    return struct.pack("<Q", len(header)) + header + data


def test_a_header_says_where_each_tensor_lies(tmp_path: Path):
    about = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    content = weights(about | {"__metadata__": {"format": "pt"}}, b"12345678")
    assert header_of(tmp_path / "file", content) == (len(content) - 8, about)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 64,
        struct.pack("<Q", 1 << 40) + b"{}",
        weights({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1 << 50]}}, b"12345678"),
        b"short",
        b"",
    ],
)
def test_a_damaged_file_is_cut_off_and_no_lack_of_memory(tmp_path: Path, content: bytes):
    with pytest.raises(EOFError):
        header_of(tmp_path / "file", content)


def test_a_staged_adapter_is_merged_once_and_another_as_ever(manager: Manager):
    staging = Staging(manager)
    staging.stage(REQUEST)
    inner = manager._adapter_manager
    for int_id in (7, 8):
        inner._create_merged_loras_inplace(SimpleNamespace(id=int_id))
    assert [adapter.id for adapter in manager.merges] == [7, 8]
