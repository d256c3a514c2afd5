"""Remembering processes, so that ending them never hits a stranger."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from serve_app.processes import RunFile, port_owner

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]

# In a process of its own: a run remembers everything below it, and below the test runner are other tests' servers.
RUN = """
import subprocess, sys
from pathlib import Path
from serve_app import processes
processes.STOP_TIMEOUT_S = 0.5
child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdout=subprocess.PIPE)
child.stdout.readline()
run = processes.RunFile(Path(sys.argv[1]))
run.save()
assert [process.pid for process in run.running()] == [child.pid]
print(run.stop_all(), child.pid)
"""
POLITE = "import time; print(1, flush=True); time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {POLITE}"


@pytest.fixture
def child():
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("code", [POLITE, STUBBORN], ids=["polite", "stubborn"])
def test_children_are_remembered_and_ended_if_need_be_by_force(tmp_path: Path, code: str):
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "run.json"), code], capture_output=True, text=True, timeout=30, check=True
    )
    count, pid = map(int, done.stdout.split())
    assert count == 1
    assert not psutil.pid_exists(pid)
    assert not (tmp_path / "run.json").exists()


def test_an_id_that_was_used_again_is_left_alone(tmp_path: Path, child):
    path = tmp_path / "run.json"
    path.write_text(json.dumps([{"pid": child.pid, "started_at": psutil.Process(child.pid).create_time() - 100, "name": "x"}]))
    assert RunFile(path).stop_all() == 0
    assert child.poll() is None


@pytest.mark.parametrize("text", ["", "{", '[{"other": 1}]'])
def test_a_broken_file_remembers_nothing(tmp_path: Path, text: str):
    path = tmp_path / "run.json"
    path.write_text(text)
    assert RunFile(path).running() == []


def test_a_taken_port_has_an_owner_and_a_free_one_has_none():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert "python" in port_owner("127.0.0.1", port)
    assert port_owner("127.0.0.1", port) is None
