"""`loramux bench` for real: a scenario on two cores, its folder, and the gate on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadtests import records
from loadtests.records import Event, Record
from tests.repo.checkout import ROOT

LORAMUX = Path(sys.executable).with_name("loramux")
BASELINE = ROOT / "loadtests" / "scenarios" / "two-minutes.baseline.json"


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(LORAMUX), "bench", *words], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "run"
    done = bench("two-minutes", "--out", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def requests_of(run: Path, load: str) -> list[Record]:
    return [row for row in records.read(run / records.REQUESTS, Record) if row.load == load]


def test_every_request_is_answered_and_says_its_own_sentence(run: Path):
    outcomes = {load: {row.outcome for row in requests_of(run, load)} for load in ("base", "hot", "cold", "crowd")}
    assert outcomes == {load: {"ok"} for load in outcomes}
    assert all(row.right for load in ("hot", "cold", "crowd") for row in requests_of(run, load))


def test_adapters_were_where_they_were_put(run: Path):
    assert {row.tier for row in requests_of(run, "base")} == {"base"}
    assert {row.tier for row in requests_of(run, "hot")} == {"engine"}
    assert {row.tier for row in requests_of(run, "cold")} == {"remote"}


def test_a_burst_on_one_cold_adapter_has_one_leader_and_one_fetch(run: Path):
    roles = [row.role for row in requests_of(run, "crowd")]
    fetched = [row for row in records.read(run / records.EVENTS, Event) if (row.phase, row.kind) == ("burst", "fetch")]
    assert roles.count("leader") == len(fetched) == 1


def test_a_run_leaves_its_report(run: Path):
    names = {path.name for path in run.iterdir()}
    assert names >= {"scenario.json", "environment.json", "summary.json", "report.md", "report.html", "plots", "raw", "logs"}
    assert json.loads((run / "environment.json").read_text())["cores"] > 0


def test_the_gate_holds_and_falls(run: Path, tmp_path: Path):
    held = bench("check", str(BASELINE), "--run", str(run), "--json")
    assert held.returncode == 0, held.stdout + held.stderr
    baseline = json.loads(BASELINE.read_text())
    baseline["figures"]["loramux/cold/*/ok"] = {"value": 1000, "bound": ">="}
    (tmp_path / "baseline.json").write_text(json.dumps(baseline))
    assert bench("check", str(tmp_path / "baseline.json"), "--run", str(run)).returncode == 1
