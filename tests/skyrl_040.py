"""The checks against SkyRL once more, with its version 0.4.0, which needs Python 3.12: `python3.12 -m tests.skyrl_040`.

Makes an environment of its own from training/skyrl-0.4.0.lock (some gigabytes, once) and runs there what the checks with 0.3.0
run. Needs nothing but Python's own library.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "training" / "skyrl-0.4.0.lock"
HERE = ROOT / ".loramux" / "tests" / "skyrl-0.4.0"
CHECKS = ("grpo_as_skyrl", "skyrl_environment", "skyrl_overrides", "skyrl_submit", "skyrl_trainer")


def main() -> int:
    if sys.version_info < (3, 12):
        print(f"SkyRL 0.4.0 needs Python 3.12, this is {sys.version.split()[0]}", file=sys.stderr)
        return 2
    files = [f"tests/unit/training/test_{name}.py" for name in CHECKS]
    command = [str(installed()), "-m", "pytest", "-p", "no:cacheprovider", *files, *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def installed() -> Path:
    """The environment's Python; it is made again when the lock file changes."""
    whole, python = HERE / "whole", HERE / "bin" / "python"
    if not whole.exists() or whole.read_text() != LOCK.read_text():
        shutil.rmtree(HERE, ignore_errors=True)
        venv.create(HERE, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", str(LOCK)], check=True)
        whole.write_text(LOCK.read_text())
    return python


if __name__ == "__main__":
    sys.exit(main())
