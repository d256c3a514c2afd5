"""One run of aiperf: a process group of its own, watched until it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from loadtests.sending import exports, trace
from loadtests.sending.environment import prepare
from loadtests.sending.sent import SenderFailed, Sent
from loadtests.workload import Planned

START_LIMIT_S, END_LIMIT_S, LOOK_EVERY_S, TERM_LIMIT_S = 120.0, 60.0, 0.02, 5.0
# One process sends and hears; it needs 0.7 ms for each request of a burst, so two share it, and more where there are cores.
WORKERS = min(8, max(2, (os.cpu_count() or 1) // 4))
STARTED = re.compile(r"^(\S+ \S+) - PhaseRunner - .* started \|", re.MULTILINE)
# Times in logs and summary as UTC; nothing is kept for another run; a proxy of the environment is no way to a server under test.
SURROUNDINGS = {"TZ": "UTC", "AIPERF_DATASET_MMAP_CACHE_ENABLED": "false", "AIPERF_HTTP_TRUST_ENV": "false"}


async def send(
    url: str,
    planned: Sequence[Planned],
    models: Mapping[int, str] | Sequence[str],
    folder: Path,
    on_start: Callable[[int], None] | None = None,
    *,
    timeout_s: float = 120.0,
) -> list[Sent]:
    """Sends a plan to a server and returns what came of each request, in the plan's order.

    `models[number]` is what a request puts into its model field. `on_start` hears, once and within some 30 ms of it, the wall
    clock (ns) at the schedule's zero. A request that is not answered after `timeout_s` is given up and failed. What aiperf
    wrote stays in `folder`. Raises SenderFailed; when cancelled, ends aiperf first.
    """
    on_start = on_start or (lambda _: None)
    if not planned:
        on_start(time.time_ns())
        return []
    command = await asyncio.to_thread(prepare)
    await asyncio.to_thread(_lay_out, folder, planned, models)
    process = await _begin(command, _arguments(url, folder, timeout_s), folder)
    try:
        async with asyncio.timeout(START_LIMIT_S):
            started_ns = await _started_ns(process, folder)
        on_start(started_ns)
        async with asyncio.timeout(planned[-1].at_s + timeout_s + END_LIMIT_S):
            await process.wait()
    except TimeoutError:
        raise SenderFailed(f"aiperf does not come to an end\n{_last_lines(folder)}") from None
    finally:
        await _end(process)
        shutil.rmtree(folder / "dataset", ignore_errors=True)
    return await asyncio.to_thread(_read, folder, planned, started_ns, process.returncode)


async def _begin(command: Path, arguments: Sequence[str], folder: Path) -> asyncio.subprocess.Process:
    try:
        with (folder / "aiperf.out").open("wb") as out:
            return await asyncio.create_subprocess_exec(
                command,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=_surroundings(folder),
                # No session of its own: Linux shares cores out by session (autogroup), and this is one with the caller's work.
                process_group=0,
            )
    except OSError as trouble:
        raise SenderFailed(f"aiperf does not start: {trouble}") from trouble


def _lay_out(folder: Path, planned: Sequence[Planned], models: Mapping[int, str] | Sequence[str]) -> None:
    for name in ("tokenizer", "dataset"):
        (folder / name).mkdir(parents=True)
    for name, content in trace.TOKENIZER.items():
        (folder / "tokenizer" / name).write_text(json.dumps(content))
    (folder / "trace.jsonl").write_text(trace.lines(planned, models))


def _arguments(url: str, folder: Path, timeout_s: float) -> list[str]:
    text = f"""
        profile --model any --url {url} --endpoint-type chat --streaming
        --custom-dataset-type mooncake_trace --fixed-schedule --fixed-schedule-start-offset 0
        --request-timeout-seconds {timeout_s} --use-server-token-count
        --workers-max {WORKERS} --record-processors 1 --ui none --no-gpu-telemetry --no-server-metrics
        --export-level raw --export-http-trace
    """
    paths = {"--input-file": "trace.jsonl", "--tokenizer": "tokenizer", "--output-artifact-dir": ""}
    return [*text.split(), *(word for flag, name in paths.items() for word in (flag, str((folder / name).resolve())))]


def _surroundings(folder: Path) -> dict[str, str]:
    # Of a hub that is offline aiperf makes that a local tokenizer is none.
    inherited = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    return inherited | SURROUNDINGS | {"AIPERF_DATASET_MMAP_BASE_PATH": str((folder / "dataset").resolve())}


async def _started_ns(process: asyncio.subprocess.Process, folder: Path) -> int:
    """Waits until the schedule runs. Raises SenderFailed if aiperf ends before."""
    log = folder / "logs" / "aiperf.log"
    while True:
        ended = process.returncode is not None
        if log.exists() and (line := STARTED.search(log.read_text(errors="replace"))):
            began = datetime.strptime(line[1], "%Y-%m-%d %H:%M:%S.%f").replace(tzinfo=UTC)
            return round(began.timestamp() * 1e3) * 1_000_000
        if ended:
            raise SenderFailed(f"aiperf ended with {process.returncode} before it began\n{_last_lines(folder)}")
        await asyncio.sleep(LOOK_EVERY_S)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends all of aiperf's processes, also those that outlived their first."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            break
        try:
            await asyncio.wait_for(process.wait(), TERM_LIMIT_S)
        except TimeoutError:
            continue


def _read(folder: Path, planned: Sequence[Planned], started_ns: int, returncode: int | None) -> list[Sent]:
    """Where every request failed aiperf ends with an error and without its last exports: what it wrote meanwhile is read then."""
    summary, whole = folder / "profile_export_aiperf.json", folder / "profile_export_raw.jsonl"
    zero_ns = exports.begun_ns(summary.read_text()) if summary.exists() else started_ns
    raw = [whole] if whole.exists() else sorted((folder / "raw_records").glob("*.jsonl"))
    sent = exports.read(_lines(raw), _lines([folder / "profile_export.jsonl"]), planned, zero_ns)
    if returncode and any(one.sent_s is None for one in sent):
        raise SenderFailed(f"aiperf ended with {returncode}\n{_last_lines(folder)}")
    return sent


def _lines(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        if path.exists():
            with path.open() as file:
                yield from file


def _last_lines(folder: Path, count: int = 12) -> str:
    out = folder / "aiperf.out"
    return "\n".join(out.read_text(errors="replace").splitlines()[-count:]) if out.exists() else ""
