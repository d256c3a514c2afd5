"""The papers say what the code does: settings, error codes, commands, make targets, shipped settings files, links."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from adapters import cli
from gateway.errors import CODES
from serve_app.settings import load_settings
from tests.repo.checkout import ROOT, tracked_files
from tests.repo.settings_table import fields, row

PAPERS = [path for path in tracked_files() if path.suffix == ".md"]
SETTINGS_FILES = [path for path in tracked_files() if re.fullmatch(r"loramux.*\.ya?ml", path.name)]


@cache
def paper(name: str) -> str:
    return (ROOT / name).read_text()


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def apps() -> Iterator[typer.Typer]:
    yield cli.app
    yield from (extra.load() for extra in entry_points(group="loramux.commands"))


def commands() -> Iterator[tuple[tuple[str, ...], Any, typer.Typer]]:
    """Every command of `loramux` with its words and the app that it belongs to; groups are walked, not listed."""
    for app in apps():
        yield from _walk(typer.main.get_group(app), (), app)


def _walk(command: Any, words: tuple[str, ...], app: typer.Typer) -> Iterator[tuple[tuple[str, ...], Any, typer.Typer]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield words, command, app
        return
    for name, child in children.items():
        yield from _walk(child, (*words, name), app)


COMMANDS = [pytest.param(*each, id=" ".join(each[0])) for each in commands()]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"])
def test_the_papers_of_a_project_are_here(name: str):
    assert (ROOT / name).read_text().strip()


def test_every_setting_has_a_description():
    assert not [key for key, field in fields() if not field.description]


def test_the_table_of_settings_is_the_code():
    there = set(paper("serve_app/README.md").splitlines())
    rows = [row(key, field) for key, field in fields()]
    missing = [line for line in rows if line not in there]
    assert not missing, "serve_app/README.md lacks these rows:\n" + "\n".join(missing)
    extra = [line for line in there if re.match(r"\| `(registry|cache|gateway|bases)\b", line) and line not in rows]
    assert not extra, "serve_app/README.md has rows of settings that don't exist:\n" + "\n".join(extra)


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_error_code_has_its_row(code: str):
    rows = [line for line in paper("gateway/README.md").splitlines() if line.startswith("|")]
    assert any(f"`{code}`" in line for line in rows), f"no row of a table in gateway/README.md has `{code}`"


@pytest.mark.parametrize(("words", "command", "app"), COMMANDS)
def test_help_of_a_command_ends_with_an_example_that_parses(words: tuple[str, ...], command: Any, app: typer.Typer):
    result = CliRunner().invoke(app, [*words, "--help"], terminal_width=200)
    last = result.output.rstrip().splitlines()[-1].strip()
    assert last.startswith(f"Example: loramux {' '.join(words)}")
    arguments = shlex.split(last.removeprefix("Example: loramux"))[len(words) :]
    command.make_context(words[-1], arguments)  # raises for an option or argument that does not exist


@pytest.mark.parametrize(("words", "command", "app"), COMMANDS)
def test_every_command_is_in_a_paper(words: tuple[str, ...], command: Any, app: typer.Typer):
    assert command.help, "a command says what it does"
    mention = re.compile(rf"loramux {' '.join(words)}\b")
    assert any(
        mention.search(paper(name)) for name in ("README.md", "adapters/README.md", "loadtests/README.md", "training/README.md")
    )


@pytest.mark.parametrize("path", PAPERS, ids=label)
def test_make_targets_that_a_paper_names_exist(path: Path):
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", paper("Makefile"), re.M))
    named = set(re.findall(r"(?:`|^|&& )make ([a-z][a-z0-9-]*)", path.read_text(), re.M))
    assert named <= targets


@pytest.mark.parametrize("path", PAPERS, ids=label)
def test_links_between_papers_lead_somewhere(path: Path):
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert not [link for link in local if not (path.parent / link).exists()]


@pytest.mark.parametrize("path", SETTINGS_FILES, ids=label)
def test_shipped_settings_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in os.environ:
        if name.startswith("LORAMUX_"):
            monkeypatch.delenv(name)
    assert load_settings(path).bases
