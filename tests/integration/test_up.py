"""`loramux up` and `loramux down`: what is left when a run crashes, and ports that are taken."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.stack import Stack, assert_gone
from tests.seaweed import Seaweed

LORAMUX = Path(sys.executable).with_name("loramux")


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(LORAMUX), *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture
def small(tmp_path: Path, seaweed: Seaweed, pooling_base: Path) -> Stack:
    """A stack with the smallest base only."""
    return Stack(tmp_path, seaweed, {"embed": pooling_base})


def test_down_ends_what_a_crashed_run_left(small: Stack):
    small.start()
    family = small.crash()
    done = run("down", cwd=small.folder)
    assert done.returncode == 0, done.stderr
    assert_gone(family)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", small.port)) != 0
    assert "nothing was running" in run("down", cwd=small.folder).stdout


def test_a_taken_port_is_named_with_who_has_it(small: Stack):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", small.port))
        taken.listen()
        done = run("up", "--no-demo", "--config", str(small.config), cwd=small.folder)
    assert done.returncode == 1
    assert f"port {small.port} is taken by python" in done.stdout
    assert "gateway.port" in done.stdout


def test_a_mistake_in_the_settings_is_named_before_anything_starts(small: Stack):
    small.config.write_text(small.config.read_text().replace("max_body_bytes", "max_body_byte"))
    done = run("up", "--no-demo", "--config", str(small.config), cwd=small.folder)
    assert done.returncode == 1
    assert "did you mean `max_body_bytes`" in done.stdout
