"""Several processes that learn together: each gets what the first shares, and one that dies is noticed."""

from __future__ import annotations

import subprocess
import sys

FOLLOWER = """
from training.runs.processes import Group, die_with_parent, joined
die_with_parent()
with joined("cpu") as world:
    group = Group(world)
    assert group.shared("mine") == ["from", "the", "first"]
    assert not group.any(False) and group.any(True)
"""

LEADER = """
import os, sys
from training.runs.processes import RENDEZVOUS, Group, joined, leading
lost = lambda rank, code: os.write(1, f"rank {rank} ended with {code}".encode()) and os._exit(3)
with leading(2, [sys.executable, "-c", sys.argv[1]], lost), joined("cpu") as world:
    assert not any(name in os.environ for name in RENDEZVOUS)
    group = Group(world)
    group.shared(["from", "the", "first"])
    print(group.rank, group.world_size, group.any(False), group.any(False))
"""


def lead(follower: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", LEADER, follower], capture_output=True, text=True, timeout=300)


def test_all_get_what_the_first_shares_and_know_what_any_of_them_says():
    done = lead(FOLLOWER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "2", "False", "True"]


def test_a_process_that_dies_is_noticed_by_the_first_which_would_wait_for_ever():
    done = lead("import sys; sys.exit(7)")
    assert (done.returncode, done.stdout) == (3, "rank 1 ended with 7")
