"""The publisher that a spec asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adapters.errors import InvalidRequest
from adapters.registry import Registry
from adapters.settings import RegistrySettings, StoreSettings, read_config, read_registry_settings
from adapters.store import open_store
from training.maze import HELD_OUT, evaluation_set
from training.publishing.gate import Gate
from training.publishing.origin import Origin, Target, code_revision
from training.publishing.publisher import Publisher
from training.spec import TrainSpec

DECODINGS = {"sampled": "sampling_params", "greedy": "eval_sampling_params"}


def publisher_of(
    spec: TrainSpec,
    run: str,
    tell: Callable[[Any], None] = lambda event: None,
    *,
    base_digest: str | None = None,
    config: Path | None = None,
) -> Publisher | None:
    """None where the spec names no adapter. `config` is the settings file that says how to reach the registry.

    Raises InvalidRequest for a spec that can't be published, or without a registry: before a run begins, not after it.
    """
    wanted = spec.loramux.publish
    if wanted.name is None:
        return None
    if wanted.base is None:
        raise InvalidRequest("`loramux.publish.base` is not set: an adapter is one of a base", param="loramux.publish.base")
    target = Target(wanted.base, wanted.name, wanted.alias, Gate(wanted.metric, wanted.min_solve_rate))
    settings = _settings(wanted.registry, config)
    open_store(settings)
    base = spec.trainer.policy.model.path
    origin = Origin(
        run,
        spec.digest(),
        base_digest,
        Path(base).expanduser() if base else None,
        code_revision(),
        evaluation_of(spec, wanted.metric),
    )
    return Publisher(lambda: Registry(open_store(settings)), target, origin, tell)


def evaluation_of(spec: TrainSpec, metric: str) -> dict[str, Any]:
    """How a metric `eval/<set>/<decoding>/...` is measured under the spec; empty for one of another form."""
    parts = metric.split("/")
    if len(parts) < 3 or parts[0] != "eval" or parts[1] not in HELD_OUT or parts[2] not in DECODINGS:
        return {}
    params = getattr(spec.generator, DECODINGS[parts[2]])
    how = {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "max_generate_length")}
    mazes = evaluation_set(parts[1])
    rules = asdict(spec.loramux.maze) | {"size": mazes.size}
    return {"set": parts[1], "set_digest": mazes.digest(), "decoding": parts[2], **how, "maze": rules}


def _settings(url: str | None, config: Path | None) -> StoreSettings:
    """The registry of the settings, or the one at `url`, reached with their endpoint and credentials where they have any."""
    if url is None:
        return read_registry_settings(config)
    there = read_config(config).get("registry") or {}
    return RegistrySettings.model_validate({**there, "url": url})
