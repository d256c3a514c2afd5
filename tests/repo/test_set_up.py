"""Set-up: runs on a bare Python, knows a sound environment from a broken one, and says what to do when it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from serve_app import set_up
from tests.repo.checkout import ROOT, imports_of


def test_needs_the_standard_library_only():
    assert {name.split(".")[0] for name in imports_of(ROOT / "serve_app" / "set_up.py")} <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("complaints", "advised"),
    [
        ("ERROR: No matching distribution found for torch==2.13.0", "index reachable"),
        ("ERROR: HTTPSConnectionPool(host='x', port=443): Max retries exceeded", "index reachable"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "a disk is full"),
        ("ERROR: something else", "the hint of this step"),
    ],
)
def test_advice_follows_from_what_went_wrong(complaints: str, advised: str):
    assert advised in set_up.advice(complaints, "the hint of this step")


def test_a_name_on_the_path_that_does_not_run_is_no_python(tmp_path: Path, monkeypatch, capsys):
    stub = tmp_path / "python3.11"
    stub.write_text("#!/bin/sh\nexit 127\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(SystemExit):
        set_up.find_python(set_up.CPU)
    assert "Install it" in capsys.readouterr().err


def test_too_little_disk_is_said_before_anything_is_made(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(set_up, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(set_up.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2**30}))
    with pytest.raises(SystemExit):
        set_up.make_venv(set_up.CPU)
    assert "8 GB; 1.0 GB are free" in capsys.readouterr().err
    assert not (tmp_path / ".venv").exists()


def test_only_an_environment_with_pip_that_stayed_in_its_place_is_sound(tmp_path: Path, monkeypatch):
    kind = set_up.Kind(sys.version_info[:2], ROOT / "requirements.lock", 0)

    def is_sound(venv: Path) -> bool:
        monkeypatch.setattr(set_up, "VENV", venv)
        monkeypatch.setattr(set_up, "BIN", venv / "bin")
        return set_up.is_sound(kind)

    made = tmp_path / "made"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
    assert not is_sound(made), "it lacks pip"
    next(made.glob("lib/python3*/site-packages")).joinpath("pip.py").touch()
    assert is_sound(made)
    assert not is_sound(made.rename(tmp_path / "moved")), "its scripts name the old folder"
