"""Checkpoints: whole or not there, whatever happens while they are written; resumption from the newest whole one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.scripted_run import SPEC, ScriptedLearner, ScriptedSampler, plan_in
from training.runs.checkpoints import Checkpoints, NoCheckpoint, read
from training.runs.events import EventLog, RunStarted, StepEvent, history, read_events
from training.runs.loop import Loop
from training.runs.resuming import OtherSpec

KILLS = 24


def run(folder: Path, **changed) -> RunStarted:
    Loop(plan_in(folder, **changed), ScriptedSampler(), ScriptedLearner(), EventLog(folder / "events.jsonl")).run()
    return [line.event for line in read_events(folder / "events.jsonl") if isinstance(line.event, RunStarted)][-1]


def save(folder: Path, *steps: int, keep: int = -1) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        checkpoints.save(step, lambda place, step=step: (place / "weights").write_text(f"of {step}") and None, {"spec": {}})
    return checkpoints


def final_adapter(folder: Path) -> bytes:
    return (folder / "exports" / "global_step_6" / "policy" / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> list[dict]:
    """Many runs with kills at points of a seed, all taken up again until they ended."""
    command = [sys.executable, "-m", "tests.killed_runs", str(tmp_path_factory.mktemp("killed")), str(KILLS)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_run_killed_anywhere_and_taken_up_again_ends_with_the_same_bytes_as_one_left_alone(killed):
    alone, *others = killed
    assert len(others) == KILLS and all(other["kills"] for other in others)
    assert {other["adapter"] for other in others} == {alone["adapter"]}


def test_kills_leave_nothing_behind_but_what_is_kept(killed):
    kept = {f"ckpts/{name}" for name in ("global_step_4", "global_step_6", "latest_ckpt_global_step.txt")}
    exported = {f"exports/global_step_{step}" for step in (2, 3, 4, 6)}
    left = [set(other["left"]) - kept - exported for other in killed[1:]]
    assert not any(left)


def test_the_newest_are_kept(tmp_path):
    assert save(tmp_path, 2, 4, 6, 8, keep=2).steps() == [6, 8]


def test_all_are_kept_if_no_number_is_given(tmp_path):
    assert save(tmp_path, 2, 4, 6).steps() == [2, 4, 6]


def test_the_pointer_names_the_newest(tmp_path):
    checkpoints = save(tmp_path, 2, 4)
    assert (tmp_path / "latest_ckpt_global_step.txt").read_text() == "4"
    found = checkpoints.find()
    assert (found.step, (found.policy / "weights").read_text()) == (4, "of 4")


def test_without_a_pointer_latest_starts_over(tmp_path):
    checkpoints = save(tmp_path, 2)
    (tmp_path / "latest_ckpt_global_step.txt").unlink()
    assert checkpoints.find("latest") is None and Checkpoints(tmp_path / "nowhere").find("latest") is None


def test_none_starts_over_whatever_is_there(tmp_path):
    assert save(tmp_path, 2).find("none") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "policy" / "weights").write_text("of 5"),
        lambda folder: (folder / "policy" / "weights").unlink(),
        lambda folder: (folder / "trainer_state.json").write_text("{"),
        lambda folder: (folder / "checksums.json").unlink(),
        lambda folder: folder.rename(folder.with_name("elsewhere")),
    ],
    ids=["changed", "file missing", "state cut off", "checksums missing", "gone"],
)
def test_of_a_damaged_newest_the_one_before_is_taken_and_what_is_wrong_is_said(tmp_path, damage):
    checkpoints = save(tmp_path, 2, 4)
    damage(tmp_path / "global_step_4")
    found = checkpoints.find("latest")
    assert found.step == 2 and "global_step_4" in found.passed_over[0]


def test_with_none_whole_nothing_is_started_over_unasked(tmp_path):
    checkpoints = save(tmp_path, 2)
    (tmp_path / "global_step_2" / "policy" / "weights").unlink()
    with pytest.raises(NoCheckpoint, match=r"global_step_2.*resume_mode=none starts over"):
        checkpoints.find("latest")


def test_from_path_takes_that_one(tmp_path):
    assert save(tmp_path, 2, 4).find("from_path", tmp_path / "global_step_2").step == 2


@pytest.mark.parametrize("path", [None, Path("policy"), Path("global_step_9")])
def test_from_path_wants_a_whole_checkpoints_folder(tmp_path, path):
    with pytest.raises(NoCheckpoint, match=r"trainer\.resume_path"):
        save(tmp_path, 2).find("from_path", path and tmp_path / path)


def test_a_damaged_one_is_written_over_when_the_run_gets_there_again(tmp_path):
    checkpoints = save(tmp_path, 2, 4, keep=2)
    (tmp_path / "global_step_4" / "policy" / "weights").unlink()
    save(tmp_path, 3, 4, keep=2)
    assert checkpoints.find().step == 4 and checkpoints.steps() == [3, 4]


def test_a_write_that_fails_leaves_the_former_as_they_are_and_gives_the_room_back(tmp_path):
    checkpoints = save(tmp_path, 2)

    def fails(place: Path) -> None:
        (place / "half").write_text("h")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        checkpoints.save(4, fails, {})
    assert checkpoints.find().step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_2", "latest_ckpt_global_step.txt"]


def test_a_checkpoint_holds_position_specification_and_what_happened(tmp_path):
    run(tmp_path)
    state = read(tmp_path / "ckpts" / "global_step_4").state
    assert state["position"] == {"epoch": 2, "step": 4, "steps_per_epoch": 3}
    assert (state["spec"], state["spec_digest"]) == (SPEC, "d1")
    assert [row["step"] for row in state["history"] if row["event"] == "StepEvent"] == [1, 2, 3, 4]


def test_a_run_is_refused_to_go_on_under_another_specification_with_what_differs(tmp_path):
    run(tmp_path)
    key = "trainer.policy.optimizer_config.lr"
    with pytest.raises(OtherSpec, match=r"optimizer_config\.lr was 0\.001, is 0\.01"):
        run(tmp_path, spec=SPEC | {key: 0.01})


def test_more_epochs_and_other_intervals_are_no_other_run(tmp_path):
    run(tmp_path)
    plan = plan_in(tmp_path)
    longer = run(tmp_path, order=replace(plan.order, epochs=3), ckpt_interval=3, spec=SPEC | {"trainer.epochs": 3})
    assert (longer.step, longer.total_steps) == (6, 9)


def test_a_run_that_goes_on_elsewhere_brings_its_history_along(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    run(here)
    run(there, resume_mode="from_path", resume_path=here / "ckpts" / "global_step_4")
    lines = history(read_events(there / "events.jsonl"))
    assert [line.event.step for line in lines if isinstance(line.event, StepEvent)] == [1, 2, 3, 4, 5, 6]
    assert final_adapter(there) == final_adapter(here)
