"""Who may import whom."""

from __future__ import annotations

import pytest

from tests.repo.checkout import ROOT, imports_of, python_files, tracked_files, within

OURS = {"adapters", "gateway", "serve_app", "training", "loadtests", "tests"}
ENGINES = {"ray", "vllm", "torch"}

MAY_IMPORT = {  # of ours, beside itself
    "adapters": set(),
    "gateway": {"adapters"},
    "serve_app": {"adapters", "gateway"},
    "training": {"adapters"},
    "loadtests": set(),
    "tests": OURS,
}
MUST_NOT_IMPORT = {  # of others'
    "adapters": ENGINES | {"fastapi", "starlette"},
    "gateway": ENGINES,
}
ONE_PLACE_KNOWS = {  # whose insides change with every release: among our packages, few files meet them
    "vllm.lora": {f"serve_app/engine/{part}.py" for part in ("layers", "on_cpu", "staging", "worker")},
    "vllm.entrypoints": {"serve_app/engine/vllm_engine.py"},
}
SAY_NOTHING = {"util", "utils", "common", "core", "helper", "helpers", "misc"}


def test_every_folder_with_python_has_a_place_in_the_table():
    top = {path.relative_to(ROOT).parts[0] for path in python_files()}
    assert top <= set(MAY_IMPORT), "top-level folders (or files) of Python that the table doesn't know"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_imports_only_what_its_layer_may(package: str):
    forbidden = (OURS - MAY_IMPORT[package] - {package}) | MUST_NOT_IMPORT.get(package, set())
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files(package)
        for name in imports_of(path)
        if name.split(".")[0] in forbidden
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("insides", "home"), ONE_PLACE_KNOWS.items())
def test_one_place_knows_the_insides(insides: str, home: set[str]):
    knowing = {
        str(path.relative_to(ROOT))
        for package in ("adapters", "gateway", "serve_app")
        for path in python_files(package)
        if any(within(name, insides) for name in imports_of(path))
    }
    assert knowing <= home


def test_no_folder_or_module_has_a_name_that_says_nothing():
    named = {part.removesuffix(".py"): path for path in tracked_files() for part in path.relative_to(ROOT).parts}
    wrong = {str(path.relative_to(ROOT)) for name, path in named.items() if name.lower().lstrip("_") in SAY_NOTHING}
    assert not wrong


def test_imports_are_found_wherever_they_hide(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.repo.checkout.ROOT", tmp_path)
    file = tmp_path / "gateway" / "inner" / "module.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import a.b, c as d\n"
        "from e import f\n"
        "from . import g\n"
        "from ..h import i\n"
        "def late():\n"
        "    import j\n"
        "    importlib.import_module('k.l')\n"
        "    __import__('m')\n"
    )
    assert set(imports_of(file)) == {"a.b", "c", "e.f", "gateway.inner.g", "gateway.h.i", "j", "k.l", "m"}
