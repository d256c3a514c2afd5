"""The gateway's section of the settings."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from adapters.settings import Section


class GatewaySettings(Section):
    """The HTTP door."""

    host: str = Field(default="127.0.0.1", description="Address that Ray Serve binds.")
    port: int = Field(default=8000, ge=1, le=65535, description="Port that Ray Serve binds.")
    replicas: int = Field(default=1, ge=1, description="Gateway processes.")
    num_cpus: float = Field(default=1, ge=0, description="CPUs of Ray's count that one gateway process takes.")
    max_body_bytes: int = Field(default=32 * 2**20, ge=1024, description="Largest request body; more is a 413.")
    max_wait_s: float = Field(default=600, gt=0, description="Longest wait for a whole answer when the client sets no limit.")
    keepalive_after_s: float = Field(default=10, gt=0, description="A stream that waits longer begins with SSE comments.")
    max_ongoing_requests: int = Field(default=1024, ge=1, description="Requests at once in one gateway process; more wait.")
    cors_origins: tuple[str, ...] = Field(default=(), description="Origins that browsers may call from.")
    sticky_headers: tuple[str, ...] = Field(
        default=(),
        description="Request headers that keep a caller on its version of a shared alias, after the body's own fields.",
    )
    upload_dir: Path | None = Field(default=None, description="Folder for uploads under way; none takes the system's own.")
    max_upload_bytes: int = Field(default=8 * 2**30, ge=1024, description="Largest upload of an adapter; more is a 413.")
    max_uploads: int = Field(default=4, ge=1, description="Uploads at once in one gateway process; more are a 503.")
    upload_idle_s: float = Field(default=60, gt=0, description="Longest wait for the next 64 KiB of an upload.")
    ready_timeout_s: float = Field(
        default=300, gt=0, description="Longest wait for replicas: of `wait_ready` and, by default, of a promotion."
    )
    allowed_sources: tuple[str, ...] = Field(
        default=(),
        description="Addresses (`s3://bucket/prefix`) below which adapters may be published from; none allows no source.",
    )
