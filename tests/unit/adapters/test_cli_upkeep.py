"""The commands of those who keep a registry: doctor, gc, adopt, copies, repair."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from adapters.cli import doctor
from adapters.cli.gateway import Gateway
from adapters.cli.upkeep import other_store
from adapters.registry import Registry
from adapters.settings import RegistrySettings, StoreSettings
from adapters.store import Store
from tests import adapter_folders
from tests.author import Author
from tests.fake_store import FakeStore


@pytest.fixture
def author(tmp_path: Path) -> Author:
    author = Author(tmp_path)
    author.put_base(adapter_folders.TEXT)
    return author


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    return [str(adapter_folders.plain(seed=seed).write(tmp_path / f"adapter-{seed}")) for seed in range(6)]


@pytest.fixture
def parrot(author: Author, folders: list[str]) -> Author:
    for seed in (1, 2, 3, 4):
        author.run("publish", folders[seed], "--name", "parrot", *(["--promote"] if seed == 1 else []))
    return author


def checks(author: Author, *arguments: str, code: int = 0) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in author.json("doctor", *arguments, code=code)["checks"]}


# Doctor


def test_a_healthy_registry_has_nothing_but_a_gateway_to_look_at(parrot: Author):
    found = checks(parrot)
    assert {check["status"] for name, check in found.items() if name not in ("gateway", "port")} == {"ok"}
    assert "10 ok" in parrot.run("doctor") or "9 ok" in parrot.run("doctor")


def test_doctor_leaves_nothing_in_the_store(parrot: Author, tmp_path: Path):
    parrot.run("doctor")
    assert not list(tmp_path.glob("registry/doctor/*"))


def test_a_store_that_nobody_reaches_fails_and_what_needs_it_is_skipped(tmp_path: Path):
    settings = StoreSettings(
        url="s3://bucket/registry", endpoint="http://127.0.0.1:9", access_key_id="a", secret_access_key="b", retry_timeout_s=0
    )
    found = checks(Author(tmp_path, settings), code=1)
    assert (found["store"]["status"], found["index"]["status"]) == ("fail", "skip")
    assert "running" in found["store"]["hint"]


def test_no_settings_fail_with_the_place_to_write_them(tmp_path: Path):
    author = Author(tmp_path)
    (tmp_path / "loramux.yaml").unlink()
    assert "LORAMUX_REGISTRY__URL" in checks(author, code=1)["settings"]["hint"]


async def test_a_store_that_ignores_conditions_fails():
    class Careless(FakeStore):
        async def create(self, key: str, data: bytes) -> str:
            return await self.put(key, data)

    found = await doctor.check_conditions(patient(Careless()))
    assert found.status == "fail"
    assert "create refused when taken" in found.message


def patient(store: Store) -> doctor.Patient:
    return doctor.Patient(None, Gateway("http://127.0.0.1:9"), False, registry=Registry(store))


@pytest.mark.parametrize(
    ("there_s", "status", "words"),
    [
        (1000.0, "ok", "agree"),
        (999.0, "ok", "agree"),
        (1060.0, "warn", "59 s behind"),
        (940.0, "warn", "59 s ahead"),
        (5000.0, "fail", "behind"),
    ],
)
def test_a_clock_that_is_off_is_told(there_s: float, status: str, words: str):
    found = doctor.clock_check(there_s, 1000.0, 1000.2)
    assert found.status == status
    assert words in found.message


def test_a_row_that_is_behind_is_told_and_swept(parrot: Author, folders: list[str], tmp_path: Path):
    parrot.run("publish", folders[1], "--name", "other")
    next(tmp_path.glob("registry/index/*.json")).unlink()
    assert "loramux sweep" in checks(parrot)["index"]["hint"]
    parrot.run("sweep")
    assert checks(parrot)["index"]["status"] == "ok"


def test_adapters_over_the_engine_s_limit_are_named(parrot: Author):
    parrot.put_base(dataclasses.replace(adapter_folders.TEXT, max_rank=2))
    found = checks(parrot, code=1)["engine limits"]
    assert "rank 4, limit 2" in found["message"]


def test_what_was_checked_against_another_state_of_its_base_is_named(parrot: Author):
    parrot.put_base(dataclasses.replace(adapter_folders.TEXT, fingerprint="e" * 64))
    found = checks(parrot)["changed bases"]
    assert found["status"] == "warn"
    assert "tiny/base:parrot@1" in found["message"]
    assert "parrot@2" not in found["message"]


def test_adapters_of_a_base_that_nobody_described_are_told(author: Author, folders: list[str]):
    author.run("publish", folders[1], "--name", "sql", "--base", "unknown")
    assert "unknown" in checks(author)["base contracts"]["message"]


def test_a_cache_that_would_fill_the_disk_is_told(tmp_path: Path):
    author = Author(tmp_path, cache={"dir": str(tmp_path / "cache"), "budget_bytes": 10**18})
    assert checks(author)["node cache"]["status"] == "warn"


def test_a_port_that_somebody_else_has_fails(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(8)
        taken.settimeout(0.01)
        author = Author(tmp_path, gateway={"port": taken.getsockname()[1]})
        assert checks(author, code=1)["port"]["status"] == "fail"


def test_a_gateway_that_was_named_must_answer(author: Author):
    assert checks(author, "--gateway", "http://127.0.0.1:9", code=1)["gateway"]["status"] == "fail"


# Collection


def test_gc_shows_its_plan_and_does_it_only_when_told(parrot: Author):
    plan = parrot.json("gc", "--keep-last", "1")
    assert plan["collect"] == ["tiny/base:parrot@2", "tiny/base:parrot@3"]
    assert (plan["done"], plan["gateway_asked"]) == (False, False)
    assert "--yes" in parrot.run("gc", "--keep-last", "1")
    assert all(version["state"] != "collected" for version in parrot.json("show", "parrot")["versions"])
    done = parrot.json("gc", "--keep-last", "1", "--yes", "-m", "spring cleaning")
    assert done["done"]
    states = [version["state"] for version in parrot.json("show", "parrot")["versions"]]
    assert states == ["live", "collected", "collected", "ready"]
    assert parrot.refused("restore", "parrot@2")["reason"] == "collected"


def test_gc_keeps_what_is_young_or_tagged(parrot: Author):
    parrot.run("tag", "parrot@2", "keep=yes")
    assert parrot.json("gc", "--keep-last", "1", "--keep-tag", "keep")["collect"] == ["tiny/base:parrot@3"]
    assert parrot.json("gc", "--keep-last", "1", "--keep-younger", "1h")["collect"] == []
    parrot.run("gc", "--keep-younger", "soon", code=2)


# Adoption


def test_adopt_publishes_what_lies_there_and_once(author: Author, tmp_path: Path):
    adapter_folders.plain(seed=1).write(tmp_path / "drop" / "parrot")
    adapter_folders.plain(seed=2).write(tmp_path / "drop" / "Pirate")
    assert [row["ready"] for row in author.json("adopt", "drop", "--settle", "0s", "--dry-run")["found"]] == [True, True]
    assert author.json("list")["adapters"] == []
    rows = author.json("adopt", "drop", "--settle", "0s", "--promote")["found"]
    assert sorted(row["ref"] for row in rows) == ["tiny/base:parrot@1", "tiny/base:pirate@1"]
    assert author.head("pirate").aliases == {"production": 1}
    assert {row["created"] for row in author.json("adopt", "drop", "--settle", "0s")["found"]} == {False}


def test_a_refused_folder_is_told_and_the_others_go_on(author: Author, tmp_path: Path):
    adapter_folders.plain(seed=1).write(tmp_path / "drop" / "good")
    adapter_folders.plain(rank=64).write(tmp_path / "drop" / "bad")
    rows = {row["name"]: row for row in author.json("adopt", "drop", "--settle", "0s", code=1)["found"]}
    assert rows["bad"]["error"]["reason"] == "rank_too_large"
    assert rows["good"]["ref"] == "tiny/base:good@1"


def test_a_folder_that_changes_is_left_alone(author: Author, tmp_path: Path):
    folder = adapter_folders.plain(seed=1).write(tmp_path / "drop")
    os.utime(folder / "adapter_config.json", (time.time(), time.time()))
    assert "left alone: changing" in author.run("adopt", "drop", "--settle", "1h")


# Copies


def test_a_backup_is_whole_and_comes_back(parrot: Author, tmp_path: Path):
    copied = parrot.json("backup", f"file://{tmp_path}/copy")
    assert (copied["adapters"], copied["versions_copied"], copied["damaged"]) == (1, 4, [])
    (tmp_path / "fresh").mkdir()
    fresh = Author(tmp_path / "fresh")
    fresh.run("restore-backup", f"file://{tmp_path}/copy")
    assert fresh.json("show", "parrot")["versions"] == parrot.json("show", "parrot")["versions"]
    assert parrot.json("backup", f"file://{tmp_path}/copy")["versions_copied"] == 0


def test_another_store_is_reached_like_the_registry_s_unless_it_is_said(monkeypatch: pytest.MonkeyPatch):
    registry = RegistrySettings(url="s3://one/registry", endpoint="http://minio:9000", access_key_id="a", secret_access_key="b")
    same = other_store("s3://two/registry", None, None, registry)
    assert (same.url, same.endpoint, same.access_key_id) == ("s3://two/registry", "http://minio:9000", "a")
    monkeypatch.setenv("LORAMUX_BACKUP_ACCESS_KEY_ID", "c")
    monkeypatch.setenv("LORAMUX_BACKUP_SECRET_ACCESS_KEY", "d")
    other = other_store("s3://two/registry", "aws", "eu-central-1", registry)
    assert (other.endpoint, other.region, other.access_key_id) == (None, "eu-central-1", "c")
    assert other.secret_access_key is not None
    assert other.secret_access_key.get_secret_value() == "d"


def test_whoami_says_where_it_looks_also_while_nothing_answers(tmp_path: Path):
    settings = StoreSettings(
        url="s3://bucket/registry", endpoint="http://127.0.0.1:9", access_key_id="a", secret_access_key="b", retry_timeout_s=0
    )
    said = Author(tmp_path, settings).json("whoami")
    assert (said["registry"], said["bases"]) == ("s3://bucket/registry", None)


def test_whoami_says_what_a_write_would_change(author: Author):
    said = author.json("whoami")
    assert (said["who"], said["bases"], said["gateway_answers"]) == ("ann", ["tiny/base"], False)
