"""What the simulation expects of slots, replicas and disks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from serve_app.simulation.__main__ import app
from serve_app.simulation.clock import Clock
from serve_app.simulation.disk import Disk, Loads
from serve_app.simulation.sizing import Case, Question, expect

MB = 1_000_000


def asked(**changed: Any) -> tuple[Case, ...]:
    given = {"sizes_bytes": [MB] * 100, "slots": [8], "replicas": [2], "requests": 2_000, "answer_s": 0.5}
    return expect(Question.model_validate(given | changed)).cases


def test_each_combination_is_a_case():
    cases = asked(slots=[4, 8], replicas=[1, 2], disk_bytes=[None, 20 * MB], requests=200)
    assert len({(case.slots, case.replicas, case.disk_bytes) for case in cases}) == len(cases) == 8


def test_the_same_question_has_the_same_answer():
    assert asked(disk_bytes=[40 * MB]) == asked(disk_bytes=[40 * MB])


def test_shares_of_tiers_and_of_replicas_are_of_all_requests():
    (case,) = asked(disk_bytes=[30 * MB])
    assert case.tiers.engine + case.tiers.disk + case.tiers.remote == pytest.approx(1)
    assert case.cold_share == pytest.approx(1 - case.tiers.engine)
    assert sum(case.replica_shares) == pytest.approx(1)
    assert case.busiest_share == case.replica_shares[0]


def test_more_slots_make_fewer_answers_cold():
    few, more, all_of_them = asked(slots=[8, 16, 100])
    assert few.cold_share > more.cold_share > all_of_them.cold_share == 0


def test_a_larger_disk_leaves_fewer_answers_to_the_store():
    small, larger, whole = asked(disk_bytes=[20 * MB, 40 * MB, 100 * MB])
    assert small.tiers.remote > larger.tiers.remote > whole.tiers.remote
    assert small.fetched_bytes_per_s == pytest.approx(small.fetches_per_s * MB)


def test_traffic_begins_as_if_it_had_gone_on_for_long():
    short, long = (asked(disk_bytes=[30 * MB], requests=requests)[0] for requests in (2_000, 30_000))
    assert short.cold_share == pytest.approx(long.cold_share, abs=0.03)
    assert short.tiers.remote == pytest.approx(long.tiers.remote, abs=0.03)


def test_what_nobody_asks_for_takes_no_place():
    (case,) = asked(weights=[1.0] * 16 + [0.0] * 84, slots=[16])
    assert case.cold_share == 0


def test_replicas_of_one_node_share_its_disk():
    apart, together = (asked(replicas=[4], replicas_per_node=per_node, disk_bytes=[45 * MB])[0] for per_node in (1, 4))
    assert together.tiers.remote > apart.tiers.remote


def test_a_larger_adapter_waits_longer_for_the_store():
    waits = {"slots": [1], "replicas": [1], "trace": [1, 0, 1, 0], "answer_s": 0.01, "disk_bytes": [10 * MB]}
    small, large = (
        asked(sizes_bytes=[size, size], fetch_bytes_per_s=MB, load_bytes_per_s=MB, **waits)[0].cold_wait_s.p50
        for size in (MB, 2 * MB)
    )
    assert (small, large) == (pytest.approx(1), pytest.approx(2))


def test_a_replayed_trace_begins_with_what_was_asked_for_last():
    trace = [2, 3, 2, 0, 2]
    (case,) = asked(sizes_bytes=[MB] * 4, slots=[2], replicas=[1], trace=trace, clients=1)
    assert case.hit_rate == pytest.approx(4 / 5)
    assert case.tiers.engine == pytest.approx(4 / 5)


def test_clients_that_wait_for_one_load_share_it():
    (case,) = asked(sizes_bytes=[MB] * 2, slots=[1], replicas=[1], trace=[0] * 8, clients=8)
    assert case.hit_rate == pytest.approx(7 / 8)
    assert case.cold_share == 1


def test_ttft_is_told_where_the_hot_one_is_known_and_lies_above_it():
    assert asked()[0].ttft_ms is None
    cold, hot = (asked(hot_ttft_ms={"p50": 50, "p95": 80}, slots=[slots])[0].ttft_ms for slots in (4, 100))
    assert hot.p50 == pytest.approx(50, rel=0.05)
    assert hot.p95 == pytest.approx(80, rel=0.05)
    assert cold.p95 > hot.p95


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"slots": [0]}, "slots.0"),
        ({"disk_bytes": [8 * MB]}, "disk_bytes 8000000: adapters in 8 slots keep 9000000 bytes"),
        ({"weights": [1.0]}, "1 weights for 100 adapters"),
        ({"trace": [100]}, "adapter number 100; there are 100"),
        ({"hot_ttft_ms": {"p50": 50, "p95": 40}}, "p95 (40) is under p50 (50)"),
        ({"slots": list(range(1, 600))}, "599 combinations of slots, replicas and disks; 500 at most"),
        ({"slot": [3]}, "slot"),
    ],
)
def test_a_question_without_sense_is_refused_with_the_limit(changed: dict[str, Any], said: str):
    with pytest.raises(ValidationError) as refused:
        asked(**changed)
    assert said in str(refused.value)


def test_the_command_answers_in_json():
    question = {"sizes_bytes": [MB] * 20, "slots": [4, 8], "replicas": [1], "requests": 200}
    done = CliRunner().invoke(app, ["plan", "--json"], input=json.dumps(question))
    assert done.exit_code == 0, done.output
    assert [case["slots"] for case in json.loads(done.stdout)["cases"]] == [4, 8]


def test_the_command_says_what_is_wrong_with_a_question():
    done = CliRunner().invoke(app, ["plan", "--json"], input='{"sizes_bytes": [1], "slots": [-3], "replicas": [1]}')
    assert done.exit_code == 2
    assert json.loads(done.stderr)["error"]["message"].startswith("slots.0: Input should be greater than or equal to 1 (is -3)")


class Node:
    """A disk for three adapters, asked by hand."""

    def __init__(self) -> None:
        self.clock, self.loads, self.there = Clock(), Loads(), []
        self.disk = Disk(3 * MB, lambda _: MB, lambda _: 1.0, self.clock, self.loads)

    def lease(self, *adapters: int) -> None:
        for adapter in adapters:
            self.disk.lease(adapter, lambda adapter=adapter: self.there.append(adapter))
        self.clock.run()


def test_two_replicas_of_a_node_fetch_an_adapter_once():
    node = Node()
    node.lease(7, 7)
    assert (node.there, node.loads.fetches) == ([7, 7], 1)


def test_a_leased_file_stays_and_a_released_one_gives_way():
    node = Node()
    node.lease(1, 2, 3)
    node.disk.release(2)
    node.lease(4)
    assert [node.disk.has(adapter) for adapter in (1, 2, 3, 4)] == [True, False, True, True]


def test_of_files_that_nobody_leases_the_least_used_goes():
    node = Node()
    node.lease(1, 1, 2, 3, 3)
    for adapter in (1, 1, 2, 3, 3):
        node.disk.release(adapter)
    node.lease(4)
    assert [node.disk.has(adapter) for adapter in (1, 2, 3)] == [True, False, True]
