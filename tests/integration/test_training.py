"""A whole run with a real engine and a real learner: what is killed and taken up again ends with the same bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from training.runs.events import RunStarted, StepEvent, read_events

ROOT = Path(__file__).parents[2]
STEPS = 5
LIMIT_S = 240.0

# An untrained base solves nothing; entropy teaches it something even so. One thread each: bits depend on how many there are.
SPEC = """
trainer:
  policy:
    model: {{path: {base}, lora: {{rank: 8, alpha: 16, exclude_modules: '.*\\bvisual\\b.*'}}}}
    optimizer_config: {{lr: 1.0e-2}}
  algorithm: {{use_kl_loss: false, use_entropy_loss: true, entropy_loss_coef: 0.1}}
  train_batch_size: 2
  policy_mini_batch_size: 1
  micro_train_batch_size_per_gpu: 2
  micro_forward_batch_size_per_gpu: 2
  max_prompt_length: 512
  epochs: 1
  ckpt_interval: 2
  hf_save_interval: -1
  eval_interval: -1
  max_ckpts_to_keep: 2
generator:
  n_samples_per_prompt: 2
  max_turns: 2
  max_input_length: 1024
  sampling_params: {{max_generate_length: 4}}
  inference_engine: {{model_dtype: float32, engine_init_kwargs: {{max_model_len: 1088}}}}
loramux:
  threads: 1
  maze: {{size: 5, max_turns: 2, cell_px: 16, actions: keyword}}
  training_mazes: {{count: {mazes}}}
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    subprocess.run([sys.executable, "-m", "training.base.untrained", str(folder / "base")], check=True)
    (folder / "spec.yaml").write_text(SPEC.format(base=folder / "base", mazes=2 * STEPS))
    return folder / "spec.yaml"


def start(spec: Path, folder: Path) -> subprocess.Popen:
    command = [Path(sys.executable).with_name("loramux"), "train", str(spec), "--out", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def finish(process: subprocess.Popen) -> str:
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    return said


def kill_when(process: subprocess.Popen, seen: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not seen():
        assert process.poll() is None and time.monotonic() < deadline_s, process.communicate(timeout=LIMIT_S)[0]
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)


def steps_told(folder: Path) -> list[int]:
    return [line.event.step for line in read_events(folder / "events.jsonl") if isinstance(line.event, StepEvent)]


@pytest.mark.timeout(1200)  # four starts of an engine
def test_a_run_killed_in_a_step_and_while_it_writes_a_checkpoint_ends_with_the_same_bytes_as_one_left_alone(spec, tmp_path):
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    finish(start(spec, alone))
    kill_when(start(spec, killed), lambda: 3 in steps_told(killed))
    kill_when(start(spec, killed), lambda: (killed / "ckpts" / ".global_step_4.staging" / "policy").is_dir())
    finish(start(spec, killed))

    weights = f"exports/global_step_{STEPS}/policy/adapter_model.safetensors"
    assert (killed / weights).read_bytes() == (alone / weights).read_bytes()
    starts = [line.event for line in read_events(killed / "events.jsonl") if isinstance(line.event, RunStarted)]
    assert [one.step for one in starts] == [0, 2, 2]
    (recoveries,) = json.loads((killed / "recovery.json").read_bytes()).values()
    assert [one["lost_steps"] for one in recoveries] == [1, 2]
    assert all(learned(alone))


def learned(folder: Path) -> list[bool]:
    """Whether each step changed the policy: bytes that nothing ever changes prove nothing."""
    events = [line.event for line in read_events(folder / "events.jsonl") if isinstance(line.event, StepEvent)]
    return [event.learner["policy/raw_grad_norm"] > 0 for event in events]


def test_the_shipped_base_is_short_of_solving_the_fixed_mazes_and_well_above_nothing():
    loramux, base = Path(sys.executable).with_name("loramux"), ROOT / "training/base/weights"
    command = [loramux, "eval", "--base", base, "--set", "easy-64", "--sampled", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = json.loads(done.stdout)
    assert 0.35 <= found["solve_rate"] <= 0.5
