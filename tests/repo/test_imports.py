"""What importing our packages loads, in a Python of its own and away from the checkout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.checkout import ROOT

HEAVY = {"torch", "ray", "vllm", "transformers", "peft"}
WEB = {"fastapi", "starlette", "uvicorn"}
PROGRAM = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
print(json.dumps({"file": module.__file__, "loaded": sorted({name.split(".")[0] for name in sys.modules})}))
"""


def imported(module: str, away: Path) -> dict:
    done = subprocess.run([sys.executable, "-c", PROGRAM, module], cwd=away, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("adapters", HEAVY | WEB),
        ("adapters.cli", HEAVY | WEB),
        ("gateway", HEAVY | WEB),
        ("loadtests.commands", HEAVY | WEB | {"numpy", "matplotlib", "pydantic", "boto3"}),
        ("gateway.app", HEAVY),
        ("serve_app", HEAVY | WEB),
        ("serve_app.commands", HEAVY | WEB),
        ("serve_app.settings", HEAVY | WEB),
    ],
)
def test_import_is_ours_and_light(module: str, unwanted: set[str], tmp_path: Path):
    seen = imported(module, tmp_path)
    assert Path(seen["file"]).is_relative_to(ROOT), "another package of this name hides ours"
    assert not unwanted & set(seen["loaded"])
