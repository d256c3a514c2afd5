"""Makes `.venv` from the lock file: `python3 serve_app/set_up.py`. Needs Python, pip and nothing else; the second time it takes
a moment. The standard library only: nothing is installed yet when it runs.

`LORAMUX_TORCH_INDEX_URL` names an index that holds CPU builds of torch (PyTorch keeps one); without it pip takes what it finds.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOCK = ROOT / "requirements.lock"
STAMP = VENV / "loramux-installed"
PYTHON = (3, 11)
NEEDED_BYTES = 8 * 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the environment is up to date")
    if parser.parse_args().check:
        sys.exit(0 if is_current() else 1)
    if is_current():
        return
    make_venv()
    install()
    STAMP.write_text(wanted())
    say("ready")


def wanted() -> str:
    """What the environment is made of: it is made again when any of it changes, or the checkout moved."""
    sources = (LOCK, ROOT / "pyproject.toml", Path(__file__))
    text = b"".join(source.read_bytes() for source in sources) + str(ROOT).encode()
    return hashlib.sha256(text).hexdigest()


def is_current() -> bool:
    return STAMP.exists() and STAMP.read_text() == wanted()


def make_venv() -> None:
    if (VENV / "bin" / "python").exists():
        return
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES:
        fail(f"the environment takes about 5 GB; {free / 2**30:.1f} GB are free on this disk")
    python = find_python()
    say(f"making .venv with {python}")
    run([python, "-m", "venv", str(VENV)], "could not make .venv; on Debian and Ubuntu: apt-get install python3.11-venv")


def find_python() -> str:
    if sys.version_info[:2] == PYTHON:
        return sys.executable
    found = shutil.which("python3.11")
    if found is None:
        fail(f"Python {PYTHON[0]}.{PYTHON[1]} is needed, this is {sys.version.split()[0]}; install python3.11, then try again")
    return found


def install() -> None:
    say("installing (a few minutes and about 4 GB the first time)")
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q"]
    index = os.environ.get("LORAMUX_TORCH_INDEX_URL")
    extra = ["--index-url", index] if index else []
    hint = "no package could be installed: is a package index reachable? See README.md, 'When set-up fails'"
    # torch first and by the resolver: the plain build needs libraries that the CPU build does not, and either is right.
    run([*pip, *extra, "-c", str(LOCK), *torch_requirement()], hint)
    run([*pip, "--no-deps", "-r", str(LOCK)], hint)
    run([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], "the project itself could not be installed")
    run([str(VENV / "bin" / "python"), "-m", "serve_app.torchvision_check"], "torchvision does not work beside this torch")


def torch_requirement() -> list[str]:
    return [line.strip() for line in LOCK.read_text().splitlines() if line.startswith("torch==")]


def run(command: list[str], hint: str) -> None:
    if subprocess.run(command, cwd=ROOT).returncode:
        fail(hint)


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


def fail(text: str) -> None:
    print(f"set-up failed: {text}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
