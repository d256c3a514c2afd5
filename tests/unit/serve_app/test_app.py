"""What the application asks Ray for."""

from __future__ import annotations

import pytest

from serve_app.app import llm_config
from serve_app.settings import parse_settings


def environment_of(**base: object) -> dict[str, str]:
    settings = parse_settings({"registry": {"url": "memory://"}, "bases": [{"id": "demo", "accelerator": "cpu", **base}]})
    return llm_config(settings.bases[0]).runtime_env["env_vars"]


def test_a_replica_has_few_arenas_for_metrics_threads_to_fill():
    assert environment_of()["MALLOC_ARENA_MAX"] == "2"


@pytest.mark.parametrize("arenas", ["1", "16"])
def test_the_base_own_environment_goes_over_ours(arenas: str):
    assert environment_of(env={"MALLOC_ARENA_MAX": arenas})["MALLOC_ARENA_MAX"] == arenas
