"""The simulator: rules that are told rightly, traces that are what they say, replicas that keep the rules of the real ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from serve_app.simulation import thrash
from serve_app.simulation.__main__ import app
from serve_app.simulation.clock import Clock
from serve_app.simulation.cluster import Request, Size, Times
from serve_app.simulation.contestants import CONTESTANTS, Arc, Lfu, Lrfu, Lru, Lru2, Optimum, S3Fifo, misses
from serve_app.simulation.disk import Loads
from serve_app.simulation.placement import Plan, made_up
from serve_app.simulation.placement import run as run_plan
from serve_app.simulation.routers import Affinity, Multiplex, Router
from serve_app.simulation.run import Outcome
from serve_app.simulation.traces import SHAPES, bursty, scan_over_zipf, zipf


def hits(contestant, trace: str) -> str:
    return "".join("+" if contestant.ask(ord(key)) else "." for key in trace)


@pytest.mark.parametrize(
    ("contestant", "trace", "expected"),
    [
        (Lru(2), "abacb", "..+.."),
        (Lfu(2), "aabcac", ".+..++"),
        (Lru2(2), "ababcab", "..++..+"),
        (Optimum(2, [ord(key) for key in "abcab"]), "abcab", "...+."),
        (Lrfu(2), "aaabcda", ".++...+"),
    ],
)
def test_a_rule_evicts_as_its_paper_says(contestant, trace: str, expected: str):
    assert hits(contestant, trace) == expected


@pytest.mark.parametrize("contestant", [Arc(4), S3Fifo(20)])
def test_a_rule_with_two_lists_lets_no_scan_take_what_was_used_twice(contestant):
    busy = [1, 2] * 3
    for key in busy + list(range(100, 130)):
        contestant.ask(key)
    assert contestant.ask(1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", set(CONTESTANTS) - {"optimum"})
def test_nobody_beats_the_optimum(shape: str, name: str):
    trace = SHAPES[shape](60, 2_000, 3)
    assert misses(CONTESTANTS["optimum"](8, trace), trace) <= misses(CONTESTANTS[name](8, trace), trace)


def test_our_rule_loses_fewer_places_to_scans_than_lru():
    trace = scan_over_zipf(100, 10_000, 1)
    assert misses(Lrfu(16), trace) < 0.85 * misses(Lru(16), trace)


def test_traces_are_as_long_as_asked_and_the_same_each_time():
    for make in SHAPES.values():
        trace = make(50, 1_000, 7)
        assert len(trace) == 1_000
        assert set(trace) <= set(range(50))
        assert trace == make(50, 1_000, 7)


def test_zipf_gives_the_busiest_its_share():
    counts = Counter(zipf(100, 50_000, 1.0, 1)).most_common(2)
    assert counts[0][1] / 50_000 == pytest.approx(1 / 5.187, rel=0.05)
    assert counts[0][1] / counts[1][1] == pytest.approx(2, rel=0.1)


def test_bursts_ask_for_one_adapter_again_and_again():
    counts = Counter(bursty(10_000, 5_000, 1)).values()
    assert sum(count >= 20 for count in counts) > 80


class Replicas:
    """One made-up replica, asked by hand."""

    def __init__(self, slots: int = 2, disk: int = 10) -> None:
        self.clock, self.loads, self.ended = Clock(), Loads(), []
        self.one = made_up(0, self.clock, Size(slots, disk), Times(fetch_s=3, load_s=1), self.loads)

    def ask(self, at_s: float, adapter: int, answer_s: float = 1.0) -> None:
        request = Request(len(self.ended), adapter, answer_s, self.ended.append, at_s)
        self.clock.after(at_s, lambda: self.one.ask(request))

    def waits(self) -> list[tuple[int, str, float]]:
        self.clock.run()
        return [(request.adapter, request.tier, request.began_at_s - request.asked_at_s) for request in self.ended]


def test_a_cold_adapter_is_fetched_and_loaded_once_for_all_who_ask():
    bench = Replicas()
    for _ in range(64):
        bench.ask(0, 7)
    bench.ask(5, 7)
    assert bench.waits() == [(7, "remote", 4)] * 64 + [(7, "engine", 0)]
    assert (bench.loads.loads, bench.loads.fetches) == (1, 1)


def test_what_left_the_engine_comes_back_from_the_disk():
    bench = Replicas(slots=1)
    for at_s, adapter in ((0, 1), (10, 2), (20, 1)):
        bench.ask(at_s, adapter)
    assert [tier for _, tier, _ in bench.waits()] == ["remote", "remote", "disk"]


def test_a_full_disk_forgets_what_is_worth_least():
    bench = Replicas(slots=1, disk=2)
    for at_s, adapter in enumerate([1, 2, 1, 3, 1, 2]):
        bench.ask(10 * at_s, adapter)
    assert [tier for _, tier, _ in bench.waits()] == ["remote", "remote", "disk", "remote", "disk", "remote"]


def test_a_slot_in_use_keeps_others_waiting():
    bench = Replicas(slots=1)
    bench.ask(0, 1, answer_s=100)
    bench.ask(10, 2)
    assert bench.waits() == [(1, "remote", 4), (2, "remote", 95)]


def run(router: Callable[[], Router], **changes) -> Outcome:
    plan = Plan(**{"replicas": 4, "adapters": 100, "requests": 3_000, "exponent": 1.0} | changes)
    return run_plan(plan, router, Size(slots=8, disk=40), Times())


@pytest.mark.parametrize("router", [lambda: Affinity(16), lambda: Multiplex(1)])
def test_every_request_of_a_run_ends_and_is_counted_once(router):
    outcome = run(router)
    assert sum(outcome.tiers.values()) == len(outcome.waits_s) == 1_800
    assert min(outcome.waits_s) >= 0


def test_the_same_run_comes_out_the_same():
    first, second = run(lambda: Affinity(16)), run(lambda: Affinity(16))
    assert (first.tiers, first.loads, first.waits_s, first.copies) == (second.tiers, second.loads, second.waits_s, second.copies)


def test_a_very_hot_adapter_gets_several_copies_and_rare_ones_get_one():
    copies = run(lambda: Affinity(16), exponent=2.0, busy=12.0).copies
    assert copies[0] > 1
    assert copies[len(copies) // 2] == 1


def test_several_gateways_load_hardly_more_than_one():
    one, four = (run(lambda: Affinity(16), gateways=gateways, adapters=60, requests=6_000).loads for gateways in (1, 4))
    assert four <= 1.2 * one


def test_our_router_fetches_less_than_multiplexing():
    assert run(lambda: Affinity(16)).fetches < run(lambda: Multiplex(1)).fetches


def test_slots_that_close_in_slices_load_less_than_without_and_starve_less_than_never():
    ours, no_slice, never = (thrash.run(16, 0.9, 1_500, **rule) for rule in thrash.RULES.values())
    assert ours.loads < 0.75 * no_slice.loads
    assert max(ours.waits_s) < 0.85 * max(never.waits_s)


@pytest.mark.parametrize(
    ("words", "row"),
    [
        (["policies", "--requests", "200"], "| uniform | 4 / 100 |"),
        (["thrash", "--requests", "300"], "| 4 x the 8 slots | uniform | the rule |"),
        (["placement", "--requests", "500", "--replicas", "2", "--exponent", "1"], "| 2 / 200 | Zipf 1.0 | ours |"),
    ],
)
def test_the_tables_can_be_made_by_anyone(words: list[str], row: str):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert row in done.output
