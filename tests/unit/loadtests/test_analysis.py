"""What records come to, from records whose answers are known."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from loadtests.analysis import BadRun, UnknownFigure, figures, summarize
from loadtests.analysis.requests import LAG_LIMIT_MS
from loadtests.analysis.spread import ratio, spread
from loadtests.analysis.summary import SCHEMA, LoadFigures, PhaseFigures, Summary, load_summary, schema, write_summary
from loadtests.analysis.surroundings import growth
from loadtests.records import Event, MemorySample, Record
from loadtests.scenario import Scenario
from tests.unit.loadtests import synthetic

STAGES = {"resolve": 0.1, "relay": 90.0, "fetch": 40.0, "stage": 10.0, "queue": 0.0, "load": 20.0, "engine": 18.0}


def small(peers: tuple[str, ...] = ("loramux",), **changed: Any) -> Scenario:
    """One phase, one load of as many requests as there are."""
    load = {"name": "one", "pool": "p", "arrivals": {"kind": "spaced", "count": 1, "every_s": 1}}
    phase = {"name": "cold", "put": {"p": "remote"}, "loads": [load]}
    document = {"name": "small", "about": "", "peers": peers, "pools": {"p": {"count": 10}}, "phases": [phase]}
    return Scenario.model_validate({**document, **changed})


def record(number: int = 0, ttft_ms: float | None = 100.0, **changed: Any) -> Record:
    made = Record(
        peer="loramux",
        round=0,
        phase="cold",
        load="one",
        number=number,
        adapter=f"a{number}",
        pool="p",
        rank=8,
        size_bytes=1_000_000,
        put="remote",
        planned_s=float(number),
        sent_s=float(number),
        status=200,
        ttft_ms=ttft_ms,
        total_ms=ttft_ms and ttft_ms + 50,
    )
    return replace(made, **changed)


def summary(*records: Record, events: tuple[Event, ...] = (), scenario: Scenario | None = None) -> Summary:
    return summarize(scenario or small(), {}, records, events, [])


def only_load(*records: Record, **given: Any) -> LoadFigures:
    (found,) = summary(*records, **given).loads
    return found


def phase_of(*records: Record, **given: Any) -> PhaseFigures:
    (found,) = summary(*records, **given).phases
    return found


def marks(found: Summary) -> str:
    return "\n".join(f"{mark.where}: {mark.what}" for mark in found.marks)


# -- percentiles and intervals -----------------------------------------------------------------------------------------


def test_percentiles_lie_linearly_between_neighbours():
    found = spread(range(1, 102))
    assert (found.p50.value, found.p95.value, found.p99.value, found.max) == (51, 96, 100, 101)
    assert spread([10, 20]).p95.value == pytest.approx(19.5)


def test_no_values_have_no_percentiles():
    assert spread([]) is None


def test_intervals_hold_the_truth_nearly_always():
    chance = random.Random(3)
    samples = [spread([chance.gauss(100, 10) for _ in range(40)]).p50 for _ in range(100)]
    assert sum(one.low <= 100 <= one.high for one in samples) >= 88


def test_intervals_are_the_same_every_time():
    values = [random.Random(1).random() for _ in range(30)]
    assert spread(values) == spread(values)


def test_too_few_values_have_no_interval():
    assert spread([1, 2, 3]).p50.low is None


def test_a_ratio_is_that_of_the_percentiles():
    found = ratio([200.0, 210, 220, 230, 240], [100.0, 105, 110, 115, 120], 0.5)
    assert found.value == 2 and found.low < 2 < found.high
    assert found.low > 1.5 and found.high < 2.5


# -- outcomes ----------------------------------------------------------------------------------------------------------


def test_failed_answers_count_as_failures_and_their_latencies_nowhere():
    found = only_load(record(0), record(1, 9000.0, status=500, error="has already been loaded"), record(2, None, status=0))
    assert (found.counts.ok, found.counts.failed) == (1, 2)
    assert found.ttft_ms.max == 100
    assert {one.text for one in found.counts.said} == {"HTTP 500: has already been loaded", "no answer"}


def test_the_five_most_frequent_reasons_are_told():
    failed = [record(n, None, status=500, error=f"reason {n % 7}") for n in range(70)] + [
        record(70, None, status=500, error="reason 3")
    ]
    said = only_load(*failed).counts.said
    assert len(said) == 5 and (said[0].text, said[0].count) == ("HTTP 500: reason 3", 11)


def test_answers_that_are_not_the_adapters_own_are_wrong_and_marked():
    found = summary(record(0), record(1, right=False))
    assert found.loads[0].counts.wrong == 1
    assert "answers that are not those of the adapter that was asked: 1 of 2" in marks(found)


def test_a_request_that_was_never_seen_again_is_lost_and_marked():
    found = summary(record(0), record(1, None, sent_s=None))
    assert (found.loads[0].counts.lost, found.loads[0].counts.sent) == (1, 1)
    assert "loramux/cold/one: 1 of 2 requests were planned and never seen again" in marks(found)


def test_a_request_without_any_line_is_lost_too():
    found = only_load(record(0), record(2))
    assert (found.counts.planned, found.counts.lost) == (2, 0), "no other peer says which load it belonged to"
    whole = summary(record(0), record(2))
    assert figures(whole)["loramux/cold/*/lost"] == 1
    assert "requests of the plan that left no line" in marks(whole)


def test_another_peers_record_says_whose_the_missing_line_was():
    both = small(("vllm", "loramux"))
    found = summary(record(0), record(0, peer="vllm"), record(1, peer="vllm"), scenario=both)
    assert figures(found)["loramux/cold/one/lost"] == 1


def test_the_last_lines_of_a_plan_are_missed_as_well():
    plan = Event("loramux", 0, "cold", 0.0, "phase", details={"planned": 4})
    found = summary(record(0), record(1), events=(plan,))
    assert figures(found)["loramux/cold/*/lost"] == 2


def test_a_round_whose_plan_is_shorter_lost_nothing():
    first = [record(n) for n in range(5)]
    assert figures(summary(*first, *(replace(one, round=1) for one in first[:3])))["loramux/cold/one/lost"] == 0


def test_two_lines_of_one_request_are_no_run():
    with pytest.raises(BadRun, match="is there twice"):
        summary(record(0), record(0))


def test_what_was_not_measured_is_absent():
    found = figures(summary(record(0, None, status=500)))
    assert not [key for key in found if "ttft_ms" in key or "hit_rate" in key or "stage_ms" in key]


def test_a_peer_without_records_is_marked_with_the_reason():
    event = Event("stock", 0, "cold", 0, "put", details={"failed": "stock can't put an adapter on the disk"})
    found = summary(record(0), events=(event,), scenario=small(("loramux", "stock")))
    assert "stock/cold: not measured: stock can't put an adapter on the disk" in marks(found)


def test_a_round_that_is_missing_is_marked():
    assert "loramux/cold: 1 of 2 rounds were measured" in marks(summary(record(0), scenario=small(rounds=2)))


# -- schedule ----------------------------------------------------------------------------------------------------------


def test_requests_sent_on_time_keep_the_schedule():
    found = only_load(*(record(n, sent_s=n + 0.002) for n in range(100)))
    assert found.schedule.kept and found.schedule.lag_ms.p50.value == pytest.approx(2)


@pytest.mark.parametrize("late_s", [LAG_LIMIT_MS / 1e3 + 0.05, -LAG_LIMIT_MS / 1e3 - 0.05])
def test_requests_far_from_their_time_are_marked_late_or_early(late_s: float):
    found = summary(*(record(n, sent_s=n + late_s * (n % 10 == 9)) for n in range(100)))
    assert figures(found)["loramux/cold/one/kept_schedule"] == 0
    assert "did not keep its schedule" in marks(found)


# -- splits, tiers, loads ----------------------------------------------------------------------------------------------


def test_ttfts_are_split_by_what_answers_told_and_by_what_was_put():
    found = figures(
        summary(
            record(0, 100, tier="remote", role="leader"),
            record(1, 30, tier="engine", role="none", rank=32),
            record(2, 90, tier="remote", role="follower"),
        )
    )
    at = "loramux/cold/one/ttft_ms"
    assert found[f"{at}[tier=remote]/p50"] == 95
    assert found[f"{at}[role=leader]/p50"] == 100
    assert found[f"{at}[rank=32]/p50"] == 30
    assert found[f"{at}[put=remote]/max"] == 100


def test_only_first_requests_of_an_adapter_can_come_from_another_tier_than_the_one_put():
    found = only_load(
        record(0, adapter="a", tier="remote", role="leader"),
        record(1, adapter="a", tier="engine", role="none"),
        record(2, adapter="b", tier="disk", role="leader"),
    )
    assert (found.counts.first, found.counts.tier_other) == (2, 1)


def test_loads_are_those_that_answers_led():
    found = only_load(*(record(n, tier="remote", role="leader" if n == 0 else "follower") for n in range(4)))
    assert (found.loads.count, found.loads.per_request, found.loads.hit_rate) == (1, 0.25, 0.75)


def test_loads_are_the_servers_count_where_answers_don_t_tell():
    found = only_load(*(record(n) for n in range(4)), events=(Event("loramux", 0, "cold", 9, "loads", details={"count": 3}),))
    assert (found.loads.told_by, found.loads.hit_rate) == ("server", 0.25)


def test_loads_that_nobody_counted_are_absent():
    assert only_load(record(0)).loads is None


def test_answers_a_second_leave_out_the_time_between_rounds():
    rounds = [record(n, round=r, sent_s=n + 1000.0 * r, planned_s=n + 1000.0 * r) for r in range(2) for n in range(10)]
    assert only_load(*rounds).answers_per_s == pytest.approx(20 / (2 * 9.15), rel=1e-3)


def test_gaps_are_parted_by_the_cold_requests_of_other_loads():
    streams = {"name": "streams", "arrivals": {"kind": "spaced", "count": 1, "every_s": 1}}
    cold = {"name": "one", "pool": "p", "arrivals": {"kind": "burst", "count": 1}}
    storm = small(phases=[{"name": "cold", "loads": [streams, cold]}])
    stream = record(0, 100, load="streams", adapter=None, put=None, sent_s=0, planned_s=0, gaps_ms=(10.0,) * 90 + (70.0, 10.0))
    asked = record(1, 500, tier="remote", role="leader", sent_s=0.9, planned_s=0.9)
    found = figures(summary(stream, asked, scenario=storm))
    assert found["loramux/cold/streams/gaps_ms/max"] == 70
    assert found["loramux/cold/streams/gaps_ms[loading]/max"] == 70
    assert found["loramux/cold/streams/gaps_ms[quiet]/max"] == 10


def test_a_fetch_of_nothing_but_bytes_is_one_of_bytes_over_bandwidth():
    shaped = small(store={"total_mib_per_s": 10})
    took_ms = 1_000_000 / (10 * 2**20) * 1e3
    found = figures(summary(record(tier="remote", role="leader", stages_ms={"fetch": took_ms}), scenario=shaped))
    assert found["loramux/cold/one/fetch_over_bandwidth/p50"] == pytest.approx(1, rel=1e-3)


# -- the accounting ----------------------------------------------------------------------------------------------------


def test_stages_that_add_up_to_the_clients_ttft_are_equal():
    account = only_load(record(0, 92.0, role="leader", tier="remote", stages_ms=STAGES)).account
    assert account.equal and account.verdict.startswith("equal: 3.9 ms")


def test_time_that_no_clock_has_seen_is_named_with_its_side_of_the_door():
    slow_proxy = only_load(record(0, 190.1, stages_ms=STAGES)).account
    assert not slow_proxy.equal
    assert slow_proxy.verdict == "102.0 ms are missing (p50; p95 102.0 ms): 100.0 ms in front of the door, 2.0 ms behind the door"
    slow_handle = only_load(record(0, 190.1, stages_ms=STAGES | {"relay": 190.0})).account
    assert "0.0 ms in front of the door, 102.0 ms behind the door" in slow_handle.verdict


def test_followers_are_not_judged_since_their_stages_began_before_they_came():
    follower = record(1, 50.0, role="follower", stages_ms=STAGES | {"relay": 45.0})
    account = only_load(record(0, 91.0, role="leader", stages_ms=STAGES), follower).account
    assert account.judged == 1 and account.equal


def test_the_largest_stage_is_one_that_contains_no_other():
    assert only_load(record(0, stages_ms=STAGES)).account.largest == "fetch"


def test_the_load_that_leaves_most_untold_is_marked_once_for_a_peer():
    assert marks(summary(record(0, 190.1, stages_ms=STAGES))).count("don't add up") == 1


# -- beside the requests -----------------------------------------------------------------------------------------------


def test_fetches_are_counted_where_they_arrive():
    events = [
        Event("loramux", round_, "cold", 1, "fetch", adapter, 0.5, {"bytes": 1_000_000})
        for round_, adapter in ((0, "a"), (0, "b"), (1, "a"), (1, "a"))
    ]
    found = phase_of(record(0), events=tuple(events)).fetches
    assert (found.count, found.max_per_round, found.max_per_adapter, found.bytes) == (4, 2, 2, 4_000_000)
    assert found.mb_per_s.p50.value == 2


def test_changes_that_failed_are_told_and_their_time_counts_nowhere():
    events = (
        Event("loramux", 0, "cold", 1, "publish", "a", 0.5),
        Event("loramux", 0, "cold", 2, "publish", "b", 30.0, {"failed": "HTTP 503"}),
    )
    found = summary(record(0), events=events)
    assert figures(found)["loramux/cold/*/publish_s/max"] == 0.5
    assert figures(found)["loramux/cold/*/publish_s/failed"] == 1
    assert "publish failed 1 of 2 times: HTTP 503" in marks(found)


def test_requests_after_a_move_stand_beside_those_before_it_was_asked_for():
    load = {"name": "one", "pool": "p", "alias": "production", "arrivals": {"kind": "burst", "count": 1}}
    moving = small(phases=[{"name": "cold", "loads": [load]}])
    before = [record(n, 20.0, tier="engine") for n in range(10)]
    meanwhile = [record(n, 500.0, tier="engine") for n in range(10, 12)]
    after = [record(n, 30.0, tier="engine" if n < 19 else "disk") for n in range(12, 20)]
    event = Event("loramux", 0, "cold", 9.5, "promote", "a", 2.0)
    found = figures(summary(*before, *meanwhile, *after, events=(event,), scenario=moving))
    assert found["loramux/cold/one/promote/requests"] == 8
    assert found["loramux/cold/one/promote/engine_share"] == 7 / 8
    assert found["loramux/cold/one/promote/p99_over_hot"] == 1.5


def series(*sizes: float, every_s: float = 10.0) -> list[MemorySample]:
    return [MemorySample("loramux", 0, "cold", every_s * n, "replica", int(size)) for n, size in enumerate(sizes)]


def test_memory_that_rises_does_not_rest():
    grown = growth(series(*(500e6 + 100_000 * n for n in range(180))))
    assert grown.rests is False
    assert grown.slope_bytes_per_h == pytest.approx(36e6, rel=1e-3)
    assert grown.first_bytes < grown.last_bytes


def test_memory_that_is_noisy_and_flat_rests():
    for seed in range(20):
        chance = random.Random(seed)
        assert growth(series(*(500e6 + chance.gauss(0, 5e6) for _ in range(180)))).rests


def test_memory_that_fills_once_rests():
    assert growth(series(*(500e6 + min(n, 60) * 1e6 for n in range(180)))).rests


def test_a_short_phase_says_nothing_of_memory():
    assert growth(series(*(500e6 + 1e6 * n for n in range(20)), every_s=1)).rests is None


# -- peers, aims, files ------------------------------------------------------------------------------------------------


def test_peers_stand_beside_ours_with_their_failures():
    both = small(("stock", "loramux"))
    theirs = [record(n, 200.0 + n, peer="stock", status=200 if n else 500) for n in range(10)]
    found = summary(*theirs, *(record(n, 100.0 + n / 2) for n in range(10)), scenario=both)
    p50 = next(one for one in found.beside if one.stat == "p50")
    assert p50.ratio.value == pytest.approx(205 / 102.25, rel=1e-3)
    assert p50.ratio.low <= p50.ratio.value <= p50.ratio.high
    assert (p50.peer_failed_share, p50.our_failed_share) == (pytest.approx(0.1), 0)


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        ("loramux/cold/one/ttft_ms/max", 300),
        ("loramux/cold/one/ttft_ms/max / loramux/cold/one/ttft_ms/p50", 1.5),
        ("loramux/cold/one/ttft_ms/max - loramux/cold/one/ttft_ms/p50", 100),
        ("loramux/cold/one/ttft_ms/max / loramux/cold/one/failed", None),
        ("vllm/cold/one/ttft_ms/max", None),
    ],
)
def test_aims_are_figures_quotients_or_differences(figure: str, value: float | None):
    aimed = small(aims=[{"name": "an aim", "figure": figure, "limit": 200}])
    (found,) = summary(record(0, 100), record(1, 200), record(2, 300), scenario=aimed).aims
    assert found.value == value
    assert found.met == (None if value is None else value <= 200)


@pytest.mark.parametrize(
    ("figure", "near"),
    [
        ("loramux/cold/one/ttft/p95", "loramux/cold/one/ttft_ms/p95"),
        ("loramux/cold/two/ttft_ms/p95", "loramux/cold/one/ttft_ms/p95"),
        ("loramux/cold/one/ttft_ms/p50 / loramux/cold/one/filed", "loramux/cold/one/failed"),
    ],
)
def test_an_aim_about_a_figure_that_there_cannot_be_names_near_ones(figure: str, near: str):
    with pytest.raises(UnknownFigure, match="near it are") as refused:
        summary(record(0), scenario=small(aims=[{"name": "an aim", "figure": figure, "limit": 1}]))
    assert near in str(refused.value)


def test_every_figure_of_a_run_may_stand_in_an_aim():
    made = synthetic.run(synthetic.scenario(rounds=1))
    found = summarize(made.scenario, synthetic.ENVIRONMENT, made.records, made.events, made.samples)
    aims = [{"name": key, "figure": key, "limit": 1e12} for key in figures(found)]
    again = summarize(synthetic.scenario(rounds=1, aims=aims), {}, made.records, made.events, made.samples)
    assert len(again.aims) == len(aims)


def test_records_of_a_phase_that_the_scenario_does_not_have_are_refused():
    with pytest.raises(BadRun, match="no phase warm"):
        summary(record(0, phase="warm"))


def test_a_summary_comes_back_from_its_file_as_it_was(tmp_path):
    made = synthetic.run(synthetic.scenario(rounds=1))
    found = summarize(made.scenario, {"cores": 2}, made.records, made.events, made.samples)
    write_summary(tmp_path / "summary.json", found)
    assert load_summary(tmp_path) == found
    assert "null" not in (tmp_path / "summary.json").read_text()


def test_the_schema_beside_the_code_is_the_codes():
    assert json.loads(SCHEMA.read_text()) == json.loads(schema()), "python -m loadtests.analysis writes it"
