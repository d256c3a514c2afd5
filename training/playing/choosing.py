"""What the command line asks to play: which mazes, by which rules, with which dice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from adapters.errors import InvalidRequest
from training.maze import HELD_OUT, MazeSpec, evaluation_set
from training.maze.spec import BadSpec
from training.runs.plan import evaluation_tasks
from training.trajectory import Sampling, Task, dice

if TYPE_CHECKING:
    from training.spec import TrainSpec

# What the maze base was made for; a test holds it against the base's own.
RULES = MazeSpec(cell_px=16, actions="keyword")
SPECS = Path(__file__).parents[1] / "specs"
DEFAULT_SET = "easy-64"
MOST_SEEDS = 100_000
LAST_SEED = 2**32 - 1


def chosen(file: Path | None) -> TrainSpec | None:
    """Raises InvalidRequest."""
    if file is None:
        return None
    from training.spec import BadTrainSpec, TrainSpec  # takes torch along, which nobody else here needs

    shipped = SPECS / f"{file}.yaml"
    try:
        return TrainSpec.load(shipped if shipped.exists() and not file.exists() else file)
    except BadTrainSpec as error:
        raise InvalidRequest(str(error), param="spec") from None


def ruled(spec: TrainSpec | None, size: int | None) -> MazeSpec:
    """Raises InvalidRequest for a size that no maze has."""
    rules = spec.loramux.maze if spec else RULES
    try:
        return replace(rules, size=size) if size else rules
    except BadSpec as error:
        raise InvalidRequest(str(error), param="size") from None


def decoded(spec: TrainSpec | None, greedy: bool, temperature: float | None, max_tokens: int | None) -> Sampling:
    """The spec's own decoding (`generator.eval_sampling_params` for greedy) with what the command line says over it. Raises
    InvalidRequest for a temperature beside --greedy."""
    if greedy and temperature:
        raise InvalidRequest(f"--greedy is temperature 0, and --temperature says {temperature}", param="temperature")
    sampling = Sampling()
    if spec:
        params = spec.generator.eval_sampling_params if greedy else spec.generator.sampling_params
        sampling = Sampling(params.temperature, params.top_p, params.top_k, params.max_generate_length)
    heat = 0.0 if greedy else sampling.temperature if temperature is None else temperature
    return replace(sampling, temperature=heat, max_generate_length=max_tokens or sampling.max_generate_length)


def longest_input(spec: TrainSpec | None, max_generate_length: int) -> int | None:
    """The longest conversation, in tokens, that still gets a reply, as the spec's own engine has it; None without a spec."""
    if spec is None:
        return None
    room = spec.generator.inference_engine.engine_init_kwargs.get("max_model_len")
    return min(spec.generator.max_input_length, room - max_generate_length if room else spec.generator.max_input_length)


def named_tasks(set_name: str | None, seeds: str | None, spec: TrainSpec | None, seed: int | None) -> tuple[str, list[Task]]:
    """A name and the mazes: a fixed set with the dice of evaluations, or those of `seeds`. Raises InvalidRequest."""
    begins = seed if seed is not None else spec.loramux.evaluation.seed if spec else 0
    if seeds is not None:
        if set_name:
            raise InvalidRequest("--set and --seeds are two ways to say which mazes; one of them is enough", param="seeds")
        return "seeds", [Task(one, 0, dice("play", begins, one)) for one in parsed_seeds(seeds)]
    name = set_name or DEFAULT_SET
    if name not in HELD_OUT:
        raise InvalidRequest(f"there is no set `{name}`; there are {', '.join(HELD_OUT)}", param="set")
    return name, evaluation_tasks(evaluation_set(name), begins)


def parsed_seeds(text: str) -> list[int]:
    """`7,9,100-163`, both ends among them. Raises InvalidRequest."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise InvalidRequest(f"`{part.strip()}` is no seed; write `7,9,100-163`", param="seeds")
        begin, end = int(first), int(last or first)
        if not begin <= end <= LAST_SEED or end - begin >= MOST_SEEDS:
            raise InvalidRequest(
                f"`{part.strip()}`: seeds go from 0 to {LAST_SEED}, upwards, {MOST_SEEDS} at most", limit=LAST_SEED, param="seeds"
            )
        found += range(begin, end + 1)
    if len(set(found)) != len(found):
        raise InvalidRequest("a seed stands there twice", param="seeds")
    return found
