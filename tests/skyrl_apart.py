"""SkyRL from its wheel, beside the project's environment: it wants other versions of nearly everything."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import typing_extensions

from tests.repo.checkout import ROOT

LOCK = ROOT / "training" / "skyrl-0.3.0.lock"
HERE = ROOT / ".loramux" / "tests" / "skyrl-0.3.0"


def run_with_skyrl(module: str, *arguments: str) -> str:
    """What a module prints that runs in a process with SkyRL on its path."""
    is_here = importlib.util.find_spec("skyrl") is not None  # `tests.skyrl_040` runs tests in an environment that has it
    environment = os.environ | ({} if is_here else {"PYTHONPATH": str(installed())})
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def installed() -> Path:
    """SkyRL without its dependencies, once for each lock file."""
    HERE.parent.mkdir(parents=True, exist_ok=True)
    whole = HERE / "whole"
    with (HERE.parent / "skyrl.making").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not whole.exists() or whole.read_text() != LOCK.read_text():
            shutil.rmtree(HERE, ignore_errors=True)
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(HERE), "-r", str(LOCK)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            whole.write_text(LOCK.read_text())
    return HERE


def as_on_python_312() -> None:
    """SkyRL's gym means the TypedDict of Python 3.12; to be said before `skyrl` is imported."""
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment,misc]
