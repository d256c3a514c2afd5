"""The backend contract against the real cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_real_backend_keeps_the_contract(stack):
    stack.wait_until(lambda: stack.residency()["requests"] == 0)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contracts/test_backend.py"],
        cwd=ROOT,
        env=os.environ | {"LORAMUX_TEST_RAY": stack.ray_address(), "RAY_AUTH_MODE": "token"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
