"""Engines in processes of their own: who plays what, and what is said of one that fails. The processes have no engine here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.rollout_worker import DIES, FAILS, REFUSES, TAKES_LONG
from training.rollouts import BadAdapter, BadRollout, EngineDied, Rollouts
from training.rollouts.engines import deal
from training.rollouts.settings import engine_environment, engine_settings
from training.spec import TrainSpec
from training.trajectory import Sampling, Task

WORKER = (sys.executable, "-m", "tests.rollout_worker")
ENGINE = "generator.inference_engine"


def spec_of(*overrides: str) -> TrainSpec:
    return TrainSpec.from_values({"trainer": {"policy": {"model": {"path": "base"}}}, "loramux": {"device": "cpu"}}, overrides)


@contextmanager
def started(engines: int = 1, *overrides: str) -> Iterator[Rollouts]:
    rollouts = Rollouts(spec_of(f"{ENGINE}.num_engines={engines}", *overrides), worker=WORKER)
    try:
        yield rollouts
    finally:
        rollouts.close()


@pytest.fixture(scope="module")
def two():
    """Two engines, for tests that leave them alive."""
    with started(2) as rollouts:
        yield rollouts


def tasks_of(*seeds: int, samples: int = 1) -> list[Task]:
    return [Task(seed, sample) for sample in range(samples) for seed in seeds]


def pids(played) -> dict[int, set[int]]:
    """Of each maze the processes that played it."""
    found: dict[int, set[int]] = {}
    for one in played:
        found.setdefault(one.task.maze_seed, set()).update(one.token_ids)
    return found


def is_there(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Who plays what


def test_groups_are_dealt_whole_to_whoever_has_fewest():
    assert deal(tasks_of(1, 2, 3, samples=2), 2) == [[0, 3, 2, 5], [1, 4]]


def test_more_engines_than_groups_leave_some_without_work():
    assert deal(tasks_of(1), 3) == [[0], [], []]


def test_trajectories_come_in_the_order_of_tasks_whoever_played_them(two):
    tasks = tasks_of(5, 4, 3, 2, 1, samples=2)
    assert [one.task for one in two.play(tasks, Sampling())] == tasks


def test_a_group_is_played_by_one_engine_and_all_engines_play(two):
    played = pids(two.play(tasks_of(1, 2, 3, 4, samples=3), Sampling()))
    assert {len(by) for by in played.values()} == {1}
    assert len(set.union(*played.values())) == 2


def test_a_lone_engine_is_not_in_this_process_either():
    with started() as rollouts:
        assert pids(rollouts.play(tasks_of(1), Sampling())) != {1: {os.getpid()}}


# Policies


def test_trajectories_say_which_policy_played_them(two, tmp_path):
    steps = []
    for use in (two.use_base, lambda: two.use_adapter(tmp_path, 7), two.use_base):
        use()
        steps.append({one.policy_step for one in two.play(tasks_of(1, 2), Sampling())})
    assert steps == [{0}, {7}, {0}]


def test_an_adapter_that_is_refused_leaves_the_base_playing(two, tmp_path):
    two.use_adapter(tmp_path, 7)
    with pytest.raises(BadAdapter, match="has no adapter_config"):
        two.use_adapter(tmp_path / "absent", 8)
    assert {one.policy_step for one in two.play(tasks_of(1, 2), Sampling())} == {0}


# Failures


def test_an_engine_that_died_is_named_with_its_last_words_and_plays_no_more():
    with started(2) as rollouts:
        with pytest.raises(EngineDied, match=r"(?s)engine 1 died at play \(exit status 3\).*out of luck"):
            rollouts.play(tasks_of(1, DIES), Sampling())
        with pytest.raises(EngineDied, match="engine 1"):
            rollouts.play(tasks_of(1, 2), Sampling())


def test_an_engine_that_failed_is_named_with_the_reason():
    with started() as rollouts, pytest.raises(EngineDied, match="engine 0 failed at play: RuntimeError: no memory left"):
        rollouts.play(tasks_of(FAILS), Sampling())


def test_an_engine_that_does_not_start_is_named_with_the_reason():
    with pytest.raises(EngineDied, match="engine 0 failed at start: RuntimeError: no such device"):
        Rollouts(spec_of(f"trainer.seed={FAILS}"), worker=WORKER)


def test_what_one_engine_refuses_is_raised_and_all_play_on(two):
    with pytest.raises(BadRollout, match="too long"):
        two.play(tasks_of(REFUSES, 1), Sampling())
    assert len(two.play(tasks_of(1, 2), Sampling())) == 2


# Ends


def test_closing_ends_the_processes_and_is_fine_twice():
    with started(2) as rollouts:
        there = set.union(*pids(rollouts.play(tasks_of(1, 2), Sampling())).values())
        rollouts.close()
    assert not any(map(is_there, there))


def test_an_engine_ends_with_whoever_started_it_also_in_the_middle_of_something():
    script = f"""if True:
        import sys
        from tests.unit.training.test_rollouts_engines import WORKER, Rollouts, Sampling, spec_of, tasks_of
        rollouts = Rollouts(spec_of(), worker=WORKER)
        print(*rollouts.play(tasks_of(1), Sampling())[0].token_ids, flush=True)
        rollouts.play(tasks_of({TAKES_LONG}), Sampling())
    """
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        engine = int(trainer.stdout.readline())
        trainer.send_signal(signal.SIGKILL)
    until = time.monotonic() + 30
    while is_there(engine) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_there(engine)


# Settings


def test_ranks_are_rounded_up_to_what_the_engine_takes():
    arguments = engine_settings(spec_of("trainer.policy.model.lora.rank=12"), "cpu").arguments
    assert arguments["max_lora_rank"] == 16


def test_a_rank_that_no_engine_takes_is_refused_with_the_limit():
    with pytest.raises(ValueError, match=r"lora.rank is 600: engines take adapters up to rank 512"):
        engine_settings(spec_of("trainer.policy.model.lora.rank=600"), "cpu")


def test_engines_own_arguments_go_before_all_others():
    arguments = engine_settings(spec_of(f"{ENGINE}.engine_init_kwargs={{max_model_len: 777, seed: 5}}"), "cpu").arguments
    assert (arguments["max_model_len"], arguments["seed"]) == (777, 5)


def test_only_engines_that_share_a_gpu_with_learners_sleep():
    apart = "trainer.placement.colocate_all=false"
    found = [engine_settings(spec_of(*more), device).can_sleep for device in ("cuda", "cpu") for more in ((), (apart,))]
    assert found == [True, False, False, False]


def test_engines_share_the_cores_of_a_machine_without_gpus():
    spec = spec_of(f"{ENGINE}.num_engines=2", "loramux.threads=4")
    assert engine_environment(spec, 0, "cpu", {})["OMP_NUM_THREADS"] == "2"


def test_an_engine_is_none_of_several_learners():
    of_a_learner = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "PATH": "/bin"}
    found = engine_environment(spec_of(), 0, "cpu", of_a_learner)
    assert "RANK" not in found and "WORLD_SIZE" not in found and "MASTER_ADDR" not in found and found["PATH"] == "/bin"


def test_an_engine_loads_no_plugins():
    assert engine_environment(spec_of(), 0, "cpu", {"VLLM_PLUGINS": "all"})["VLLM_PLUGINS"] == ""


@pytest.mark.parametrize(("colocated", "visible", "gpu"), [("true", None, "0"), ("true", "4,6", "4"), ("false", "4,5,6", "6")])
def test_engines_sit_on_the_learners_gpus_or_on_those_after_them(colocated, visible, gpu):
    spec = spec_of(f"{ENGINE}.num_engines=2", f"trainer.placement.colocate_all={colocated}")
    inherited = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    assert engine_environment(spec, 1, "cuda", inherited)["CUDA_VISIBLE_DEVICES"] == gpu


def test_a_gpu_that_is_not_there_is_missed_with_its_number():
    spec = spec_of("trainer.placement.colocate_all=false")
    with pytest.raises(ValueError, match="engine 0 needs GPU number 1"):
        engine_environment(spec, 0, "cuda", {"CUDA_VISIBLE_DEVICES": "3"})
