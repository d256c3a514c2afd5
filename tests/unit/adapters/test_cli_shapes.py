"""`--json` keeps its promises: every key of every command, held in a file and listed in the README."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import adapter_folders
from tests.author import Author
from tests.repo.checkout import ROOT
from tests.snapshots import check_snapshot, shape
from tests.stub_gateway import StubGateway

SNAPSHOT = Path(__file__).with_name("cli_shapes.json")


HELD = {"replica": "r0", "adapters": {"tiny/base:parrot@1": {"tier": "engine", "users": 0, "size_bytes": 8000}}}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The shape of what each command prints, in one story."""
    folder, gateway = tmp_path_factory.mktemp("author"), StubGateway()
    gateway.start()
    try:
        return told(folder, gateway)
    finally:
        gateway.stop()


def told(folder: Path, gateway: StubGateway) -> dict[str, Any]:
    author = Author(folder, cache={"dir": str(folder / "cache")})
    (folder / "cache" / ("0" * 64)).mkdir(parents=True)
    author.put_base(adapter_folders.TEXT)
    ref = "tiny/base:parrot@1"
    gateway.says = {"tiny/base": "base", ref: "parrot"}
    gateway.logprobs = {"tiny/base": [None, -1.0, -2.0], ref: [None, -2.0, -2.0]}
    gateway.resident = {"tiny/base": {"requests": 0, "resident": {ref: 0}}}
    gateway.evicts = [{"replica": "r0", "tier": "disk", "reason": None}]
    gateway.adapters = {"parrot": {"versions": [{"version": 1, "size_bytes": 8000}], "aliases": {"production": 1}}}
    asked = ("--gateway", gateway.url)
    first, second = (str(adapter_folders.plain(seed=seed).write(folder / f"{seed}")) for seed in (1, 2))
    words = ("--name", "parrot", "-m", "first", "--tag", "k=v", "--metric", "m=1", "--source-run", "run", "--promote")
    found: dict[str, Any] = {}

    def tell(command: str, *arguments: str) -> None:
        found[command] = shape(author.json(command.split()[0], *arguments))

    found["an error"] = shape(author.refused("promote", "parrot", "1"))
    tell("publish --dry-run", first, "--name", "parrot", "--dry-run")
    tell("inspect", first)
    tell("publish", first, *words, "--wait-ready", "--probe", *asked)
    author.run("publish", second, "--name", "parrot")
    tell("promote", "parrot", "2", "--weight", "10", "-m", "some")
    tell("list", *asked)
    tell("show", "parrot")
    tell("history", "parrot")
    tell("history --at", "parrot", "--at", "now")
    tell("rollout", "parrot", *asked)
    tell("abort", "parrot")
    author.run("promote", "parrot", "2")
    tell("rollback", "parrot")
    tell("protect", "parrot", "--alias", "canary")
    tell("unprotect", "parrot", "--alias", "canary")
    author.run("promote", "parrot", "2", "--alias", "canary")
    tell("unset-alias", "parrot", "canary")
    tell("retire", "parrot@2")
    tell("restore", "parrot@2")
    tell("tag", "parrot@2", "k=v")
    tell("pull", "parrot@2", "pulled")
    tell("diff", "parrot@1", "parrot@2")
    tell("chat", "parrot@1", "Hello", *asked)
    tell("probe", "parrot@1", *asked)
    tell("pin", "parrot", *asked)
    tell("unpin", "parrot")
    tell("prewarm", "parrot")
    tell("evict", "parrot@1", *asked)
    gateway.resident = {"tiny/base": {"requests": 0, "resident": {}, "slots": 4, "replicas": [HELD]}}
    tell("ps", *asked)
    _kept(tell, folder, asked)
    return found


def _kept(tell: Callable[..., None], folder: Path, asked: tuple[str, str]) -> None:
    tell("doctor")
    tell("whoami", *asked)
    tell("refresh", *asked)
    tell("gc", "--keep-last", "1")
    adapter_folders.plain(seed=3).write(folder / "drop")
    tell("adopt", "drop", "--settle", "0s")
    tell("backup", f"file://{folder}/copy")
    tell("restore-backup", f"file://{folder}/copy")
    tell("sweep")
    tell("upgrade")
    tell("cache")


def test_no_key_is_lost_or_changes_its_kind(shapes: dict[str, Any]):
    check_snapshot(SNAPSHOT, shapes)


def test_the_readme_lists_the_keys_of_every_command(shapes: dict[str, Any]):
    rows = [line.split(" | ") for line in (ROOT / "adapters/README.md").read_text().splitlines() if line.startswith("| `")]
    listed = {re.sub("[|` ]+", " ", row[0]).strip(): set(re.findall(r"`(\w+)`", row[1])) for row in rows if len(row) == 2}
    wrong = [row_of(name, keys) for name, keys in shapes.items() if name != "an error" and listed.get(name) != set(keys)]
    assert not wrong, "adapters/README.md lacks these rows:\n" + "\n".join(wrong)


def row_of(command: str, keys: dict[str, Any]) -> str:
    return f"| `{command}` | {', '.join(f'`{key}`' for key in keys)} |"
