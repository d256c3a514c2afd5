"""`loramux bench` as it is typed: what is understood, what is refused, what is printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from loadtests import commands, scenario
from loadtests.running import tools as tools_of
from tests.unit.loadtests import scripted
from tests.unit.loadtests.scripted import ASK_COLD, Script


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Script:
    """Runs use scripted servers, and lie in a folder of the test."""
    script = Script()
    monkeypatch.setattr(tools_of, "tools", lambda *given, **more: script.tools)
    monkeypatch.setattr(commands, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(scripted, "TOLD", {"when": "now", "cpu": "a test", "cores": 2, "versions": {}})
    return script


@pytest.fixture
def mine(tmp_path: Path) -> str:
    return written(tmp_path, ASK_COLD)


def written(folder: Path, phase: dict[str, Any]) -> str:
    """A small scenario in a file."""
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(scripted.scenario(phase, name="mine").model_dump(mode="json")))
    return str(path)


def bench(*words: str) -> Result:
    return CliRunner().invoke(commands.bench, list(words), catch_exceptions=False)


def unboxed(result: Result) -> str:
    return re.sub(r"[\s│]+", " ", result.output)


def told(*words: str) -> Any:
    result = bench(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_first_word_that_is_no_command_is_a_scenario(script: Script, mine: str, tmp_path: Path):
    result = bench(mine, "--out", str(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    assert "report: " in result.stdout and "next: loramux bench compare" in result.stdout
    assert (tmp_path / "run" / "summary.json").exists() and (tmp_path / "run" / "report.html").exists()


def test_the_word_run_means_the_same(script: Script, mine: str, tmp_path: Path):
    assert bench("run", mine, "--out", str(tmp_path / "run")).exit_code == 0


def test_options_go_over_the_scenarios_own(script: Script, mine: str, tmp_path: Path):
    given = ("--peers", "loramux", "--rounds", "2", "--seed", "9", "--engine", '{"max_num_seqs": 7}')
    told(mine, *given, "--out", str(tmp_path / "run"))
    ran = json.loads((tmp_path / "run" / "scenario.json").read_text())
    assert (ran["peers"], ran["rounds"], ran["seed"], ran["engine"]) == (["loramux"], 2, 9, {"max_num_seqs": 7})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nonsense",), "no scenario nonsense"),
        (("two-minutes", "--peers", "nobody"), "no such peer: nobody"),
        (("two-minutes", "--rounds", "0"), "--rounds"),
        (("two-minutes", "--base", "somewhere"), "--base needs --adapters"),
        (("two-minutes", "--engine", "fast"), "Expecting value"),
        (("two-minutes", "--peer", "vllm"), "'vllm' is not one of"),
        (("compare", "nowhere", "nowhere"), "nowhere is no run"),
    ],
)
def test_wrong_usage_is_exit_code_2(words: tuple[str, ...], said: str):
    result = bench(*words)
    assert result.exit_code == 2
    assert said in unboxed(result)


def test_peers_that_no_phase_is_for_are_wrong_usage(script: Script, tmp_path: Path):
    result = bench(written(tmp_path, ASK_COLD | {"only": ["loramux"]}), "--peers", "stock")
    assert result.exit_code == 2
    assert "no phase of mine is for stock" in unboxed(result)


def test_a_peer_that_does_not_start_is_exit_code_1_and_there_is_a_report(script: Script, mine: str, tmp_path: Path):
    script.not_starting = ("stock",)
    result = bench(mine, "--out", str(tmp_path / "run"))
    assert result.exit_code == 1
    assert "failed: stock: RuntimeError: stock has no legs" in result.stdout
    assert (tmp_path / "run" / "report.md").exists()


def test_a_run_that_is_broken_off_has_a_report_of_what_it_had(script: Script, mine: str, tmp_path: Path):
    script.interrupted_at = "loramux"
    result = bench(mine, "--out", str(tmp_path / "run"))
    assert result.exit_code == 130
    assert (tmp_path / "run" / "report.md").exists()


def test_all_scenarios_are_listed(script: Script):
    assert [one["name"] for one in told("list")] == scenario.names()


def test_a_run_is_compared_with_itself(script: Script, mine: str, tmp_path: Path):
    bench(mine, "--out", str(tmp_path / "run"))
    assert told("compare", str(tmp_path / "run"), str(tmp_path / "run"))["scenario"] == "mine"


def test_a_baseline_is_written_from_a_run_and_then_holds(script: Script, mine: str, tmp_path: Path):
    bench(mine)  # into the folder of runs, where check finds the latest
    baseline = str(tmp_path / "baseline.json")
    assert bench("check", baseline, "--write").exit_code == 0
    assert told("check", baseline)["met"]


def test_a_figure_beyond_its_limit_is_exit_code_1(script: Script, mine: str, tmp_path: Path):
    bench(mine)
    baseline = tmp_path / "baseline.json"
    bench("check", str(baseline), "--write")
    document = json.loads(baseline.read_text())
    document["figures"]["loramux/ask/*/ok"] = {"value": 5, "bound": ">="}
    baseline.write_text(json.dumps(document))
    assert bench("check", str(baseline)).exit_code == 1


def test_check_without_a_run_says_where_it_looked(script: Script, tmp_path: Path):
    result = bench("check", str(tmp_path / "baseline.json"), "--write")
    assert result.exit_code == 1
    assert "no run of any scenario lies in" in result.output


def test_the_report_is_made_anew_from_the_lines(script: Script, mine: str, tmp_path: Path):
    bench(mine, "--out", str(tmp_path / "run"))
    (tmp_path / "run" / "report.md").unlink()
    told("report", str(tmp_path / "run"))
    assert (tmp_path / "run" / "report.md").exists()


def test_a_folder_that_is_no_run_has_no_report(tmp_path: Path):
    assert bench("report", str(tmp_path)).exit_code == 1
