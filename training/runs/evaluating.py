"""Fixed sets played by a base, alone or with an adapter, without any training: the figures that a run gives, from files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from training.maze import evaluation_set
from training.runs import measures
from training.runs.checkpoints import write_whole
from training.runs.events import EvalEvent
from training.runs.from_spec import decodings_of
from training.runs.plan import Decoding, evaluation_tasks
from training.runs.protocols import Sampler
from training.runs.surroundings import Surroundings
from training.spec import TrainSpec

CONFIG = "adapter_config.json"


class BadAdapter(ValueError):
    """A folder that holds no adapter."""


def fitted(spec: TrainSpec, base: Path, adapter: Path | None) -> TrainSpec:
    """The spec with that base, and with an engine that takes the adapter. Raises BadAdapter."""
    changed = [f"trainer.policy.model.path={base}"]
    if adapter:
        try:
            changed.append(f"trainer.policy.model.lora.rank={json.loads((adapter / CONFIG).read_bytes())['r']}")
        except (OSError, ValueError, KeyError) as error:
            raise BadAdapter(f"{adapter} holds no adapter: {CONFIG}: {error}") from None
    return TrainSpec.from_values(spec.as_dict(), changed)


def evaluate(
    spec: TrainSpec,
    adapter: Path | None,
    sets: Sequence[str],
    decodings: Sequence[Decoding],
    out: Path | None,
    sampler_of: Callable[[TrainSpec], Sampler],
) -> Iterator[EvalEvent]:
    """An event for each set and decoding as it is done; with `out`, files `<set>-<decoding>.jsonl` there, a Played a line."""
    known = decodings_of(spec)
    sampler = sampler_of(spec)
    try:
        if adapter:
            sampler.use_adapter(adapter, 1)
        else:
            sampler.use_base()
        for held_out in map(evaluation_set, sets):
            for decoding in decodings:
                seconds: dict[str, float] = {}
                with Surroundings().timed(seconds, "play"):
                    found = sampler.play(evaluation_tasks(held_out, spec.loramux.evaluation.seed), known[decoding])
                name = ""
                if out:
                    file = out / f"{held_out.name}-{decoding}.jsonl"
                    file.parent.mkdir(parents=True, exist_ok=True)
                    rows = (measures.played(one, spec.loramux.maze).as_dict() for one in found)
                    write_whole(file, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
                    name = str(file)
                yield measures.eval_event(0, held_out.name, decoding, found, seconds["play"], name)
    finally:
        sampler.close()
