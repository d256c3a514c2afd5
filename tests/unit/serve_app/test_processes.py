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
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)",
]


@pytest.fixture
def child():
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


def test_children_are_remembered_and_ended(tmp_path: Path, child):
    run = RunFile(tmp_path / "run.json")
    run.save()
    assert child.pid in {process.pid for process in run.running()}
    assert run.stop_all() == 1
    assert not psutil.pid_exists(child.pid)
    assert run.running() == []


def test_a_process_that_ignores_the_polite_signal_is_ended_by_force(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("serve_app.processes.STOP_TIMEOUT_S", 0.3)
    with subprocess.Popen(STUBBORN, stdout=subprocess.PIPE) as stubborn:
        stubborn.stdout.readline()
        run = RunFile(tmp_path / "run.json")
        run.save()
        run.stop_all()
        assert not psutil.pid_exists(stubborn.pid)


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
