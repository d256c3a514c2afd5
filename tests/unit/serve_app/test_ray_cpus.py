"""`loramux up` gives Ray as many CPUs to count as everything takes: with fewer, Serve would wait for ever without a word."""

from __future__ import annotations

import pytest

from serve_app.settings import parse_settings
from serve_app.up import ray_cpus


@pytest.mark.parametrize(
    ("replicas", "gateways", "needed"),
    [(1, 1, 4), (4, 1, 10), ({"min_replicas": 1, "max_replicas": 6}, 2, 15)],
)
def test_there_are_cpus_for_all_replicas_with_their_engines_and_all_gateways(replicas, gateways: int, needed: int):
    settings = parse_settings(
        {
            "registry": {"url": "memory://"},
            "gateway": {"replicas": gateways, "num_cpus": 1},
            "bases": [{"id": "demo", "replicas": replicas}],
        }
    )
    assert ray_cpus(settings) == needed
