"""The learner in processes of its own: several give what one gives, and a new one goes on where another stopped."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.training.learner_data import make_base

LAST, STOPPED = 3, 2


def run(base: Path, out: Path, processes: int, after: int = 0) -> None:
    """Makes the steps after `after` with as many processes, which find each other if they are several."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.integration.learner_program", str(base), str(out), str(LAST), "--after", str(after)]
    group = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if processes > 1 else {}
    started = [
        subprocess.Popen(command, env={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"})
        for rank in range(processes)
    ]
    assert [one.wait() for one in started] == [0] * processes


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("learners") / "base")


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def finished(request: pytest.FixtureRequest, base: Path) -> tuple[int, Path]:
    """The number of processes, and where they left three steps."""
    return request.param, _finished(base, request.param)


def _finished(base: Path, processes: int) -> Path:
    out = base.parent / f"of-{processes}"
    if not out.exists():
        out.mkdir()
        run(base, out, processes)
    return out


def adapter(out: Path, after: int = 0) -> Path:
    return out / f"adapter-{LAST}-after-{after}" / "adapter_model.safetensors"


def test_two_processes_make_the_adapter_that_one_makes(base):
    one, two = (load_file(adapter(_finished(base, processes))) for processes in (1, 2))
    assert one.keys() == two.keys()
    for name, values in one.items():
        torch.testing.assert_close(two[name], values, atol=1e-5, rtol=0)


def test_two_processes_say_of_a_step_what_one_says(base):
    one, two = (json.loads((_finished(base, count) / f"metrics-{LAST}-after-0.json").read_text()) for count in (1, 2))
    of_step = {name: value for name, value in one.items() if not name.startswith("timing/")}
    assert {name: two[name] for name in of_step} == pytest.approx(of_step, rel=1e-3, abs=1e-6)


def test_new_processes_go_on_from_a_state_bit_for_bit(base, finished):
    processes, out = finished
    run(base, out, processes, after=STOPPED)
    assert adapter(out, after=STOPPED).read_bytes() == adapter(out).read_bytes()
