"""Servers on loopback that a load test starts and ends: an S3 server, and any command in a process group of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import boto3
import httpx

BIN = Path(sys.executable).parent
KEYS = {
    "AWS_ACCESS_KEY_ID": "loramux-bench",
    "AWS_SECRET_ACCESS_KEY": "loramux-bench-secret",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
}
BUCKET = "bench"
READY_TIMEOUT_S = 600


class NotStarted(Exception):
    """A server that did not come up; says why."""


@contextmanager
def s3_server() -> Iterator[tuple[str, Any]]:
    """SeaweedFS on loopback, and a client for it."""
    with tempfile.TemporaryDirectory(prefix="loramux-bench-s3-") as folder:
        ports = {flag: free_port() for flag in ("s3.port", "master.port", "volume.port", "filer.port", "admin.port")}
        flags = [f"-{flag}={port}" for flag, port in ports.items()]
        command = [
            str(BIN / "weed"),
            "mini",
            f"-dir={folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-webdav=false",
            "-admin.ui=false",
            "-master.telemetry=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-bucket={BUCKET}",
            *flags,
        ]
        endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        with process(command, KEYS, cwd=folder):
            client = s3_client(endpoint)
            wait_until(lambda: client.list_objects_v2(Bucket=BUCKET), "the S3 server")
            yield endpoint, client


def s3_client(endpoint: str) -> Any:
    """For the S3 server at `endpoint`."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
    )


@contextmanager
def process(
    command: list[str], environment: dict[str, str], cwd: str | None = None, log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A server in its own process group, ended with all that it started. Without `log` that is a new file."""
    with (
        log.open("wb") if log else tempfile.NamedTemporaryFile("wb", prefix="loramux-bench-", suffix=".log", delete=False) as out
    ):
        running = subprocess.Popen(command, env=os.environ | environment, cwd=cwd, stdout=out, stderr=out, start_new_session=True)
    try:
        yield running
    except BaseException:
        print(f"see {out.name}", file=sys.stderr)
        raise
    finally:
        running.terminate()
        with suppress(subprocess.TimeoutExpired):
            running.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)


def wait_for_answer(url: str, model: str, running: subprocess.Popen[bytes]) -> None:
    """A real completion: models are listed long before the engine answers. Raises NotStarted."""
    body = {"model": model, "prompt": "Hello", "max_tokens": 1}

    def answered() -> None:
        if running.poll() is not None:
            raise NotStarted(f"the server ended with {running.returncode}")
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()

    wait_until(answered, url)


def wait_until(works: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            works()
            return
        except NotStarted:
            raise
        except Exception as error:
            if time.monotonic() > deadline:
                raise NotStarted(f"{what} did not come up: {error}") from error
            time.sleep(0.5)


def free_port() -> int:
    """A free port whose twin 10,000 above is free too: the S3 server takes both."""
    while True:
        with socket.socket() as probe, socket.socket() as twin:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            if port > 55_000:
                continue
            try:
                twin.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port
