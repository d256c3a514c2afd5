"""The processes that a run started: remembered by id and start time, so that ending them never hits a stranger."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

STOP_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Known:
    """A process as it was when we saw it. An id that was used again has another start time."""

    pid: int
    started_at: float
    name: str


class RunFile:
    """Remembers a run's own process and all that it started, in one small file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self) -> None:
        """Writes down this process and everything below it."""
        me = psutil.Process()
        family = [me, *me.children(recursive=True)]
        known = {**{k.pid: k for k in self._read()}, **{k.pid: k for p in family if (k := _known(p))}}
        alive = [asdict(k) for k in known.values() if _process(k)]
        temporary = self._path.with_suffix(".tmp")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(alive))
        temporary.replace(self._path)

    def running(self) -> list[psutil.Process]:
        """The remembered processes that still live, with their children now."""
        found = {p.pid: p for known in self._read() if (p := _process(known))}
        for process in list(found.values()):
            found |= {child.pid: child for child in _children(process)}
        found.pop(psutil.Process().pid, None)
        return list(found.values())

    def stop_all(self) -> int:
        """Ends them, politely first; returns how many there were."""
        processes = self.running()
        for process in processes:
            _signal(process, "terminate")
        _, alive = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)
        for process in alive:
            _signal(process, "kill")
        psutil.wait_procs(alive, timeout=STOP_TIMEOUT_S)
        self._path.unlink(missing_ok=True)
        return len(processes)

    def _read(self) -> list[Known]:
        try:
            return [Known(**row) for row in json.loads(self._path.read_text())]
        except (FileNotFoundError, json.JSONDecodeError, TypeError):
            return []


def port_owner(host: str, port: int) -> str | None:
    """Who listens on the port, as a short text; None when it is free."""
    with socket.socket() as probe:
        if probe.connect_ex((host if host != "0.0.0.0" else "127.0.0.1", port)) != 0:
            return None
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return "another process"


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _known(process: psutil.Process) -> Known | None:
    try:
        return Known(process.pid, process.create_time(), process.name())
    except psutil.Error:
        return None


def _process(known: Known) -> psutil.Process | None:
    try:
        process = psutil.Process(known.pid)
        alive = process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - known.started_at) < 0.01
        return process if alive else None
    except psutil.Error:
        return None


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _signal(process: psutil.Process, method: str) -> None:
    try:
        getattr(process, method)()
    except psutil.Error:
        return
