"""What a specification starts: runs of seeds in folders of their own, one at a time in each, ended cleanly."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from pathlib import Path

import pytest
import yaml

from adapters.errors import LoraMuxError
from tests.scripted_run import ScriptedLearner, ScriptedSampler
from training.runs import start
from training.runs.events import RunEnded, StepEvent, read_events
from training.runs.from_spec import plan_of
from training.runs.plan import BadPlan
from training.runs.start import Busy, Hands, Job, train
from training.runs.stopping import Stopping
from training.runs.watching import Lines
from training.spec import BadTrainSpec, TrainSpec

VALUES = {
    "trainer": {
        "policy": {"model": {"path": "base", "lora": {"rank": 4}}},
        "algorithm": {"use_kl_loss": False, "temperature": 1.0},
        "train_batch_size": 2,
        "policy_mini_batch_size": 2,
        "epochs": 1,
        "eval_interval": -1,
        "ckpt_interval": 2,
        "seed": 3,
    },
    "generator": {"n_samples_per_prompt": 2, "max_turns": 21, "max_input_length": 512},
    "loramux": {"maze": {"size": 9, "cell_px": 16, "actions": "keyword"}, "training_mazes": {"count": 8}},
}


@pytest.fixture(autouse=True)
def _no_model(monkeypatch):
    monkeypatch.setattr(start, "Learner", lambda spec, world: ScriptedLearner(spec.trainer.seed))


def spec_of(*changes: str) -> TrainSpec:
    return TrainSpec.from_values(VALUES, changes)


def hands(lines: list[str] | None = None, stopping: Stopping | None = None) -> Hands:
    say = (lines if lines is not None else []).append
    return Hands(lambda plan: Lines(plan, say), stopping or Stopping(say), say)


def run(job: Job, sampler: ScriptedSampler | None = None, **given) -> list[RunEnded]:
    return train(job, hands(**given), lambda spec: sampler or ScriptedSampler())


def steps_in(folder: Path) -> list[int]:
    return [line.event.step for line in read_events(folder / "events.jsonl") if isinstance(line.event, StepEvent)]


def test_a_run_leaves_its_spec_events_export_checkpoint_and_report_in_its_folder(tmp_path):
    run(Job(spec_of(), tmp_path, (3,)))
    assert TrainSpec.load(tmp_path / "spec.yaml") == spec_of()
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    for left in ("exports/global_step_4/policy/adapter_model.safetensors", "ckpts/global_step_4", "report.md", "summary.json"):
        assert (tmp_path / left).exists(), left


def test_seeds_run_one_after_the_other_with_one_start_of_the_engine(tmp_path):
    sampler = ScriptedSampler()
    assert [one.reason for one in run(Job(spec_of(), tmp_path, (3, 4)), sampler)] == ["finished", "finished"]
    assert sampler.calls.count("base") == 2 and sampler.calls.count("close") == 1
    adapters = [(tmp_path / f"seed-{seed}/exports/global_step_4/policy/adapter_model.safetensors").read_text() for seed in (3, 4)]
    assert adapters[0] != adapters[1]
    assert [one["seed"] for one in json.loads((tmp_path / "summary.json").read_bytes())["runs"]] == [3, 4]


def test_a_seed_of_several_trains_as_it_does_alone(tmp_path):
    run(Job(spec_of(), tmp_path / "both", (3, 4)))
    run(Job(spec_of("trainer.seed=4"), tmp_path / "alone", (4,)))
    left = "exports/global_step_4/policy/adapter_model.safetensors"
    assert (tmp_path / "both/seed-4" / left).read_text() == (tmp_path / "alone" / left).read_text()


def test_the_engine_is_closed_whatever_happens(tmp_path):
    class Broken(ScriptedSampler):
        def play(self, tasks, sampling):
            raise RuntimeError

    sampler = Broken()
    with pytest.raises(RuntimeError):
        run(Job(spec_of(), tmp_path, (3,)), sampler)
    assert sampler.calls[-1] == "close"


def test_a_report_that_cannot_be_written_costs_nothing_and_is_said(tmp_path):
    lines: list[str] = []
    (tmp_path / "curves.svg").mkdir()
    (ended,) = run(Job(spec_of(), tmp_path, (3,)), lines=lines)
    assert ended.reason == "finished" and f"later: loramux train report {tmp_path}" in lines[-1]


def test_what_was_not_published_is_told_with_the_command_that_does_it_later(tmp_path):
    config = tmp_path / "loramux.yaml"
    nobody = {"url": "s3://bucket/registry", "endpoint": "http://127.0.0.1:9", "access_key_id": "a", "secret_access_key": "b"}
    config.write_text(yaml.safe_dump({"registry": nobody}))
    lines: list[str] = []
    spec = spec_of("loramux.publish={base: demo, name: maze, alias: null, close_timeout_s: 0.5}")
    (ended,) = run(Job(spec, tmp_path / "run", (3,), config=config), lines=lines)
    assert ended.reason == "finished"
    assert any(line.startswith("step 4 is not published") for line in lines)
    assert f"later: loramux train publish {tmp_path / 'run/exports'} --base demo --name maze" in lines


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    with (tmp_path / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Busy, match=str(tmp_path)):
            run(Job(spec_of(), tmp_path, (3,)))


def test_an_interrupt_ends_the_run_after_the_step_in_flight_and_the_same_command_goes_on(tmp_path):
    lines: list[str] = []
    stopping = Stopping(lines.append)

    def interrupt(step: int) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    (ended,) = run(Job(spec_of(), tmp_path, (3,)), ScriptedSampler(on_play=interrupt), stopping=stopping)
    assert (ended.step, ended.reason) == (2, "stopped") and any("ending after the step in flight" in line for line in lines)
    (ended,) = run(Job(spec_of(), tmp_path, (3,)))
    assert ended.reason == "finished" and steps_in(tmp_path) == [1, 2, 3, 4]


def test_a_second_interrupt_ends_it_where_it_is(tmp_path):
    def interrupt_twice(step: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(Job(spec_of(), tmp_path, (3,)), ScriptedSampler(on_play=interrupt_twice))


def test_no_further_seed_begins_after_an_interrupt(tmp_path):
    stopping = Stopping(lambda text: None)
    sampler = ScriptedSampler(on_play=lambda step: step == 0 and os.kill(os.getpid(), signal.SIGTERM))
    assert len(run(Job(spec_of(), tmp_path, (3, 4)), sampler, stopping=stopping)) == 1
    assert not (tmp_path / "seed-4" / "events.jsonl").exists()


def test_what_this_machine_cannot_do_is_refused_before_the_engine_starts(tmp_path):
    with pytest.raises(BadTrainSpec, match="tensor_parallel_size"):
        train(Job(spec_of("generator.inference_engine.tensor_parallel_size=2"), tmp_path, (3,)), hands(), pytest.fail)


def test_a_registry_that_cannot_be_is_refused_before_the_engine_starts(tmp_path):
    publish = ["loramux.publish.name=maze", "loramux.publish.base=base", "loramux.publish.registry=ftp://nowhere"]
    with pytest.raises(LoraMuxError):
        train(Job(spec_of(*publish), tmp_path, (3,)), hands(), pytest.fail)


def test_a_job_travels_to_other_processes_as_it_is(tmp_path):
    job = Job(spec_of(), tmp_path, (3, 4), keep_paths=True)
    assert Job.from_json(job.as_json()) == job


def test_files_go_below_the_folder_that_was_named_and_else_where_the_spec_says(tmp_path):
    spec = spec_of(f"trainer.ckpt_path={tmp_path}/elsewhere")
    assert plan_of(spec, tmp_path / "run").ckpt_path == tmp_path / "run" / "ckpts"
    kept = plan_of(spec, tmp_path / "run", keep_paths=True)
    assert (kept.ckpt_path, kept.export_path) == (tmp_path / "elsewhere", tmp_path / "run" / "exports")


def test_greedy_decoding_that_would_roll_dice_is_refused(tmp_path):
    with pytest.raises(BadPlan, match=r"eval_sampling_params\.temperature is 0\.7"):
        plan_of(spec_of("generator.eval_sampling_params.temperature=0.7"), tmp_path)


def test_the_shipped_specs_are_plans(tmp_path):
    for name in ("demo", "h200"):
        file = Path(start.__file__).parents[1] / "specs" / f"{name}.yaml"
        assert plan_of(TrainSpec.load(file), tmp_path).total_steps > 10
        assert yaml.safe_load(file.read_text())["loramux"]["maze"]["size"] == 9
