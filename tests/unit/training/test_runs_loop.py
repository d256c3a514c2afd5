"""The loop of a run: what is done in which order, how often, and what is told of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.scripted_run import ScriptedLearner, ScriptedSampler, plan_in
from training.runs import loop
from training.runs.events import (
    AdapterSaved,
    CheckpointSaved,
    EvalEvent,
    EventLog,
    RunEnded,
    RunStarted,
    StepEvent,
    Trouble,
    read_events,
)
from training.runs.loop import Loop
from training.runs.surroundings import Surroundings
from training.trajectory import Played


def run(folder: Path, *, sampler=None, learner=None, around=None, **changed) -> RunEnded:
    plan = plan_in(folder, **changed)
    return Loop(plan, sampler or ScriptedSampler(), learner or ScriptedLearner(), EventLog(folder / "events.jsonl"), around).run()


def told(folder: Path, kind: type) -> list:
    return [line.event for line in read_events(folder / "events.jsonl") if isinstance(line.event, kind)]


def final_adapter(folder: Path) -> bytes:
    return (folder / "exports" / "global_step_6" / "policy" / "adapter_model.safetensors").read_bytes()


def full_disk(times: int, what: str):
    left = [times]

    def refuse(asked: str) -> None:
        if asked == what and left[0] > 0:
            left[0] -= 1
            raise OSError(28, "No space left on device")

    return refuse


def test_a_step_plays_with_the_policy_before_it_and_shuts_the_engine_down_while_the_learner_works(tmp_path):
    sampler = ScriptedSampler()
    run(tmp_path, sampler=sampler)
    begin = sampler.calls.index("play 4 at 0.7", sampler.calls.index("base") + 5)
    assert sampler.calls[begin : begin + 4] == ["play 4 at 0.7", "sleep", "wake", "adapter 1"]


def test_before_the_first_step_the_base_plays(tmp_path):
    sampler = ScriptedSampler()
    run(tmp_path, sampler=sampler)
    assert sampler.calls[0] == "base" and "adapter 0" not in sampler.calls


def test_sets_are_played_sampled_and_greedy_at_intervals_and_all_of_them_before_and_at_the_end(tmp_path):
    run(tmp_path)
    played = [(event.step, event.set, event.decoding) for event in told(tmp_path, EvalEvent)]
    both = [("easy-64", "sampled"), ("easy-64", "greedy")]
    all_four = [*both, ("hard-128", "sampled"), ("hard-128", "greedy")]
    assert played == [(step, *one) for step, sets in ((0, all_four), (2, both), (4, both), (6, all_four)) for one in sets]


def test_an_evaluation_leaves_each_maze_as_a_line(tmp_path):
    run(tmp_path)
    event = told(tmp_path, EvalEvent)[2]
    rows = [Played.from_dict(json.loads(line)) for line in (tmp_path / event.file).read_text().splitlines()]
    assert (len(rows), sum(row.solved for row in rows)) == (event.mazes, event.solved)
    assert (rows[0].size, rows[0].actions) == (11, ("up", "?unreadable"))


def test_solves_are_counted_by_the_environment_and_not_by_the_reward(tmp_path):
    class Generous(ScriptedSampler):
        def _played(self, task, sampling):
            from dataclasses import replace

            return replace(super()._played(task, sampling), reward=1.0, solved=False)

    run(tmp_path, sampler=Generous())
    step = told(tmp_path, StepEvent)[0]
    assert (step.solve_rate, step.reward_mean) == (0.0, 1.0)
    assert {event.solved for event in told(tmp_path, EvalEvent)} == {0}


def test_checkpoints_and_exports_come_at_intervals_at_the_end_of_an_epoch_and_at_the_end(tmp_path):
    run(tmp_path)
    assert [event.step for event in told(tmp_path, CheckpointSaved)] == [2, 3, 4, 6]
    assert [event.step for event in told(tmp_path, AdapterSaved)] == [2, 3, 4, 6]


def test_the_last_adapter_is_exported_even_if_none_was_asked_for(tmp_path):
    run(tmp_path, hf_save_interval=-1, ckpt_interval=-1)
    assert [event.step for event in told(tmp_path, AdapterSaved)] == [6]
    assert told(tmp_path, CheckpointSaved) == []


def test_an_export_is_told_with_what_its_evaluation_found(tmp_path):
    run(tmp_path)
    saved, found = told(tmp_path, AdapterSaved)[-1], told(tmp_path, EvalEvent)[-1]
    assert saved.metrics["eval/hard-128/greedy/solve_rate"] == found.solve_rate
    assert "train/solve_rate" in saved.metrics and saved.spec_digest == "d1"


def test_each_export_is_offered_to_the_publisher(tmp_path):
    class Publisher:
        offered: list[int] = []  # noqa: RUF012 - one test's

        def offer(self, saved):
            self.offered.append(saved.step)

        def close(self, timeout_s):
            pass

    publisher = Publisher()
    run(tmp_path, around=Surroundings(publisher=publisher))
    assert publisher.offered == [2, 3, 4, 6]


def test_a_checkpoint_that_the_disk_refuses_is_told_of_and_tried_again_after_the_next_step(tmp_path):
    learner = ScriptedLearner()
    learner.refuse = full_disk(1, "state")
    assert run(tmp_path, learner=learner, ckpt_interval=4).reason == "finished"
    assert [(one.step, one.what) for one in told(tmp_path, Trouble)] == [(3, "checkpoint")]
    assert [event.step for event in told(tmp_path, CheckpointSaved)] == [4, 6]


def test_an_export_that_the_disk_refuses_is_tried_again_after_the_next_step(tmp_path):
    class Full(ScriptedLearner):
        def save_adapter(self, folder):
            if folder.parent.name == "global_step_2":
                raise OSError(28, "No space left on device")
            super().save_adapter(folder)

    run(tmp_path, learner=Full(), hf_save_interval=2)
    assert [(one.step, one.what) for one in told(tmp_path, Trouble)] == [(2, "export")]
    assert [event.step for event in told(tmp_path, AdapterSaved)] == [3, 4, 6]


def test_a_disk_that_is_full_at_the_end_is_waited_for(tmp_path):
    learner, waited = ScriptedLearner(), []
    learner.refuse = full_disk(4, "state")
    ended = run(tmp_path, learner=learner, ckpt_interval=6, around=Surroundings(sleep_s=waited.append))
    assert ended.reason == "finished" and waited == [loop.RETRY_S]
    assert [event.step for event in told(tmp_path, CheckpointSaved)] == [6]


def test_a_run_whose_last_checkpoint_never_gets_written_says_so(tmp_path):
    learner = ScriptedLearner()
    learner.refuse = full_disk(10_000, "state")
    assert run(tmp_path, learner=learner, around=Surroundings(sleep_s=lambda seconds: None)).reason == "unsaved"


def test_the_adapter_for_the_sampler_goes_where_there_is_room(tmp_path):
    class Full(ScriptedLearner):
        def save_adapter(self, folder):
            if "shm" in folder.parts:
                raise OSError(28, "No space left on device")
            super().save_adapter(folder)

    ended = run(tmp_path, learner=Full(), adapter_paths=(tmp_path / "shm", tmp_path / "adapters"))
    assert ended.reason == "finished"
    assert {one.what for one in told(tmp_path, Trouble)} == {"adapter"}


def test_adapters_for_the_sampler_do_not_pile_up(tmp_path):
    seen = []
    run(tmp_path, sampler=ScriptedSampler(on_play=lambda step: seen.append(len(list((tmp_path / "adapters").glob("*"))))))
    assert max(seen) == 1 and not list((tmp_path / "adapters").glob("*"))


def test_a_run_that_is_stopped_keeps_the_step_in_flight_and_goes_on_from_it(tmp_path):
    alone, stopped = tmp_path / "alone", tmp_path / "stopped"
    alone.mkdir()
    stopped.mkdir()
    run(alone)
    asked = iter([False, True])
    ended = run(stopped, around=Surroundings(stop=lambda: next(asked)))
    assert (ended.step, ended.reason) == (1, "stopped")
    assert [event.step for event in told(stopped, CheckpointSaved)] == [1]
    assert run(stopped).reason == "finished"
    assert final_adapter(stopped) == final_adapter(alone)


def test_an_engine_that_fails_ends_the_run_which_then_goes_on_from_its_checkpoint(tmp_path):
    class EngineGone(RuntimeError):
        pass

    def gone(step: int) -> None:
        if step == 4:
            raise EngineGone

    alone, broken = tmp_path / "alone", tmp_path / "broken"
    alone.mkdir()
    broken.mkdir()
    run(alone)
    with pytest.raises(EngineGone):
        run(broken, sampler=ScriptedSampler(on_play=gone))
    assert told(broken, RunEnded)[0].reason == "failed"
    run(broken)
    started = told(broken, RunStarted)[1]
    assert (started.resumed, started.step, started.reached_step) == (True, 3, 4)
    assert final_adapter(broken) == final_adapter(alone)


def test_two_ranks_learn_the_same_and_one_of_them_talks(tmp_path):
    """Both in this process, turn by turn: what rank 0 shares is what rank 1 gets."""
    import queue
    import threading

    class Rank:
        world_size = 2

        def __init__(self, rank, out, back):
            self.rank, self._out, self._back = rank, out, back

        def shared(self, value):
            return self._swapped(value)[0]

        def any(self, value):
            return any(self._swapped(value))

        def _swapped(self, value):
            self._out.put(value)
            other = self._back.get(timeout=30)
            return (value, other) if self.rank == 0 else (other, value)

    there, back = queue.Queue(), queue.Queue()
    learners = [ScriptedLearner(), ScriptedLearner()]
    learners[1].save_adapter = learners[1].save_state = lambda folder: None
    second = Loop(plan_in(tmp_path), None, learners[1], None, Surroundings(ranks=Rank(1, back, there)))
    thread = threading.Thread(target=second.run)
    thread.start()
    run(tmp_path, learner=learners[0], around=Surroundings(ranks=Rank(0, there, back)))
    thread.join(30)
    assert learners[0].policy == learners[1].policy
    assert len(told(tmp_path, StepEvent)) == 6
