"""Scenarios: typed files that say which adapters there are, where they are put, and what is asked when. `scenarios/*.yaml`.

A scenario is phases, one after another on one running server. A phase puts pools of adapters into tiers, then sends its
loads, all at once and open loop: when a request leaves does not depend on answers. Everything random comes from `seed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from loadtests.records import Tier

FOLDER = Path(__file__).resolve().parent / "scenarios"
PEERS = ("vllm", "stock", "stock-tuned", "loramux")
OURS = "loramux"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Pool(Strict):
    """Adapters that are alike to a scenario: the k-th has the rank `ranks[k % len(ranks)]`, and so its size."""

    count: int = Field(ge=1)
    ranks: tuple[int, ...] = (8,)


class Fault(Strict):
    """What befalls a share of the reads of adapters' weights: an error 503, a broken connection, half the bytes, a flipped
    byte, silence."""

    kind: Literal["unavailable", "reset", "cut_off", "corrupt", "stall"]
    share: float = Field(gt=0, le=1)


class StoreShape(Strict):
    """How the store looks from the servers: extra latency of each request, bandwidth of each connection and of all, faults."""

    latency_ms: float = Field(0, ge=0)
    connection_mib_per_s: float | None = Field(None, gt=0)
    total_mib_per_s: float | None = Field(None, gt=0)
    faults: tuple[Fault, ...] = ()


class Gamma(Strict):
    """Requests whose gaps are gamma distributed with a coefficient of variation `cv` (1 is Poisson), as in S-LoRA (arXiv
    2311.03285, section 7.1)."""

    kind: Literal["gamma"] = "gamma"
    rate_per_s: float = Field(gt=0)
    cv: float = Field(1.0, gt=0)
    duration_s: float = Field(gt=0)


class Burst(Strict):
    """`count` requests at the same moment."""

    kind: Literal["burst"] = "burst"
    count: int = Field(ge=1)


class Spaced(Strict):
    """`count` requests, one every `every_s`."""

    kind: Literal["spaced"] = "spaced"
    count: int = Field(ge=1)
    every_s: float = Field(gt=0)


Arrivals = Annotated[Gamma | Burst | Spaced, Field(discriminator="kind")]


class Popularity(Strict):
    """Which adapter of the pool a request asks for: each in turn, or drawn by a power law (the k-th with weight k^-alpha;
    alpha 0 is uniform). `churn_every_s` draws anew which adapter is the k-th."""

    kind: Literal["each", "power"] = "each"
    alpha: float = Field(1.0, ge=0)
    churn_every_s: float | None = Field(None, gt=0)


class Span(Strict):
    """Numbers drawn evenly from `least` to `most`."""

    least: int = Field(ge=0)
    most: int = Field(ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> Span:
        if self.least > self.most:
            raise ValueError(f"least is {self.least}, most is {self.most}")
        return self


class Load(Strict):
    """A stream of requests. Without `pool` they ask the base. `starts_s` is when its first request leaves; `prompt_tokens`
    None is the sentence that tells adapters apart by their answers; `images` go before the prompt."""

    name: str
    arrivals: Arrivals
    pool: str | None = None
    alias: str | None = Field(None, description="ask for this alias of the adapter, not for the version that was put")
    popularity: Popularity = Popularity()
    starts_s: float = Field(0, ge=0)
    prompt_tokens: Span | None = None
    output_tokens: Span = Span(least=16, most=16)
    images: int = Field(0, ge=0)


class Change(Strict):
    """What is done to the registry or the store meanwhile, at `at_s` and then every `every_s`, `count` times in all.

    `publish`: a new adapter joins `pool` (and loads that draw from it); `republish`: other content under the name of one of
    the pool, which then is the production version; `promote`: a new version of the pool's first adapter, moved when warm;
    `evict`: one of the pool to `tier`.
    """

    do: Literal["publish", "republish", "promote", "evict"]
    pool: str
    at_s: float = Field(ge=0)
    every_s: float | None = Field(None, gt=0)
    count: int = Field(1, ge=1)
    tier: Tier = "remote"
    asked_after_s: float = Field(2.0, ge=0, description="no load asks for what `publish` adds until so long after it began")


class Phase(Strict):
    """`put` says in which tier each pool is when the phase begins; the harness sets it, checks it, and only then sends.
    `only` names the peers that take part; one that can't put a pool where it has to be is left out by itself. `count_loads`
    asks peers whose answers don't tell how many adapters they loaded meanwhile; that takes them half a minute."""

    name: str
    put: dict[str, Tier] = {}
    loads: tuple[Load, ...] = Field(min_length=1)
    changes: tuple[Change, ...] = ()
    store: StoreShape | None = None
    only: tuple[str, ...] = PEERS
    count_loads: bool = False


class Aim(Strict):
    """What a figure of ours must be. `figure` is its key in the summary, or a quotient of two keys: `a / b`."""

    name: str
    figure: str
    limit: float
    bound: Literal["<=", ">="] = "<="


class Scenario(Strict):
    """`rounds` starts every peer anew so many times, in alternating order. `engine` goes over the harness's engine settings."""

    schema_version: Literal[1] = 1
    name: str
    about: str
    seed: int = 1
    rounds: int = Field(1, ge=1)
    peers: tuple[str, ...] = PEERS
    pools: dict[str, Pool] = {}
    engine: dict[str, Any] = {}
    store: StoreShape = StoreShape()
    memory_every_s: float | None = Field(None, gt=0)
    phases: tuple[Phase, ...] = Field(min_length=1)
    aims: tuple[Aim, ...] = ()

    @model_validator(mode="after")
    def _names_known(self) -> Scenario:
        if unknown := [peer for peer in self.peers if peer not in PEERS]:
            raise ValueError(f"no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
        names = [phase.name for phase in self.phases]
        if len(set(names)) < len(names):
            raise ValueError("two phases have one name")
        for phase in self.phases:
            used = {*phase.put, *(load.pool for load in phase.loads if load.pool), *(change.pool for change in phase.changes)}
            if missing := used - self.pools.keys():
                raise ValueError(f"phase {phase.name} names pools that the scenario does not have: {', '.join(sorted(missing))}")
        return self


class BadScenario(Exception):
    """A file that is no scenario; says where and why."""


def names() -> list[str]:
    """The scenarios that come with the project."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name_or_path: str, **changed: Any) -> Scenario:
    """A scenario by its name or from a file, with some fields changed. Raises BadScenario."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = FOLDER / f"{name_or_path}.yaml"
    if not path.exists():
        raise BadScenario(f"no scenario {name_or_path}: there are {', '.join(names())}, or give a .yaml file")
    try:
        document = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise BadScenario(f"{path.name} is no YAML: {error}") from error
    if not isinstance(document, Mapping):
        raise BadScenario(f"{path.name} holds no fields")
    try:
        return Scenario.model_validate({**document, **{key: value for key, value in changed.items() if value is not None}})
    except ValidationError as error:
        raise BadScenario("\n".join(_told(path, one) for one in error.errors())) from error


def _told(path: Path, error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "the scenario"
    return f"{path.name}: {where}: {error['msg']}"
