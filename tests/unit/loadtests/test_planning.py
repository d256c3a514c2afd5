"""Plans: what is tried, what is chosen, what is said of it. The simulation is a made-up one, but where a test says so."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from loadtests import plan_check, plan_command
from loadtests.analysis import summarize
from loadtests.planning import (
    GIB,
    MIB,
    BadWish,
    Case,
    Plan,
    Times,
    Wish,
    disks_to_try,
    fewest_replicas,
    memory_of,
    most_slots,
    plan,
    promising,
    replicas_to_try,
    rungs,
)
from loadtests.stage_times import NotMeasured, times_of
from serve_app.simulation import sizing
from tests.unit.loadtests import synthetic

WISH = Wish(sizes_bytes=(100 * MIB,) * 1000, rate_per_s=20, requests_per_replica_s=10, alpha=3.0)
OFF = 0.06  # of a hit rate, between measured and predicted


def made_up(question: dict[str, Any]) -> list[Case]:
    """Cold is what the places don't hold, from the store what the disks don't: 100 slots and 50 GiB in all hold everything."""
    choices = itertools.product(question["slots"], question["replicas"], question["disk_bytes"])
    return [_case(*choice) for choice in choices]


def _case(slots: int, replicas: int, disk_bytes: int | None) -> Case:
    cold = max(0.0, 1 - slots * replicas / 100)
    remote = 0.0 if disk_bytes is None else cold * max(0.0, 1 - disk_bytes * replicas / (50 * GIB))
    tiers = {"engine": 1 - cold, "disk": cold - remote, "remote": remote}
    busiest = 0.6 if replicas > 1 else 1.0
    return Case(slots, replicas, disk_bytes, tiers, cold, 1.0, 0.1, 1e6, 0.0, busiest, {"p50": 0.0, "p95": 0.1}, None, None)


def made(**changed: Any) -> Plan:
    return plan(replace(WISH, **changed), made_up)


# -- what is tried


def test_replicas_begin_with_those_that_carry_the_traffic():
    assert fewest_replicas(replace(WISH, rate_per_s=20.1)) == 3
    assert replicas_to_try(replace(WISH, max_replicas=4)) == [2, 3, 4]
    assert replicas_to_try(WISH)[-1] == 6


def test_slots_grow_by_half_and_a_third_and_end_at_the_limit():
    assert rungs(replace(WISH, max_slots=20)) == [1, 2, 3, 4, 6, 8, 12, 16, 20]


def test_there_are_no_more_slots_than_adapters():
    assert most_slots(replace(WISH, sizes_bytes=(MIB,) * 7)) == 7


def test_memory_limits_slots_with_what_is_staged_beside_them():
    limited = replace(WISH, memory_bytes=15 * 100 * MIB)
    assert most_slots(limited) == 10
    assert memory_of(limited, 10) == 15 * 100 * MIB


def test_slots_that_could_not_do_with_perfect_foresight_are_not_tried():
    even = replace(WISH, sizes_bytes=(MIB,) * 100, alpha=0.0, cold_aim=0.05)
    assert promising(even, replicas=2) == [48, 64, 96, 100]


def test_no_disk_is_tried_that_is_smaller_than_what_engines_keep_leased():
    disks = disks_to_try(WISH, slots=256)
    assert disks[0] == 257 * 100 * MIB
    assert disks[-1] == sum(WISH.sizes_bytes)


# -- what is chosen


def test_the_plan_has_the_fewest_slots_that_meet_the_aim():
    assert (made().replicas, made().slots) == (2, 48)


def test_more_replicas_are_taken_only_where_no_slots_will_do():
    assert (made(max_slots=32).replicas, made(max_slots=32).slots) == (3, 32)


def test_the_disk_is_the_smallest_that_keeps_answers_from_the_store_under_the_aim():
    chosen = made(cold_aim=0.05, store_aim=0.02)
    assert chosen.expected.tiers["remote"] <= 0.02
    smaller = next(step for step in chosen.steps if step.what == "less disk")
    assert smaller.case.tiers["remote"] > 0.02


def test_a_plan_that_misses_its_aim_is_the_best_there_is_and_says_by_how_much():
    best = made(max_slots=16, max_replicas=3)
    assert not best.met
    assert (best.slots, best.replicas) == (16, 3)
    assert best.notes[0] == "52.0 % cold is the least within 16 slots and 3 replicas; the aim is 5 %"


def test_each_step_says_what_it_costs_and_what_it_saves():
    steps = {step.what: step for step in made(store_aim=0.03).steps}
    assert set(steps) >= {"fewer slots", "more slots", "a replica less", "a replica more"}
    assert steps["fewer slots"].cold_by == pytest.approx(0.32)
    assert steps["fewer slots"].memory_by_bytes == 2 * (32 - 48) * 100 * MIB
    assert steps["a replica more"].memory_by_bytes == 48 * 100 * MIB
    assert steps["more slots"].cold_by < 0


def test_memory_is_that_of_the_largest_adapters():
    assert made(sizes_bytes=(MIB,) * 1000 + (100 * MIB,) * 10).memory_bytes == (10 * 100 + 38) * MIB


def test_a_replica_that_gets_more_than_it_carries_is_noted_with_the_room_that_helps():
    assert "`bases[].room: 20` spreads them" in made().notes[0]
    assert not made(room=20).notes


def test_times_of_much_smaller_adapters_are_noted():
    (note,) = made(room=20, times=Times(measured_bytes=MIB)).notes
    assert note.startswith("times were measured with adapters of 1.0 MiB and stretched to 100.0 MiB")
    assert not made(room=20, times=Times(measured_bytes=50 * MIB)).notes


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"max_replicas": 1}, "20 requests a second at 10 for each replica take 2 replicas; the limit is 1"),
        ({"memory_bytes": GIB // 4}, "one slot takes 0.29 GiB for adapters, staged ones with it; the limit is 0.25 GiB"),
        ({"cold_aim": 1.0}, "the aim for cold answers is 100 %; it lies between 0 and 100 %"),
        ({"sizes_bytes": ()}, "no adapters"),
    ],
)
def test_a_wish_without_sense_is_refused_with_limit_and_value(changed: dict[str, Any], said: str):
    with pytest.raises(BadWish, match=said):
        made(**changed)


def test_a_plan_by_the_real_simulation_meets_its_aims():
    def real(question: dict[str, Any]) -> list[Case]:
        return [Case.of(case.model_dump()) for case in sizing.expect(sizing.Question.model_validate(question)).cases]

    found = plan(replace(WISH, sizes_bytes=(100 * MIB,) * 200, alpha=1.2, requests=2_000), real)
    assert found.met
    assert found.slots < 128


# -- beside what was measured


@pytest.mark.parametrize("run", plan_check.RUNS)
def test_hit_rates_of_measured_runs_are_predicted_within_six_points(run: str):
    def ask(question: dict[str, Any]) -> float:
        return sizing.expect(sizing.Question.model_validate(question)).cases[0].hit_rate

    wrong = [row for row in plan_check.compared(run, ask) if abs(row.off) > OFF]
    assert not wrong


def test_stage_times_of_a_run_are_those_of_its_tiers():
    run = synthetic.run()
    summary = summarize(run.scenario, synthetic.ENVIRONMENT, run.records, run.events, run.samples)
    times = times_of(summary)
    cold = next(load for load in summary.loads if (load.peer, load.phase, load.load) == ("loramux", "cold", "one"))
    hot = next(load for load in summary.loads if (load.peer, load.phase, load.load) == ("loramux", "hot", "one"))
    assert cold.account is not None
    assert hot.ttft_ms is not None
    sizes = synthetic.SIZES.values()
    fetch_s = cold.account.stages_ms["fetch"].p50.value / 1e3
    assert times.measured_bytes in sizes
    assert times.measured_bytes / times.fetch_bytes_per_s == pytest.approx(fetch_s)
    assert times.hot_p50_ms == pytest.approx(hot.ttft_ms.p50.value, rel=0.2)


def test_a_run_without_loads_from_the_store_gives_no_times():
    run = synthetic.run(synthetic.scenario(("hot",)))
    with pytest.raises(NotMeasured, match="from the store"):
        times_of(summarize(run.scenario, synthetic.ENVIRONMENT, run.records, run.events, run.samples))


# -- the command


@pytest.fixture
def command(monkeypatch):
    """`plan` with a made-up simulation, and a registry that holds two adapters."""
    app = typer.Typer()
    app.command()(plan_command.plan)
    versions = [{"version": 1, "size_bytes": 10 * MIB}, {"version": 2, "size_bytes": 30 * MIB}]
    listed = {
        "adapters": [
            {"name": "live", "base": "b", "production": 1, "versions": versions},
            {"name": "team/new", "base": "b", "production": None, "versions": versions},
        ]
    }
    asked: list[dict[str, Any]] = []

    def output(words: list[str], said: str | None, who: str, as_json: bool) -> str:
        if "list" in words:
            return json.dumps(listed)
        asked.append(json.loads(said or ""))
        return json.dumps({"cases": [asdict(case) for case in made_up(asked[-1])]})

    monkeypatch.setattr(plan_command, "_output", output)

    def invoke(*words: str) -> Any:
        done = CliRunner().invoke(app, ["--rate", "20", "--requests-per-replica-s", "10", *words])
        done.asked = asked
        return done

    return invoke


def test_sizes_come_from_production_versions_else_the_newest(command):
    assert command("--max-slots", "1").asked[0]["sizes_bytes"] == [10 * MIB, 30 * MIB]


def test_requests_by_name_are_the_weights(command, tmp_path: Path):
    (tmp_path / "usage.json").write_text('{"team/new": 3, "gone": 9}')
    assert command("--usage", str(tmp_path / "usage.json")).asked[0]["weights"] == [0, 3]


@pytest.mark.parametrize(("text", "said"), [("[]", "no JSON mapping"), ('{"gone": 9}', "names 0 of the registry's 2 adapters")])
def test_usage_that_says_nothing_is_refused(command, tmp_path: Path, text: str, said: str):
    (tmp_path / "usage.json").write_text(text)
    done = command("--usage", str(tmp_path / "usage.json"))
    assert done.exit_code == 1
    assert said in done.stderr


def test_the_table_shows_plan_steps_and_assumptions(command):
    done = command("--adapters", "1000", "--size-mib", "100", "--alpha", "3")
    assert done.exit_code == 0, done.output
    for text in ("slots of each (max_cpu_loras)", "4.7 GiB", "fewer slots", "It assumes that", "engine.max_cpu_loras: 48"):
        assert text in done.stdout


def test_json_holds_the_same(command):
    done = command("--adapters", "1000", "--size-mib", "100", "--alpha", "3", "--json")
    document = json.loads(done.stdout)
    assert (document["slots"], document["replicas"], document["met"]) == (48, 2, True)
    assert document["steps"][0]["case"]["slots"] == 32


def test_a_plan_that_misses_its_aim_exits_with_1(command):
    assert command("--adapters", "1000", "--max-slots", "4").exit_code == 1


def test_given_adapters_and_a_registry_exclude_each_other(command):
    assert command("--adapters", "5", "--base", "b").exit_code == 2


@pytest.mark.parametrize(("size_bytes", "sign", "shown"), [(0, "", "0"), (3 * MIB, "", "3.0 MiB"), (-3 * GIB, "+", "-3.0 GiB")])
def test_sizes_are_shown_in_a_unit_that_fits(size_bytes: int, sign: str, shown: str):
    assert plan_command.size(size_bytes, sign) == shown
