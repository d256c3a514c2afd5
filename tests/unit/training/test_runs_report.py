"""What a run and several runs came to, as figures and pages, and what the terminal shows of them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.scripted_run import ScriptedLearner, ScriptedSampler, plan_in
from training.runs import report
from training.runs.events import EvalEvent, EventLog, RunStarted, StepEvent
from training.runs.loop import Loop
from training.runs.summary import NoRun, load, summarize
from training.runs.surroundings import Machine, Surroundings
from training.runs.watching import Lines, Pace, Screen, told


class Clock:
    """A second passes each time that it is asked."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def run(folder: Path, seed: int = 1, stop=lambda: False, start_up_s: float = 0.0, listeners=(), **changed):
    folder.mkdir(exist_ok=True)
    plan = plan_in(folder, **changed)
    plan = replace(plan, order=replace(plan.order, seed=seed))
    clock = Clock()
    around = Surroundings(machine=Machine("cuda", 2, start_up_s), stop=stop, clock_s=clock)
    log = EventLog(folder / "events.jsonl", listeners, now_s=clock)
    Loop(plan, ScriptedSampler(), ScriptedLearner(seed), log, around).run()


def told_in(folder: Path, kind: type) -> list:
    return [line.event for line in load(folder) if isinstance(line.event, kind)]


def test_rates_are_those_of_the_last_step_and_not_of_the_best(tmp_path):
    run(tmp_path)
    found = summarize(tmp_path, load(tmp_path))
    last = {f"{event.set}/{event.decoding}": event.solve_rate for event in told_in(tmp_path, EvalEvent) if event.step == 6}
    assert found.at_end == last and found.is_whole and set(found.before) == set(last)


def test_a_run_that_is_not_done_has_no_rates_of_a_last_step_that_was_not_evaluated(tmp_path):
    asked = iter([False, True])
    run(tmp_path, stop=lambda: next(asked))
    found = summarize(tmp_path, load(tmp_path))
    assert (found.at_end, found.ended, found.is_whole) == ({}, "stopped", False)


def test_cost_is_wall_clock_times_the_devices_that_were_held_all_along(tmp_path):
    run(tmp_path, start_up_s=40)
    found = summarize(tmp_path, load(tmp_path))
    assert found.device_s == 2 * found.wall_s and found.wall_s > 40
    assert found.parts_s["start up"] == 40 and {"play", "learn", "evaluate", "checkpoint"} <= set(found.parts_s)
    assert found.sampled_tokens == 6 * 4 * 8


def test_work_that_was_lost_costs_time_but_counts_no_tokens(tmp_path):
    alone, again = tmp_path / "alone", tmp_path / "again"
    run(alone)

    class Broken(ScriptedSampler):
        def play(self, tasks, sampling):
            if self.policy_step == 5:
                raise RuntimeError
            return super().play(tasks, sampling)

    again.mkdir()
    with pytest.raises(RuntimeError):
        Loop(plan_in(again), Broken(), ScriptedLearner(), EventLog(again / "events.jsonl")).run()
    run(again, start_up_s=7)
    left_alone, taken_up = (summarize(folder, load(folder)) for folder in (alone, again))
    assert taken_up.sampled_tokens == left_alone.sampled_tokens
    (recovery,) = taken_up.recoveries
    assert (recovery.at_step, recovery.reached_step, recovery.lost_steps) == (4, 5, 1)
    assert recovery.start_up_s == 7 and recovery.caught_up_s > 7


def test_several_seeds_have_a_mean_and_a_samples_deviation(tmp_path):
    folders = [tmp_path / f"seed-{seed}" for seed in (1, 2, 3)]
    for seed, folder in enumerate(folders, 1):
        run(folder, seed)
    found = report.write(folders, tmp_path)
    spread = found["at_end"]["easy-64/sampled"]
    rates = [summarize(folder, load(folder)).at_end["easy-64/sampled"] for folder in folders]
    mean = sum(rates) / 3
    assert spread["mean"] == pytest.approx(mean)
    assert spread["deviation"] == pytest.approx((sum((rate - mean) ** 2 for rate in rates) / 2) ** 0.5)
    assert (spread["lowest"], spread["highest"], spread["seeds"]) == (min(rates), max(rates), 3)


def test_a_report_is_a_page_with_curves_figures_and_what_recovery_cost(tmp_path):
    asked = iter([False, True])
    run(tmp_path, stop=lambda: next(asked))
    run(tmp_path)
    report.write([tmp_path], tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "## Solved" in page and "## Cost" in page and "## Recovery" in page
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")
    assert json.loads((tmp_path / "summary.json").read_text())["whole"] is True
    assert json.loads((tmp_path / "recovery.json").read_text())[str(tmp_path)][0]["lost_steps"] == 0


def test_the_same_run_draws_the_same_bytes(tmp_path):
    run(tmp_path)
    report.write([tmp_path], tmp_path / "one")
    report.write([tmp_path], tmp_path / "two")
    assert (tmp_path / "one" / "curves.svg").read_bytes() == (tmp_path / "two" / "curves.svg").read_bytes()


def test_a_folder_without_a_run_is_refused_by_name(tmp_path):
    with pytest.raises(NoRun, match=str(tmp_path)):
        report.write([tmp_path], tmp_path)


def test_where_nobody_watches_each_event_is_a_line_with_the_time_that_is_left(tmp_path):
    lines: list[str] = []
    run(tmp_path, listeners=[Lines(plan_in(tmp_path), lines.append)])
    steps = [line for line in lines if line.startswith("step 5/6: ")]
    assert len(steps) == 1 and steps[0].endswith(" left")
    assert lines[0].startswith("seed 1: starting of 6") and lines[-1].startswith("finished at step 6")


def test_where_somebody_watches_steps_evaluations_and_a_bar_are_shown(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    screen = Screen(plan_in(tmp_path), console)
    with screen:
        run(tmp_path, listeners=[screen])
        screen.phase("play")
    shown = console.file.getvalue()
    assert "tokens/s" in shown and "step 6/6" in shown and "easy-64 greedy" in shown


def test_the_time_left_is_that_of_steps_and_of_evaluations_to_come(tmp_path):
    pace = Pace(plan_in(tmp_path))
    assert pace.left_s() is None
    step = StepEvent(4, 2, 0.5, 0.5, 1.0, 3.0, 4.0, 0.0, 4, 48, {"play": 3.0, "learn": 1.0})
    pace.note(EvalEvent(4, "easy-64", "sampled", 4, 2, 3.0, 10, 8.0))
    pace.note(EvalEvent(4, "easy-64", "greedy", 4, 2, 3.0, 10, 4.0))
    pace.note(step)
    assert pace.left_s() == 2 * 4.0 + (8.0 + 4.0 + 2 * 3 * 1.5)


def test_a_resumption_says_what_is_done_again_and_which_checkpoints_were_passed_over():
    line = told(RunStarted(4, 10, 1, "d1", "cpu", 1, True, 7, ("global_step_6: weights are not as they were written",)))
    assert "going on after step 4 of 10, 3 steps are done again" in line and "passed over: global_step_6" in line
