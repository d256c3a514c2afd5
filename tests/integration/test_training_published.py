"""What a trainer saved is published, served, and plays through the gateway the very moves of the trainer's own engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapters.registry import Registry
from adapters.store import open_store
from tests.exported_runs import Told, saved
from tests.integration.stack import DEMO_ENGINE, Stack
from tests.seaweed import Seaweed
from training.playing.comparing import read_played
from training.publishing import Gate, Judged, Origin, Published, Publisher, Target

SEEDS = range(5_000, 5_006)
ENGINE = DEMO_ENGINE | {"max_model_len": 4096}


def walker(*arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.maze_walker", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def base(artifacts: Path) -> Path:
    walker("make", artifacts / "walker" / "base", artifacts / "walker" / "adapter")
    return artifacts / "walker" / "base"


@pytest.fixture(scope="module")
def export(artifacts: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    policy = tmp_path_factory.mktemp("exports") / "global_step_20" / "policy"
    policy.mkdir(parents=True)
    for file in (artifacts / "walker" / "adapter").iterdir():
        (policy / file.name).write_bytes(file.read_bytes())
    return policy


@pytest.fixture(scope="module")
def evaluation(base: Path, export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trainer's engine has ended before the served one begins: both at once are too much for a small machine."""
    file = tmp_path_factory.mktemp("evals") / "greedy.jsonl"
    walker("evaluate", base, export, file, *SEEDS)
    return file


@pytest.fixture(scope="module")
def maze_stack(base: Path, evaluation: Path, seaweed: Seaweed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("maze"), seaweed, {"demo": base}, prefix="maze", more={"engine": ENGINE})
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()


def test_a_published_adapter_plays_the_moves_of_the_trainers_own_evaluation(
    maze_stack: Stack, export: Path, evaluation: Path
) -> None:
    told = Told()
    target = Target("demo", "walker", "production", Gate("eval/rate", 0.5))
    publisher = Publisher(lambda: Registry(open_store(maze_stack.registry)), target, Origin("run-a"), told)
    publisher.offer(saved(export, **{"eval/rate": 0.75}))
    assert publisher.close(60) == ()
    assert told.wait(Published).ref == "demo:walker@1"
    assert told.wait(Judged).promoted
    maze_stack.wait_until(lambda: maze_stack.get("/v1/models/demo:walker"))

    moves = {one.actions for one in read_played(evaluation)}
    assert len(moves) > 1, "an adapter that always does the same tells nothing"
    play = ["demo:walker", "--url", maze_stack.url, "--seeds", f"{SEEDS[0]}-{SEEDS[-1]}", "--greedy", "--max-tokens", "8"]
    loramux = Path(sys.executable).with_name("loramux")
    done = subprocess.run(
        [loramux, "play", *play, "--beside", evaluation, "--json"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["answered_by"] == ["demo:walker@1"]
    assert result["beside"]["same_moves"]
