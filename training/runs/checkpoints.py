"""Checkpoints on a disk that may fill up, of a process that may be killed at any moment: complete, or not there.

    latest_ckpt_global_step.txt     the step to resume from; written last
    global_step_N/trainer_state.json   what the loop knows: position, specification, what happened until then
    global_step_N/policy/              the learner's files, of each of its processes
    global_step_N/checksums.json       size and SHA-256 of each other file

A checkpoint is written into a folder beside its place, flushed to the disk, and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.runs.plan import ResumeMode
from training.runs.ranks import Alone, Ranks, together

POINTER = "latest_ckpt_global_step.txt"
STATE = "trainer_state.json"
CHECKSUMS = "checksums.json"
POLICY = "policy"
STEP = re.compile(r"global_step_(\d+)")
SCHEMA_VERSION = 1
BLOCK_BYTES = 1 << 20


class DamagedCheckpoint(ValueError):
    """A folder that is no whole checkpoint; says what is wrong with it."""


class NoCheckpoint(ValueError):
    """Nothing can be resumed from where something was to be."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole one. `passed_over` says which newer ones were not, and why."""

    step: int
    folder: Path
    state: Mapping[str, Any]
    passed_over: tuple[str, ...] = ()

    @property
    def policy(self) -> Path:
        return self.folder / POLICY


class Checkpoints:
    """Those of one run in `folder`, the newest `keep` of them (all if that is below 1). All ranks call `save` together."""

    def __init__(self, folder: Path, keep: int = -1, ranks: Ranks | None = None):
        self.folder = folder
        self._keep = keep
        self._ranks = ranks or Alone()

    def save(self, step: int, write_policy: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
        """Raises what the disk raises, and ElsewhereFailed where another rank's did; what was there then stays as it is."""
        staging = self.folder / f".global_step_{step}.staging"
        together(self._ranks, lambda: self._prepare(staging), only_first=True)
        try:
            together(self._ranks, lambda: write_policy(staging / POLICY))
            together(self._ranks, lambda: self._publish(staging, step, state), only_first=True)
        except BaseException:
            if self._ranks.rank == 0:
                shutil.rmtree(staging, ignore_errors=True)  # a full disk gets its room back
            raise
        return self.folder / f"global_step_{step}"

    def find(self, mode: ResumeMode = "latest", path: Path | None = None) -> Checkpoint | None:
        """Where to resume: `none` nowhere; `latest` what the pointer names, None without a pointer, the newest whole one before
        if that is damaged; `from_path` that one. Raises NoCheckpoint where none of those that should be whole is."""
        if mode == "none":
            return None
        if mode == "from_path":
            return self._at(path)
        pointer = self.folder / POINTER
        if not pointer.exists():
            return None
        pointed = _step_in(pointer)
        return self._newest_whole(pointed)

    def steps(self) -> list[int]:
        """Of all folders that have a checkpoint's name, in order."""
        found = self.folder.glob("global_step_*") if self.folder.is_dir() else []
        return sorted(int(match[1]) for one in found if (match := STEP.fullmatch(one.name)))

    def _at(self, path: Path | None) -> Checkpoint:
        if path is None or not STEP.fullmatch(path.name):
            raise NoCheckpoint(f"trainer.resume_path is {path}: it has to name a folder global_step_N")
        try:
            return read(path)
        except DamagedCheckpoint as error:
            raise NoCheckpoint(f"trainer.resume_path cannot be resumed from: {error}") from error

    def _newest_whole(self, pointed: int) -> Checkpoint:
        passed_over: list[str] = []
        for step in sorted({pointed, *(step for step in self.steps() if step < pointed)}, reverse=True):
            try:
                found = read(self.folder / f"global_step_{step}")
            except DamagedCheckpoint as error:
                passed_over.append(str(error))
                continue
            return Checkpoint(step, found.folder, found.state, tuple(passed_over))
        raise NoCheckpoint(
            f"no whole checkpoint is in {self.folder} ({'; '.join(passed_over)}): trainer.resume_mode=none starts over"
        )

    def _prepare(self, staging: Path) -> None:
        shutil.rmtree(staging, ignore_errors=True)
        (staging / POLICY).mkdir(parents=True)

    def _publish(self, staging: Path, step: int, state: Mapping[str, Any]) -> None:
        (staging / STATE).write_text(json.dumps({"schema_version": SCHEMA_VERSION, "step": step, **state}))
        (staging / CHECKSUMS).write_text(json.dumps({name: _checksum(staging / name) for name in _files(staging)}))
        _flush_tree(staging)
        _swap_in(staging, self.folder / f"global_step_{step}")
        write_whole(self.folder / POINTER, str(step).encode())
        self.tidy(step)

    def tidy(self, newest: int) -> None:
        """What is beyond those to keep, and what a killed process left, goes. Checkpoints after the newest are of a run that was
        taken up from before them: they stay, and are written over when it gets there."""
        for left in self.folder.glob(".global_step_*"):
            shutil.rmtree(left, ignore_errors=True)
        if self._keep < 1:
            return
        for step in [step for step in self.steps() if step <= newest][: -self._keep]:
            shutil.rmtree(self.folder / f"global_step_{step}", ignore_errors=True)


def read(folder: Path) -> Checkpoint:
    """Raises DamagedCheckpoint unless all files are there as they were written."""
    try:
        expected = json.loads((folder / CHECKSUMS).read_bytes())
        for name, checksum in expected.items():
            if _checksum(folder / name) != checksum:
                raise DamagedCheckpoint(f"{folder}: {name} is not as it was written")
        state = json.loads((folder / STATE).read_bytes())
    except (OSError, ValueError) as error:
        if isinstance(error, DamagedCheckpoint):
            raise
        raise DamagedCheckpoint(f"{folder}: {error}") from error
    if state.get("schema_version") != SCHEMA_VERSION:
        raise DamagedCheckpoint(f"{folder}: schema_version is {state.get('schema_version')!r}, {SCHEMA_VERSION} is known")
    return Checkpoint(state["step"], folder, state)


def size_bytes(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in _files(folder))


def write_whole(file: Path, data: bytes) -> None:
    """The file has all of it, or what it had."""
    staging = file.with_name(f".{file.name}.staging")
    with staging.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    staging.rename(file)
    _flush(file.parent)


def _step_in(pointer: Path) -> int:
    text = pointer.read_text().strip()
    if not text.isdecimal():
        raise NoCheckpoint(f"{pointer} says {text[:40]!r}: it has to hold a step's number")
    return int(text)


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _checksum(file: Path) -> list[Any]:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(BLOCK_BYTES):
            digest.update(block)
        return [opened.tell(), digest.hexdigest()]


def _swap_in(staging: Path, place: Path) -> None:
    """What lies in the place, of a run that was taken up from before it, leaves first: a folder is not renamed onto another."""
    old = place.with_name(f".{place.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    staging.rename(place)
    _flush(place.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
