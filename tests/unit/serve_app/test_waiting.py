"""vLLM's processes must not shut others out while they wait for each other."""

from __future__ import annotations

import subprocess
import sys

LOADED = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed import utils
from vllm.platforms import current_platform
print(current_platform.is_cpu(), utils.USE_SCHED_YIELD)
"""


def test_vllm_finds_the_plugin_and_its_processes_on_a_cpu_wait_asleep() -> None:
    loaded = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=120, check=True)
    assert loaded.stdout.split() == ["True", "False"]
