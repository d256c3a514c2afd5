"""A spec in SkyRL's own hands, from its wheel: what it understands of it, and its training loop with our experiment, a process of
its own. Workers and engines need GPUs and are not there; `tests/skyrl_trains.py` says what stands in for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.repo.checkout import ROOT
from tests.skyrl_apart import run_with_skyrl
from training.base.untrained import make_untrained
from training.maze import MazeSpec, training_mazes
from training.skyrl.overrides import put_right
from training.spec import TrainSpec

SOLVABLE = 63 / 64
OTHERWISE_BY_DEFAULT = {
    "data.train_data": "tickets are made of mazes",
    "data.val_data": "tickets are made of mazes",
    "trainer.policy.model.path": "no model is the default model",
    "environment.env_class": "the maze",
    "trainer.ckpt_path": "the home folder is put in where it is used",
    "trainer.export_path": "the home folder is put in where it is used",
}


def small(folder: Path) -> dict[str, Any]:
    """Four steps of two mazes each, an evaluation every second step, in batches that are smaller than the set."""
    rules = MazeSpec(cell_px=4, actions="keyword", observation="text").as_dict()
    return {
        "data": {"dataloader": {"num_workers": 0}},
        "trainer": {
            "policy": {"model": {"path": str(folder / "base"), "lora": {"rank": 4, "lora_sync_path": str(folder / "sync")}}},
            "algorithm": {"use_kl_loss": False},
            "train_batch_size": 2,
            "policy_mini_batch_size": 2,
            "eval_batch_size": 24,
            "epochs": 2,
            "eval_interval": 2,
            "ckpt_interval": 2,
            "hf_save_interval": 1,
            "resume_mode": "none",
            "ckpt_path": str(folder / "ckpts"),
            "export_path": str(folder / "exports"),
            "logger": "console",
            "enable_ray_gpu_monitor": False,
            "dump_eval_results": False,
            "print_example_interval": 0,
        },
        "generator": {"max_turns": 21, "inference_engine": {"enable_ray_prometheus_stats": False}},
        "loramux": {"maze": rules, "training_mazes": {"first_seed": 100, "count": 4}, "publish": {"close_timeout_s": 7.0}},
    }


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("skyrl")
    make_untrained(folder / "base")
    (folder / "specs").mkdir()
    (folder / "specs" / "small.yaml").write_text(yaml.safe_dump(small(folder)))
    shutil.copy(ROOT / "training" / "specs" / "hyperpod.yaml", folder / "specs")
    return folder / "specs"


@pytest.fixture(scope="module")
def told(specs: Path) -> dict[str, Any]:
    out = specs.parent / "told.json"
    run_with_skyrl("tests.skyrl_trains", str(specs), str(out))
    return json.loads(out.read_text())


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_defaults_are_skyrls_but_for_those_that_say_why(told: dict[str, Any]):
    theirs = told["defaults"]
    ours = plain(TrainSpec().values())
    different = {key for key, value in ours.items() if not key.startswith("loramux.") and value != _under(theirs, key)}
    assert different == set(OTHERWISE_BY_DEFAULT)


@pytest.mark.parametrize("name", ["hyperpod", "small"])
def test_every_key_of_a_spec_is_one_of_skyrls_and_arrives(told: dict[str, Any], specs: Path, name: str):
    spec = TrainSpec.load(specs / f"{name}.yaml")
    wanted = plain({key: value for key, value in spec.values().items() if not key.startswith("loramux.")} | put_right(spec))
    assert {key: _under(told[name], key) for key in wanted} == wanted


def _under(theirs: dict[str, Any], key: str) -> Any:
    """A value, also one that lies in a free dictionary."""
    return theirs.get(key, f"there is no key {key}")


def test_the_data_set_has_a_seed_in_every_row(told: dict[str, Any]):
    seeds = [seed for (seed, _), _ in zip(training_mazes(9, 100), range(4), strict=False)]
    assert told["trained"]["rows"] == seeds


def test_a_steps_export_comes_after_its_save_and_before_its_log(told: dict[str, Any]):
    of_step = [name for name, what in told["trained"]["happened"] if what == 4 and name.startswith(("on_", "export"))]
    wanted = ["on_step_start", "on_step_end", "on_save", "export", "on_eval_start", "on_eval_end", "on_log", "on_train_end"]
    assert of_step == wanted


def test_each_export_is_offered_once_at_its_steps_log_and_a_half_written_one_when_it_is_whole(told: dict[str, Any]):
    happened = [name if name != "offer" else f"offer {what}" for name, what in told["trained"]["happened"]]
    assert [name for name in happened if name.startswith(("offer", "on_log"))] == [
        *("on_log", "offer 1", "on_log", "on_log"),
        *("offer 2", "offer 3", "on_log", "offer 4", "on_log"),
    ]


def test_the_publisher_looks_for_what_was_left_first_and_is_closed_once_at_the_end(told: dict[str, Any], specs: Path):
    asked = [(name, what) for name, what in told["trained"]["happened"] if name in ("scan", "close")]
    assert asked == [("scan", str(specs.parent / "exports")), ("close", 7.0)]


def test_an_export_that_comes_after_the_last_log_is_offered_with_that_logs_metrics(told: dict[str, Any]):
    at_the_end = told["exported_at_the_end"]
    assert [name for name, _ in at_the_end["happened"]][-3:] == ["offer", "close", "on_train_end"]
    assert at_the_end["offered"]["3"]["trainer/global_step"] == 3.0


def test_the_environments_solves_reach_the_publisher_and_the_tracker_whatever_the_batches(told: dict[str, Any]):
    rates = {step: metrics.get("eval/easy-64/greedy/solve_rate") for step, metrics in told["trained"]["offered"].items()}
    assert rates == {"1": None, "2": SOLVABLE, "3": None, "4": SOLVABLE}
    assert told["trained"]["logged"][-1]["eval/easy-64/greedy/solved"] == 63.0


def test_the_specs_digest_goes_with_every_export(told: dict[str, Any], specs: Path):
    assert told["trained"]["digests"] == [TrainSpec.load(specs / "small.yaml").digest()]


def test_a_publisher_that_fails_at_everything_does_not_end_the_training(told: dict[str, Any]):
    happened = [name for name, _ in told["in_trouble"]["happened"]]
    assert told["in_trouble"]["finished"]
    assert happened[-2:] == ["close", "on_train_end"]


def test_a_training_that_fails_closes_the_publisher_and_says_why(told: dict[str, Any]):
    assert told["failed"] == [["close", 7.0], ["raised", "no GPUs"]]
