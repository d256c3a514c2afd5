"""The author commands, against a registry in a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from adapters.inspect_command import load_contract
from adapters.registry import Registry
from adapters.registry.codec import encode_contract
from adapters.settings import StoreSettings
from adapters.store import open_store
from tests import adapter_folders

LORAMUX = Path(sys.executable).with_name("loramux")


class Author:
    """Somebody with a settings file and the command `loramux`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.registry = Registry(open_store(StoreSettings(url=f"file://{folder}/registry")))
        (folder / "loramux.yaml").write_text(f"registry: {{url: 'file://{folder}/registry'}}\n")

    def run(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run([str(LORAMUX), *arguments], cwd=self.folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def json(self, *arguments: str, code: int = 0):
        return json.loads(self.run(*arguments, "--json", code=code))


@pytest.fixture
async def author(tmp_path: Path) -> Author:
    author = Author(tmp_path)
    await author.registry.put_base(adapter_folders.TEXT)
    return author


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return adapter_folders.plain(seed=1).write(tmp_path / "adapter")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return adapter_folders.plain(seed=2).write(tmp_path / "other")


def test_an_author_publishes_promotes_and_rolls_back(author: Author, adapter: Path, other: Path):
    first = author.json("publish", str(adapter), "--name", "sql", "--promote", "-m", "first")
    assert first["created"]
    assert first["ref"].endswith(":sql@1")
    second = author.json("publish", str(other), "--name", "sql")
    assert second["ref"].endswith(":sql@2")
    assert "is now version 2" in author.run("promote", "sql", "2", "-m", "better")
    assert "is now version 1" in author.run("rollback", "sql")
    shown = author.json("show", "sql")
    assert shown["head"]["aliases"] == {"production": 1}
    assert [move["kind"] for move in shown["head"]["history"]] == ["promote", "promote", "rollback"]


def test_the_same_content_twice_is_one_version(author: Author, adapter: Path):
    author.run("publish", str(adapter), "--name", "sql")
    again = author.json("publish", str(adapter), "--name", "sql")
    assert (again["created"], again["ref"].endswith("@1")) == (False, True)


def test_list_shows_what_is_in_production(author: Author, adapter: Path):
    assert "no adapters yet" in author.run("list")
    author.run("publish", str(adapter), "--name", "team/sql", "--promote")
    assert ":team/sql" in author.run("list")
    assert author.json("list")["adapters"][0]["aliases"] == {"production": 1}


def test_success_names_the_next_command(author: Author, adapter: Path):
    assert "next: loramux promote" in author.run("publish", str(adapter), "--name", "sql")


def test_a_refusal_names_code_limit_and_value_and_leaves_nothing(author: Author, tmp_path: Path):
    folder = adapter_folders.plain(rank=64).write(tmp_path / "wide")
    said = author.run("publish", str(folder), "--name", "sql", code=1)
    assert "rank_too_large" in said
    assert "64" in said
    assert author.json("list")["adapters"] == []


def test_a_dry_run_says_what_would_happen_and_writes_nothing(author: Author, adapter: Path):
    said = author.json("publish", str(adapter), "--name", "sql", "--dry-run")
    assert said["publishable"]
    assert author.json("list")["adapters"] == []


def test_inspect_needs_no_registry(author: Author, adapter: Path, tmp_path: Path):
    contract = tmp_path / "base.json"
    contract.write_bytes(encode_contract(adapter_folders.TEXT))
    assert load_contract(contract) == adapter_folders.TEXT
    (tmp_path / "loramux.yaml").unlink()
    assert author.json("inspect", str(adapter), "--contract", str(contract))["publishable"]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("promote", "nobody", "1"), 1, "model_not_found"),
        (("show", "nobody"), 1, "model_not_found"),
        (("publish", "nowhere", "--name", "sql"), 1, "invalid_request"),
        (("publish", ".", "--name", "SQL Model"), 1, "invalid_request"),
        (("promote", "sql", "soon"), 2, "integer"),
        (("promote",), 2, "Missing argument"),
        (("fly",), 2, "No such command"),
    ],
)
def test_what_goes_wrong_has_its_exit_code_and_words(author: Author, arguments, code, text):
    assert text in author.run(*arguments, code=code)


def test_a_lost_race_is_told(author: Author, adapter: Path):
    author.run("publish", str(adapter), "--name", "sql", "--promote")
    assert "version_conflict" in author.run("promote", "sql", "1", "--revision", "99", code=1)


def test_without_a_registry_the_message_says_where_to_name_one(tmp_path: Path):
    done = subprocess.run([str(LORAMUX), "list"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "LORAMUX_REGISTRY__URL" in done.stderr
