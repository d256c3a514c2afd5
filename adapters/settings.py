"""The settings that the adapters package needs. `serve_app.settings` composes them into the one file, `loramux.yaml`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr


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

    poll_interval_s: float = Field(default=1.0, gt=0, description="How often gateways and replicas look for changes.")


class CacheSettings(Section):
    """The node cache: verified adapter files on this node's disk, shared by its replicas."""

    dir: Path = Field(default=Path(".loramux/cache"), description="Folder of the cache; replicas of a node share it.")
    budget_bytes: int = Field(default=50 * 2**30, gt=0, description="Most bytes that the cache keeps.")
    fetch_concurrency: int = Field(default=8, ge=1, le=64, description="Ranged reads at once for one fetch.")
    range_bytes: int = Field(default=8 * 2**20, ge=2**16, description="Size of one ranged read.")
