"""The one typed file, `loramux.yaml`: read once, frozen; `LORAMUX_` environment variables over it; unknown keys refused."""

from __future__ import annotations

import copy
import difflib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from adapters.errors import InvalidRequest
from adapters.names import check_base_id
from adapters.settings import (
    CacheSettings,
    DropSettings,
    RegistrySettings,
    Section,
    WebhookSettings,
    read_config,
    with_environment,
)
from gateway.settings import GatewaySettings

MOST_ROOM = 64


class AutoscalingSettings(Section):
    """How Ray Serve scales a base's replicas."""

    min_replicas: int = Field(default=1, ge=0, description="Fewest replicas.")
    max_replicas: int = Field(default=1, ge=1, description="Most replicas.")
    target_ongoing_requests: float = Field(default=16, gt=0, description="Requests at once that one replica should have.")

    @model_validator(mode="after")
    def _ordered(self) -> AutoscalingSettings:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is over max_replicas ({self.max_replicas})")
        return self


class BaseModelSettings(Section):
    """One served base. `engine` holds vLLM engine arguments, passed on as they are."""

    id: str = Field(description="Name in the model field; may hold `/`, `.`, `-`, `_`.")
    source: str | None = Field(default=None, description="Hugging Face folder, id or remote address; none takes the id.")
    accelerator: Literal["cpu", "gpu"] = Field(default="gpu", description="What the engine runs on.")
    accelerator_type: str | None = Field(default=None, description="Ray's accelerator type, `H200` say.")
    engine: dict[str, Any] = Field(default_factory=dict, description="vLLM engine arguments.")
    replicas: int | AutoscalingSettings = Field(default=1, description="Replicas, or their autoscaling.")
    max_ongoing_requests: int = Field(default=256, ge=1, description="Requests at once in one replica.")
    room: int | None = Field(
        default=None,
        ge=1,
        description="Requests at once from which a replica counts as full; none takes `engine.max_num_seqs`, at most 64.",
    )
    routing_stats_period_s: float = Field(default=0.5, gt=0, description="How often replicas are asked what they hold.")
    max_queued_requests: int = Field(default=1024, ge=-1, description="Requests that wait in one gateway; more are a 503.")
    slot_wait_s: float = Field(default=60, gt=0, description="Longest wait for a place among the engine's adapters.")
    prewarm_on_publish: Literal["disk", "none"] = Field(
        default="disk", description="Where new versions are brought when they are published."
    )
    warm_start_s: float = Field(
        default=10, ge=0, description="Longest that a replica loads pinned and busy adapters before it takes requests."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment of the replica and its engine.")
    allowed_media_domains: tuple[str, ...] = Field(
        default=(), description="Hosts that images may be fetched from; none means data URIs only."
    )

    @property
    def full_at(self) -> int:
        """`room` where it is set. An engine takes hundreds of sequences at once long after more replicas would answer faster."""
        room = self.room or min(self.engine.get("max_num_seqs") or MOST_ROOM, MOST_ROOM)
        return min(room, self.max_ongoing_requests)

    @field_validator("id")
    @classmethod
    def _is_base_id(cls, value: str) -> str:
        try:
            return check_base_id(value)
        except InvalidRequest as error:
            raise ValueError(str(error)) from None


class Settings(Section):
    """All of LoraMux."""

    registry: RegistrySettings
    cache: CacheSettings = Field(default_factory=CacheSettings)
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    webhook: WebhookSettings = Field(default_factory=WebhookSettings)
    drop: DropSettings | None = Field(default=None, description="A watched prefix whose adapter folders become versions.")
    bases: tuple[BaseModelSettings, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct_bases(self) -> Settings:
        ids = [base.id for base in self.bases]
        twice = {base for base in ids if ids.count(base) > 1}
        if twice:
            raise ValueError(f"the base `{min(twice)}` is listed twice")
        return self

    @model_validator(mode="after")
    def _drop_into_a_base(self) -> Settings:
        if self.drop is not None and self.drop.base not in {base.id for base in self.bases}:
            raise ValueError(f"`drop.base` is `{self.drop.base}`, which is none of the bases")
        if self.drop is not None and _overlap(self.drop.url, self.registry.url):
            raise ValueError("`drop.url` and `registry.url` lie in each other; what the registry keeps is not to be adopted")
        return self


def _overlap(one: str, other: str) -> bool:
    one, other = f"{one.rstrip('/')}/", f"{other.rstrip('/')}/"
    return one.startswith(other) or other.startswith(one)


class ReplicaSettings(Section):
    """What one replica needs of the settings."""

    base: str
    registry: RegistrySettings
    cache: CacheSettings
    slot_wait_s: float
    prewarm_on_publish: Literal["disk", "none"]
    warm_start_s: float


def load_settings(path: Path | None = None) -> Settings:
    """Reads the file, lays the environment over it. Raises InvalidRequest that names the key at fault and the nearest one."""
    return _validated(read_config(path))


def parse_settings(values: dict[str, Any]) -> Settings:
    """The same for values that are already parsed, as Ray Serve hands them to the app builder."""
    return _validated(with_environment(copy.deepcopy(values)))


def _validated(values: dict[str, Any]) -> Settings:
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise InvalidRequest("; ".join(_explain(item) for item in error.errors()[:5])) from None


def _explain(item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] != "extra_forbidden":
        what = f"`{path}`: " if path else ""
        # a whole section may hold a secret, and says nothing that the message doesn't
        got = "" if isinstance(item["input"], (dict, list, BaseModel)) else f" (got {str(item['input'])[:80]!r})"
        return f"{what}{item['msg'].removeprefix('Value error, ')}{got}"
    near = difflib.get_close_matches(str(item["loc"][-1]), _keys_at(item["loc"][:-1]), n=1, cutoff=0.5)
    return f"`{path}` is no setting" + (f"; did you mean `{near[0]}`?" if near else "")


def _keys_at(path: tuple[str | int, ...]) -> list[str]:
    model: type[BaseModel] = Settings
    sections: dict[str, type[BaseModel]] = {
        "registry": RegistrySettings,
        "cache": CacheSettings,
        "gateway": GatewaySettings,
        "webhook": WebhookSettings,
        "drop": DropSettings,
        "bases": BaseModelSettings,
        "replicas": AutoscalingSettings,
    }
    for part in path:
        model = sections.get(str(part), model)
    return list(model.model_fields)
