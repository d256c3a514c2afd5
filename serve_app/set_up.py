"""Makes `.venv` from the lock file: `python3 serve_app/set_up.py`. Needs Python, pip and nothing else; the second time it takes
a moment. The standard library only: nothing is installed yet when it runs.

`LORAMUX_TORCH_INDEX_URL` names a further index, one that holds CPU builds of torch (PyTorch keeps one); without it pip takes what
it finds. `--gpu` makes the environment of a GPU machine; from then on this checkout keeps that kind.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
STAMP = VENV / "loramux-installed"
GPU_MARK = VENV / "loramux-gpu"
FULL_BYTES = 2**29

# pip's words for an index that does not answer, or lacks the package.
NO_INDEX = re.compile(r"No matching distribution|Max retries|Connection|name resolution|timed out|ProxyError|SSLError", re.I)
NO_SPACE = re.compile(r"No space left|Errno 28|Disk quota exceeded", re.I)
INDEX_HINT = (
    "a package could not be fetched: is the package index reachable? Behind a proxy or with an index of your own, tell pip "
    "(HTTPS_PROXY, PIP_INDEX_URL), then run the same command again: it goes on where it stopped"
)


@dataclass(frozen=True)
class Kind:
    """What a CPU machine and a GPU machine differ in."""

    python: tuple[int, int]
    lock: Path
    needed_bytes: int

    @property
    def python_name(self) -> str:
        return f"python{self.python[0]}.{self.python[1]}"


CPU = Kind((3, 11), ROOT / "requirements.lock", 8 * 2**30)
GPU = Kind((3, 12), ROOT / "requirements-gpu.lock", 24 * 2**30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the environment is up to date")
    parser.add_argument("--gpu", action="store_true", help="the environment of a GPU machine")
    arguments = parser.parse_args()
    kind = GPU if arguments.gpu or GPU_MARK.exists() else CPU
    if arguments.check:
        sys.exit(0 if is_current(kind) else 1)
    if is_current(kind):
        return
    make_venv(kind)
    install(kind)
    STAMP.write_text(wanted(kind))
    say("ready")


def wanted(kind: Kind) -> str:
    """What the environment is made of: it is made again when any of it changes, or the checkout moved."""
    sources = (kind.lock, ROOT / "pyproject.toml", Path(__file__))
    text = b"".join(source.read_bytes() for source in sources) + str(ROOT).encode()
    return hashlib.sha256(text).hexdigest()


def is_current(kind: Kind) -> bool:
    return STAMP.exists() and STAMP.read_text() == wanted(kind)


def make_venv(kind: Kind) -> None:
    """A new environment, unless a sound one is there: one half made, of another Python, or of a checkout that moved, is not."""
    if is_sound(kind):
        return
    free = shutil.disk_usage(ROOT).free
    if free < kind.needed_bytes:
        fail(
            f"installing takes {kind.needed_bytes / 2**30:.0f} GB; {free / 2**30:.1f} GB are free on the disk of {ROOT}. "
            "Make room, or move the checkout to another disk"
        )
    python = find_python(kind)
    say(f"making .venv with {python}")
    run(
        [python, "-m", "venv", "--clear", str(VENV)],
        f"could not make .venv; on Debian and Ubuntu: apt-get install {kind.python_name}-venv",
    )
    if kind is GPU:
        GPU_MARK.touch()


def is_sound(kind: Kind) -> bool:
    config = VENV / "pyvenv.cfg"
    if not config.exists() or str(VENV) not in config.read_text():  # its scripts name the folder that it was made in
        return False
    return version_of(str(BIN / "python"), "import pip, sys") == kind.python


def find_python(kind: Kind) -> str:
    """A name on the PATH may be a stub of a version manager: it has to run."""
    for candidate in (sys.executable, shutil.which(kind.python_name)):
        if candidate and version_of(candidate) == kind.python:
            return candidate
    fail(
        f"Python {kind.python[0]}.{kind.python[1]} is needed; this is {sys.version.split()[0]}, and no `{kind.python_name}` runs"
        f" here. Install it (Debian and Ubuntu: apt-get install {kind.python_name}-venv; elsewhere: pyenv, uv or Homebrew), "
        f"then run the same command again, or name one: make setup PYTHON=/path/to/{kind.python_name}"
    )


def version_of(python: str, imports: str = "import sys") -> tuple[int, ...] | None:
    """Version of an interpreter; none if it does not run or lacks one of the imports."""
    try:
        done = subprocess.run(
            [python, "-c", f"{imports}; print(*sys.version_info[:2])"], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else None


def install(kind: Kind) -> None:
    say(f"installing; the first time this takes some minutes and up to {kind.needed_bytes / 2**30:.0f} GB, with few words")
    pip = [str(BIN / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-qq"]
    index = os.environ.get("LORAMUX_TORCH_INDEX_URL")
    extra = ["--extra-index-url", index] if index else []
    # torch first and by the resolver: the plain build needs libraries that the CPU build does not, and either is right.
    say("1 of 3: torch")
    run([*pip, *extra, "-c", str(kind.lock), *torch_requirements(kind)], INDEX_HINT)
    say("2 of 3: everything else")
    run([*pip, "--no-deps", "-r", str(kind.lock)], INDEX_HINT)
    say("3 of 3: this project")
    run([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], "the project itself could not be installed")
    run([str(BIN / "python"), "-m", "serve_app.torchvision_check"], "torchvision does not work beside this torch")


def torch_requirements(kind: Kind) -> list[str]:
    return [line.strip() for line in kind.lock.read_text().splitlines() if line.startswith(("torch==", "torchvision=="))]


def run(command: list[str], hint: str) -> None:
    """Runs it; its complaints pass through and choose the advice that follows them."""
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace")
    complaints = []
    for line in process.stderr or ():
        sys.stderr.write(line)
        complaints.append(line)
    if process.wait():
        fail(advice("".join(complaints), hint))


def advice(complaints: str, hint: str) -> str:
    free = shutil.disk_usage(ROOT).free
    if NO_SPACE.search(complaints) or free < FULL_BYTES:
        return (
            f"a disk is full ({free / 2**30:.1f} GB are free on that of {ROOT}; pip also unpacks in TMPDIR). "
            "Make room, then run the same command again"
        )
    return INDEX_HINT if NO_INDEX.search(complaints) else hint


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


def fail(text: str) -> NoReturn:
    print(f"set-up failed: {text}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
