"""aiperf's environment: made once for each lock file, beside the load tests' other material, never in the project's own."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from loadtests.sending.sent import SenderFailed

LOCK = Path(__file__).with_name("aiperf.lock")
WORK = Path(".loramux/bench")
COMMAND = "LORAMUX_AIPERF"


def prepare(work: Path = WORK) -> Path:
    """The aiperf command, as the lock file pins it; about a minute and 1.2 GB the first time. The environment variable
    LORAMUX_AIPERF names one that is there already. Raises SenderFailed."""
    if given := os.environ.get(COMMAND):
        return Path(given)
    digest = hashlib.sha256(f"{sys.version_info[:2]} {LOCK.read_text()}".encode()).hexdigest()[:12]
    folder = (work / f"aiperf-{digest}").resolve()
    work.mkdir(parents=True, exist_ok=True)
    with (work / "aiperf.making").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        # A virtual environment knows its own path, so it is made in its place; this file says that it is whole.
        whole = folder / "whole"
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder)
            whole.touch()
    return folder / "bin" / "aiperf"


def _make(folder: Path) -> None:
    steps = (
        [sys.executable, "-m", "venv", str(folder)],
        [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(LOCK)],
    )
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SenderFailed("aiperf could not be installed:\n" + "\n".join((done.stdout + done.stderr).splitlines()[-5:]))
