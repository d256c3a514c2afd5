"""The settings that the adapters package needs. `serve_app.settings` composes them into the one file, `loramux.yaml`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from adapters.errors import InvalidRequest

CONFIG_VARIABLE = "LORAMUX_CONFIG"
DEFAULT_CONFIG = Path("loramux.yaml")
ENV_PREFIX = "LORAMUX_"
ENV_SEPARATOR = "__"


class Section(BaseModel):
    """A frozen part of the settings; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class StoreSettings(Section):
    """Where the registry lies and how to reach it. Credentials left out come from the environment, as for any AWS client."""

    url: str = Field(description="`s3://bucket/prefix`, `file:///dir` or `memory://`.")
    endpoint: str | None = Field(default=None, description="Address of an S3-compatible server; none for AWS itself.")
    region: str = Field(default="us-east-1", description="Region of the bucket.")
    access_key_id: str | None = Field(default=None, description="Access key; none takes the environment's.")
    secret_access_key: SecretStr | None = Field(default=None, description="Secret key; none takes the environment's.")
    connect_timeout_s: float = Field(default=3.0, gt=0, description="Limit for opening a connection.")
    request_timeout_s: float = Field(default=30.0, gt=0, description="Limit for one request, body included.")
    retry_timeout_s: float = Field(default=5.0, ge=0, description="How long one call may retry before it fails.")


class RegistrySettings(StoreSettings):
    """The registry."""

    poll_interval_s: float = Field(default=1.0, gt=0, description="How often gateways look for changes.")
    sweep_interval_s: float = Field(
        default=300.0, gt=0, description="How often a gateway compares the index with the adapters and repairs it."
    )


class DropSettings(StoreSettings):
    """A watched prefix: adapter folders that are complete and have settled become versions by themselves.

    Endpoint and credentials that are left out are the registry's.
    """

    endpoint: str | None = Field(default=None, description="Address of an S3-compatible server; none takes the registry's.")
    access_key_id: str | None = Field(default=None, description="Access key; none takes the registry's.")
    secret_access_key: SecretStr | None = Field(default=None, description="Secret key; none takes the registry's.")
    base: str = Field(description="Base of the adapters that lie there.")
    interval_s: float = Field(default=10.0, gt=0, description="How often a gateway looks.")
    settle_s: float = Field(default=30.0, ge=0, description="A folder is taken when nothing in it changed for so long.")
    promote: str | None = Field(default=None, description="Alias that moves to each new version; none moves none.")

    def store_settings(self, registry: StoreSettings) -> StoreSettings:
        """How to reach the prefix: what is not set here is as for the registry."""
        here = {name for name in StoreSettings.model_fields if name in self.model_fields_set}
        return StoreSettings(**{name: getattr(self if name in here else registry, name) for name in StoreSettings.model_fields})


class WebhookSettings(Section):
    """Who is told of the moves of aliases (`adapters.webhook`)."""

    url: str | None = Field(default=None, description="Address that moves of aliases are posted to; none tells nobody.")
    secret: SecretStr | None = Field(default=None, description="Key of the signature; needed with an address.")
    timeout_s: float = Field(default=5.0, gt=0, le=60, description="Limit for one attempt.")
    attempts: int = Field(default=4, ge=1, le=10, description="Attempts before it is given up.")

    @model_validator(mode="after")
    def _complete(self) -> WebhookSettings:
        if self.url is None:
            return self
        parts = urlsplit(self.url)
        is_plain = self.url.isascii() and self.url.isprintable() and " " not in self.url
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain or parts.port == 0:
            raise ValueError("the webhook's address is no http or https address")
        if self.secret is None or not self.secret.get_secret_value():
            raise ValueError("a webhook needs a `secret`")
        return self


class CacheSettings(Section):
    """The node cache: verified adapter files on this node's disk, shared by its replicas."""

    dir: Path = Field(default=Path(".loramux/cache"), description="Folder of the cache; replicas of a node share it.")
    budget_bytes: int = Field(default=50 * 2**30, gt=0, description="Most bytes that the cache keeps.")
    fetches_at_once: int = Field(default=4, ge=1, le=64, description="Fetches at once by one process; others wait their turn.")
    fetch_concurrency: int = Field(default=8, ge=1, le=64, description="Ranged reads at once for one fetch.")
    range_bytes: int = Field(default=8 * 2**20, ge=2**16, description="Size of a ranged read; large files come in 8 MiB parts.")


def read_config(path: Path | None = None) -> dict[str, Any]:
    """The settings file as plain values, with the environment laid over it; an absent default file is an empty one.

    `LORAMUX_GATEWAY__PORT=9000` is `gateway.port: 9000`. Raises InvalidRequest for a file that is missing or no YAML.
    """
    named = path or (Path(os.environ[CONFIG_VARIABLE]) if os.environ.get(CONFIG_VARIABLE) else None)
    try:
        values = yaml.safe_load((named or DEFAULT_CONFIG).read_text()) or {}
    except FileNotFoundError:
        if named is not None:
            raise InvalidRequest(f"there is no settings file `{named.name}`") from None
        values = {}
    except yaml.YAMLError as error:
        raise InvalidRequest(f"the settings file is not valid YAML: {str(error)[:200]}") from None
    if not isinstance(values, dict):
        raise InvalidRequest("the settings file is not a mapping of sections")
    return with_environment(values)


def with_environment(values: dict[str, Any]) -> dict[str, Any]:
    """The values with the environment's on top; a variable without `__` belongs to something else.

    Raises InvalidRequest for a variable that goes into something that is no section, the list of bases say.
    """
    for name, text in os.environ.items():
        if name.startswith(ENV_PREFIX) and ENV_SEPARATOR in name:
            _set(values, name, yaml.safe_load(text))
    return values


def _set(values: dict[str, Any], name: str, value: Any) -> None:
    *parents, last = name.removeprefix(ENV_PREFIX).lower().split(ENV_SEPARATOR)
    section: Any = values
    for key in parents:
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            raise InvalidRequest(f"the environment variable {name} can't reach into `{key}`: only sections take variables")
    section[last] = value


def read_registry_settings(path: Path | None = None) -> RegistrySettings:
    """Only the registry's section: all that an author's command needs. Raises InvalidRequest."""
    values = read_config(path).get("registry")
    if values is None:
        raise InvalidRequest(
            "no registry is configured",
            hint=f"name one in {DEFAULT_CONFIG} (`registry: {{url: s3://bucket/prefix}}`) or in LORAMUX_REGISTRY__URL",
        )
    try:
        return RegistrySettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidRequest(f"`registry.{'.'.join(map(str, first['loc']))}`: {first['msg']}") from None


def read_webhook_settings(path: Path | None = None) -> WebhookSettings:
    """Only the webhook's section; without one nobody is told. Raises InvalidRequest."""
    try:
        return WebhookSettings.model_validate(read_config(path).get("webhook") or {})
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidRequest(f"`{'.'.join(map(str, ('webhook', *first['loc'])))}`: {first['msg']}") from None
