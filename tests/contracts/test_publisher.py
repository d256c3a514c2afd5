"""The publisher on real stores: an outage in the middle of a run, and a run that is killed at any write of a publication."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapters.cli import waiting
from adapters.names import AdapterRef
from adapters.registry import Registry
from adapters.settings import StoreSettings
from adapters.store import open_store
from tests.exported_runs import ALIAS, BASE, NAME, Told, export, origin, saved, target
from tests.seaweed import Seaweed
from training.publishing import Judged, Pauses, Publisher, PublishTrouble

SOON = Pauses(0.05, 0.2)


@pytest.fixture(autouse=True)
def _no_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "TAKEN_WITHIN_S", 0.0)


def ask(settings: StoreSettings, question: Callable[[Registry], Any]) -> Any:
    async def run() -> Any:
        return await question(Registry(open_store(settings)))

    return asyncio.run(run())


def steps(settings: StoreSettings) -> list[int]:
    async def read(registry: Registry) -> list[int]:
        numbers = await registry.versions(BASE, NAME)
        return [(await registry.manifest(AdapterRef(BASE, NAME, number))).source["step"] for number in numbers]

    return ask(settings, read)


def test_an_outage_in_the_middle_of_a_run_delays_versions_and_loses_none(
    seaweed: Seaweed, s3_settings: StoreSettings, tmp_path: Path
) -> None:
    settings = s3_settings.model_copy(update={"retry_timeout_s": 0.1, "connect_timeout_s": 0.5})
    told = Told()
    publisher = Publisher(lambda: Registry(open_store(settings)), target(), origin(), told, pauses=SOON)
    publisher.offer(saved(export(tmp_path, 1), 0.6))
    told.wait(Judged, 1)
    seaweed.proxy.refuse = True
    for step in (2, 3):
        publisher.offer(saved(export(tmp_path, step), 0.6 + step / 10))
    told.wait(PublishTrouble, 2)
    seaweed.proxy.refuse = False
    told.wait(Judged, 3)
    assert publisher.close(30) == ()
    assert steps(settings) == [1, 2, 3]
    assert ask(settings, lambda registry: registry.head(BASE, NAME)).aliases == {ALIAS: 3}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("kind", "at"),
    [("file", "adapter_model"), ("file", "2/manifest.json"), ("file", "head.json"), ("file", "index/"), ("s3", "head.json")],
)
def test_a_run_that_was_killed_at_any_write_is_completed_by_a_scan_once(
    kind: str, at: str, after: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    settings = request.getfixturevalue("s3_settings") if kind == "s3" else StoreSettings(url=f"file://{tmp_path}/registry")
    exports = tmp_path / "exports"
    with_first = Publisher(lambda: Registry(open_store(settings)), target(), origin())
    with_first.offer(saved(export(exports, 1), 0.6))
    assert with_first.close(30) == ()

    secret = settings.secret_access_key.get_secret_value() if settings.secret_access_key else None
    task = {
        "store": settings.model_dump(mode="json") | {"secret_access_key": secret},
        "exports": [(str(export(exports, 2)), 0.9)],
        "at": at,
        "after": after,
    }
    killed = subprocess.run([sys.executable, "-m", "tests.dying_run", json.dumps(task)], check=False, timeout=90)
    assert killed.returncode == -signal.SIGKILL

    told = Told()
    resumed = Publisher(lambda: Registry(open_store(settings)), target(), origin(), told)
    resumed.scan(exports)
    assert resumed.close(30) == ()
    head = ask(settings, lambda registry: registry.head(BASE, NAME))
    assert steps(settings) == [1, 2]
    assert head.aliases == {ALIAS: 2}
    assert [row.to_version for row in head.history if row.kind == "promote"] == [1, 2]
