"""Two runs beside each other, and a run beside a baseline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtests.analysis import (
    BadBaseline,
    Baseline,
    Comparison,
    Incomparable,
    Summary,
    baseline_of,
    check,
    compare,
    load_baseline,
    summarize,
    write_baseline,
)
from loadtests.analysis.comparing import difference, quotient
from loadtests.analysis.gate import Kept
from loadtests.analysis.summary import Estimate
from loadtests.records import Record
from tests.unit.loadtests import synthetic

FIRST = "loramux/cold/one"


def made(*, environment: dict[str, Any] = synthetic.ENVIRONMENT, change: Any = None, **changed: Any) -> Summary:
    """Our rounds of the made-up run; `change` makes each record of it another one."""
    run = synthetic.run(synthetic.scenario(**({"only": ("hot", "cold"), "rounds": 1, "peers": ["loramux"]} | changed)))
    records = [change(record) for record in run.records] if change else run.records
    return summarize(run.scenario, environment, records, run.events, run.samples)


def slower(stage: str, ms: float, phase: str = "cold") -> Any:
    """A stage on its own clock that takes so much longer, inside relay as all behind the door are."""

    def change(record: Record) -> Record:
        if record.phase != phase or record.ttft_ms is None:
            return record
        stages = {name: taken + ms * (name in (stage, "relay")) for name, taken in record.stages_ms.items()}
        return replace(record, ttft_ms=record.ttft_ms + ms, total_ms=record.total_ms + ms, stages_ms=stages)

    return change


def grown(found: Comparison, where: str) -> list[str]:
    return list(next(one for one in found.grown if one.where == where).stages_ms)


def row(found: Comparison, figure: str) -> Any:
    return next(one for one in found.rows if one.figure == figure)


# -- compare -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["fetch", "stage", "queue", "load", "engine"])
def test_a_planted_slow_stage_is_found_and_named(stage: str):
    found = compare(made(), made(change=slower(stage, 120)))
    assert grown(found, FIRST) == [stage]
    assert grown(found, "loramux/hot/one") == []
    told = next(one.sentence for one in found.grown if one.where == FIRST)
    assert f"{stage} +120.0 ms" in told


def test_time_before_the_door_is_named_though_no_clock_saw_it():
    late = made(change=lambda r: replace(r, ttft_ms=r.ttft_ms + 80, total_ms=r.total_ms + 80))
    assert grown(compare(made(), late), FIRST) == ["in front of the door"]


def test_half_the_bandwidth_moves_fetch_alone():
    def change(record: Record) -> Record:
        return slower("fetch", record.stages_ms.get("fetch", 0.0))(record)

    assert grown(compare(made(), made(change=change, store={"total_mib_per_s": 2})), FIRST) == ["fetch"]


def test_ratios_say_whether_they_differ_from_one():
    found = compare(made(), made(change=slower("load", 300)))
    assert row(found, f"{FIRST}/ttft_ms/p50").verdict == "more"
    assert row(found, "loramux/hot/one/ttft_ms/p50").verdict == "no difference seen"
    assert row(found, "loramux/hot/one/ttft_ms/p50").ratio.value == 1


def test_a_quotients_interval_follows_from_both():
    found = quotient(Estimate(value=100, low=90, high=110), Estimate(value=200, low=180, high=220))
    assert found.value == 2
    assert found.low == pytest.approx(2 * 0.868, rel=0.01) and found.high == pytest.approx(2 * 1.152, rel=0.01)
    assert quotient(Estimate(value=0, low=0, high=0), Estimate(value=1, low=1, high=1)) is None


def test_a_differences_interval_follows_from_both():
    found = difference(Estimate(value=10, low=7, high=13), Estimate(value=20, low=16, high=24))
    assert (found.value, found.low, found.high) == (10, 5, 15)


def test_runs_of_different_scenarios_are_refused():
    with pytest.raises(Incomparable, match="runs of different scenarios: made-up and other"):
        compare(made(), made(name="other"))


def test_a_scenario_that_asks_something_else_now_is_refused_and_told_where():
    with pytest.raises(Incomparable, match=r"asks something else now: pools\.hot\.count"):
        compare(made(), made(pools={**synthetic.POOLS, "hot": {"count": 3}}))


def test_another_store_or_engine_is_what_runs_are_compared_for_and_told():
    found = compare(made(), made(store={"total_mib_per_s": 2}))
    assert "store.total_mib_per_s: 4.0 and 2.0" in found.warnings


def test_another_machine_is_a_warning_another_time_is_none():
    found = compare(made(), made(environment={**synthetic.ENVIRONMENT, "cores": 16, "when": "later"}))
    assert found.warnings == ("cores: 2 and 16",)


def test_failures_are_compared_as_counts():
    failing = made(change=lambda r: replace(r, status=503, ttft_ms=None) if r.phase == "cold" and r.number == 3 else r)
    assert compare(made(), failing).counts[f"{FIRST}/failed"] == (0, 1)


def test_a_load_that_did_not_keep_its_schedule_is_marked_in_a_comparison():
    late = made(change=lambda r: replace(r, sent_s=r.sent_s + 0.2) if r.phase == "cold" else r)
    found = compare(made(), late)
    assert row(found, f"{FIRST}/ttft_ms/p50").late and not row(found, "loramux/hot/one/ttft_ms/p50").late


# -- check -------------------------------------------------------------------------------------------------------------


def baseline(**figures: Kept) -> Baseline:
    return Baseline(scenario="made-up", figures={FIRST + "/" + name.replace("__", "/"): kept for name, kept in figures.items()})


def test_a_run_meets_the_baseline_that_was_made_from_it():
    summary = made(peers=["vllm", "loramux"])
    found = baseline_of(summary)
    assert all(verdict.met for verdict in check(found, summary))
    assert f"{FIRST}/ttft_ms/p50 / vllm/cold/one/ttft_ms/p50" in found.figures
    assert found.figures["loramux/cold/*/lost"].limit == 0


def test_without_a_peer_a_baseline_is_over_our_quickest_load():
    assert f"{FIRST}/ttft_ms/p50 / loramux/hot/one/ttft_ms/p50" in baseline_of(made()).figures


def test_a_figure_beyond_its_tolerance_is_named_with_value_and_limit():
    p50 = next(one for one in made().loads if one.phase == "cold").ttft_ms.p50.value
    (verdict,) = check(baseline(ttft_ms__p50=Kept(value=p50 / 2, tolerance=1.5)), made())
    assert (verdict.figure, verdict.met) == (f"{FIRST}/ttft_ms/p50", False)
    assert verdict.value == pytest.approx(p50) and verdict.limit == pytest.approx(p50 * 0.75)


@pytest.mark.parametrize(
    ("kept", "limit"),
    [
        (Kept(value=100, tolerance=1.5), 150),
        (Kept(value=90, tolerance=1.5, bound=">="), 60),
        (Kept(value=-10, tolerance=1.5), -5),
        (Kept(value=0), 0),
    ],
)
def test_a_limit_is_the_tolerance_away_on_the_side_that_is_worse(kept: Kept, limit: float):
    assert kept.limit == pytest.approx(limit)


def test_one_lost_request_is_beyond_the_baseline():
    losing = made(change=lambda r: replace(r, sent_s=None, ttft_ms=None, status=0) if r.phase == "cold" and r.number == 3 else r)
    missed = [verdict.figure for verdict in check(baseline_of(made()), losing) if not verdict.met]
    assert "loramux/cold/*/lost" in missed


def test_a_figure_that_was_not_measured_is_a_miss():
    (verdict,) = check(baseline(promote__requests=Kept(value=1)), made())
    assert verdict.value is None and not verdict.met


def test_a_baseline_of_another_scenario_is_refused():
    with pytest.raises(BadBaseline, match="of the scenario other, the run of made-up"):
        check(Baseline(scenario="other", figures={}), made())


def test_a_baseline_written_anew_keeps_figures_and_tolerances():
    like = baseline(ttft_ms__p50=Kept(value=1, tolerance=3), failed=Kept(value=0))
    anew = baseline_of(made(change=slower("load", 50)), like)
    assert anew.figures[f"{FIRST}/ttft_ms/p50"].tolerance == 3
    assert anew.figures[f"{FIRST}/ttft_ms/p50"].value > 50
    assert anew.figures[f"{FIRST}/failed"].limit == 0


def test_a_baseline_comes_back_from_its_file_and_others_are_refused(tmp_path: Path):
    written = tmp_path / "baseline.json"
    write_baseline(written, baseline_of(made()))
    assert load_baseline(written) == baseline_of(made())
    written.write_text('{"scenario": "made-up"}')
    with pytest.raises(BadBaseline, match="figures: Field required"):
        load_baseline(written)
