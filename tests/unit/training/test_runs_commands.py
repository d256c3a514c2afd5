"""`loramux train` and `loramux eval`: what is wrong usage, what is refused, what is told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.scripted_run import ScriptedLearner, ScriptedSampler, plan_in
from training import commands
from training.runs import start
from training.runs.events import EventLog
from training.runs.loop import Loop

SMALL = ["trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2", "trainer.epochs=1", "trainer.eval_interval=-1"]
# None of these runs may reach a registry that happens to be up.
SMALL += ["generator.n_samples_per_prompt=8", "loramux.training_mazes.count=4", "loramux.publish.name=null"]


def call(*arguments: str):
    return CliRunner().invoke(commands.app, list(arguments), catch_exceptions=False)


@pytest.fixture(autouse=True)
def _scripted(monkeypatch):
    monkeypatch.setattr(start, "Learner", lambda spec, world: ScriptedLearner(spec.trainer.seed))
    monkeypatch.setattr(start, "rollouts", lambda spec: ScriptedSampler())
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")


def a_run(folder: Path) -> Path:
    folder.mkdir()
    Loop(plan_in(folder), ScriptedSampler(), ScriptedLearner(), EventLog(folder / "events.jsonl")).run()
    return folder


def test_a_spec_by_its_name_is_trained_with_overrides_and_the_result_told(tmp_path):
    done = call("train", "demo", *SMALL, "--out", str(tmp_path / "run"), "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["ended"][0]["reason"] == "finished" and told["summary"]["runs"][0]["steps"] == 2


def test_progress_is_a_line_a_step_where_nobody_watches(tmp_path):
    done = call("train", "demo", *SMALL, "--out", str(tmp_path / "run"))
    assert "step 2/2: solved" in done.stderr and "report:" in done.stdout


def test_seeds_are_how_many_or_which(tmp_path):
    call("train", "demo", *SMALL, "--out", str(tmp_path / "two"), "--seeds", "2")
    call("train", "demo", *SMALL, "--out", str(tmp_path / "named"), "--seeds", "7,9")
    assert sorted(path.name for path in (tmp_path / "two").glob("seed-*")) == ["seed-42", "seed-43"]
    assert sorted(path.name for path in (tmp_path / "named").glob("seed-*")) == ["seed-7", "seed-9"]


@pytest.mark.parametrize("seeds", ["0", "x", "3,3", "-1"])
def test_seeds_that_are_none_are_wrong_usage(seeds):
    assert call("train", "demo", "--seeds", seeds).exit_code == 2


def test_a_key_that_is_none_is_wrong_usage_with_a_near_one():
    done = call("train", "demo", "trainer.epoch=3")
    assert done.exit_code == 2 and "trainer.epochs" in done.stderr


def test_a_spec_that_is_nowhere_is_wrong_usage():
    assert call("train", "nowhere.yaml").exit_code == 2


def test_another_run_in_the_same_folder_is_refused_with_what_differs(tmp_path):
    call("train", "demo", *SMALL, "--out", str(tmp_path))
    done = call("train", "demo", *SMALL, "trainer.policy.optimizer_config.lr=0.5", "--out", str(tmp_path))
    assert done.exit_code == 1 and re.search(r"optimizer_config\.lr was [0-9.e-]+, is 0\.5", done.stderr)


def test_what_changes_nothing_here_is_said(tmp_path):
    done = call("train", "demo", *SMALL, "trainer.flash_attn=false", "--out", str(tmp_path))
    assert "trainer.flash_attn=False changes nothing: " in done.stderr


def test_skyrl_needs_an_address_and_this_machine_none(tmp_path):
    assert call("train", "demo", "--backend", "skyrl").exit_code == 2
    assert call("train", "demo", "--address", "http://127.0.0.1:8265").exit_code == 2


def test_runs_are_reported_together(tmp_path):
    done = call("train", "report", str(a_run(tmp_path / "a")), str(a_run(tmp_path / "b")), "--json")
    assert len(json.loads(done.stdout)["runs"]) == 2 and (tmp_path / "report.md").exists()


def test_a_folder_without_a_run_is_refused(tmp_path):
    done = call("train", "report", str(tmp_path))
    assert done.exit_code == 1 and str(tmp_path) in done.stderr


def test_a_checkpoint_interval_is_suggested_from_a_runs_own_times(tmp_path):
    done = call("train", "suggest-ckpt-interval", str(a_run(tmp_path / "a")), "--failure-every-h", "6", "--json")
    by_thirds, youngs = json.loads(done.stdout)["suggestions"]
    assert by_thirds["interval_s"] == 7200 and youngs["interval_s"] < 7200


def test_eval_plays_a_set_both_ways_and_keeps_each_maze(tmp_path):
    done = call("eval", "--base", str(tmp_path), "--out", str(tmp_path / "evals"), "--json")
    assert [(one["set"], one["decoding"]) for one in json.loads(done.stdout)] == [("easy-64", "sampled"), ("easy-64", "greedy")]
    assert len((tmp_path / "evals" / "easy-64-greedy.jsonl").read_text().splitlines()) == 64


def test_eval_of_one_decoding_plays_only_that(tmp_path):
    done = call("eval", "--base", str(tmp_path), "--set", "hard-128", "--greedy")
    assert done.stdout.startswith("hard-128 greedy: ") and len(done.stdout.splitlines()) == 1


def test_eval_of_a_set_that_is_none_is_wrong_usage(tmp_path):
    done = call("eval", "--base", str(tmp_path), "--set", "easy-63")
    assert done.exit_code == 2 and "easy-64" in done.stderr


def test_eval_of_a_folder_without_an_adapter_is_refused(tmp_path):
    done = call("eval", "--base", str(tmp_path), "--adapter", str(tmp_path))
    assert done.exit_code == 1 and "adapter_config.json" in done.stderr
