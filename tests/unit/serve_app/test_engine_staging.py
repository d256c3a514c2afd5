"""The door through which adapters are read ahead of the engine's loop. What vLLM makes of them: `test_contracts_engine`."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from serve_app import engine_staging
from serve_app.engine_staging import Door, StageRequest, Staging, StagingFailed, stage

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
        self.removed: list[int] = []
        self._adapter_manager = SimpleNamespace(_is_moe=False, _create_merged_loras_inplace=lambda adapter: None)

    def _load_adapter(self, request) -> str:
        self.loads.append(request.lora_int_id)
        return f"adapter {request.lora_int_id}"

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
    assert manager._load_adapter(SimpleNamespace(lora_int_id=7)) == "adapter 7"
    assert manager.loads == [7]
    assert staging.ids() == []
    manager._load_adapter(SimpleNamespace(lora_int_id=7))
    assert manager.loads == [7, 7]


def test_what_was_not_staged_is_read_as_ever(manager: Manager):
    Staging(manager)
    assert manager._load_adapter(SimpleNamespace(lora_int_id=9)) == "adapter 9"


def test_removing_an_adapter_forgets_what_was_staged_for_it(manager: Manager):
    staging = Staging(manager)
    staging.stage(REQUEST)
    assert manager.remove_adapter(7) is True
    assert (staging.ids(), manager.removed) == ([], [7])
