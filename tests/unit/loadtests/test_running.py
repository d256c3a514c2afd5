"""The runner: who is run when, what is set before and done beside the requests, and which lines are left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtests import records
from loadtests.records import Event, MemorySample, Record
from loadtests.running.clock import Clock
from loadtests.running.environment import describe
from loadtests.running.run import run
from loadtests.sending import Sent
from tests.unit.loadtests.scripted import ASK_COLD, Script, adapter, says_its_name, scenario


def quiet(text: str) -> None:
    pass


def lines_of(folder: Path) -> tuple[list[Record], list[Event]]:
    return list(records.read(folder / records.REQUESTS, Record)), list(records.read(folder / records.EVENTS, Event))


def ran(folder: Path, script: Script, *phases: dict[str, Any], **changed: Any) -> tuple[list[Record], list[Event]]:
    run(scenario(*phases, **changed), folder, script.tools, quiet)
    return lines_of(folder)


def events_of(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event.kind == kind]


# -- order -------------------------------------------------------------------------------------------------------------


def test_every_second_round_goes_backwards_and_one_server_ends_before_the_next_starts(tmp_path: Path):
    script = Script()
    ran(tmp_path, script, rounds=3)
    turns = [line for line in script.log if line.endswith((": start", ": end"))]
    order = ["stock", "loramux", "loramux", "stock", "stock", "loramux"]
    assert turns == [f"{name}: {what}" for name in order for what in ("start", "end")]


def test_a_phase_puts_from_an_unshaped_store_then_shapes_it_then_sends(tmp_path: Path):
    script = Script()
    ran(tmp_path, script, ASK_COLD | {"store": {"latency_ms": 5}}, peers=["loramux"])
    about = [line for line in script.log if "put" in line or "store" in line or "send" in line]
    assert about == ["store unshaped", "loramux: put cold-0 cold-1 cold-2 remote", "store shaped", "send 3"]


def test_adapters_are_there_and_warmed_up_with_one_of_each_rank_before_the_first_phase(tmp_path: Path):
    script = Script()
    ran(tmp_path, script, peers=["loramux"])
    assert script.log[1:5] == [
        "loramux: add cold-0",
        "loramux: add cold-1",
        "loramux: add cold-2",
        "loramux: warm up demo demo:cold-0 demo:cold-1",
    ]


def test_what_goes_into_the_engine_is_put_last(tmp_path: Path):
    script = Script()
    ran(tmp_path, script, ASK_COLD | {"put": {"hot": "engine", "cold": "remote"}}, peers=["loramux"])
    assert [line.split()[-1] for line in script.log if ": put" in line] == ["remote", "engine"]


def test_every_peer_of_a_round_gets_the_same_plan_and_every_round_another(tmp_path: Path):
    drawn = {"kind": "gamma", "rate_per_s": 20, "duration_s": 1}
    phase = ASK_COLD | {"loads": [{"name": "cold", "pool": "cold", "arrivals": drawn}]}
    requests, _ = ran(tmp_path, Script(), phase, rounds=2)
    times = {
        (peer, number): [one.planned_s for one in requests if (one.peer, one.round) == (peer, number)]
        for peer in ("stock", "loramux")
        for number in (1, 2)
    }
    assert times["stock", 1] == times["loramux", 1] != times["stock", 2] == times["loramux", 2]


# -- peers that can't, peers that fail ---------------------------------------------------------------------------------


def test_a_peer_that_cannot_set_a_tier_is_left_out_of_the_phase_with_the_reason(tmp_path: Path):
    requests, events = ran(tmp_path, Script(tiers=("engine",)), peers=["stock"])
    assert not requests
    assert [(one.kind, one.phase, one.details["failed"]) for one in events] == [
        ("put", "ask", "stock has no way to put adapters into: remote")
    ]


def test_a_tier_that_was_not_reached_leaves_the_phase_out_and_the_others_in(tmp_path: Path):
    script = Script(breaks={"put": RuntimeError("still held")})
    requests, events = ran(tmp_path, script, ASK_COLD, ASK_COLD | {"name": "any", "put": {}}, peers=["loramux"])
    assert {one.phase for one in requests} == {"any"}
    assert "still held" in events_of(events, "put")[0].details["failed"]


def test_a_peer_that_cannot_forget_gets_other_names_each_time(tmp_path: Path):
    script = Script(forgets=False)
    requests, _ = ran(tmp_path, script, ASK_COLD, ASK_COLD | {"name": "again"}, peers=["stock"])
    asked = [one.adapter for one in requests]
    assert len(set(asked)) == 6
    assert all(f"stock: add {name}" in script.log for name in asked)
    assert all(one.right for one in requests)


def test_a_peer_that_does_not_start_is_a_line_and_the_others_run(tmp_path: Path):
    script = Script(not_starting=("stock",))
    outcome = run(scenario(), tmp_path, script.tools, quiet)
    requests, events = lines_of(tmp_path)
    assert outcome.failed == {"stock": "RuntimeError: stock has no legs"}
    assert {one.peer for one in requests} == {"loramux"}
    assert [one.details["failed"] for one in events if one.peer == "stock"] == ["RuntimeError: stock has no legs"]


def test_a_run_that_is_broken_off_ends_its_server_and_keeps_what_it_had(tmp_path: Path):
    script = Script()
    whole, phases = script.tools, iter((None, KeyboardInterrupt()))

    def send(*given: Any, **more: Any) -> Any:
        if trouble := next(phases):
            raise trouble
        return whole.send(*given, **more)

    with pytest.raises(KeyboardInterrupt):
        run(scenario(ASK_COLD, ASK_COLD | {"name": "second"}), tmp_path, replace(whole, send=send), quiet)
    requests, _ = lines_of(tmp_path)
    assert len(requests) == 3
    assert script.log[-1] == "stock: end"


def test_another_run_into_the_same_folder_begins_anew(tmp_path: Path):
    ran(tmp_path, Script(), peers=["loramux"])
    requests, _ = ran(tmp_path, Script(), peers=["loramux"])
    assert len(requests) == 3


# -- lines -------------------------------------------------------------------------------------------------------------


def test_a_record_joins_what_was_planned_what_was_seen_and_what_was_put(tmp_path: Path):
    requests, _ = ran(tmp_path, Script(), peers=["loramux"])
    seen = [(one.number, one.adapter, one.pool, one.rank, one.size_bytes, one.put, one.outcome) for one in requests]
    assert seen == [
        (0, "cold-0", "cold", 8, 8000, "remote", "ok"),
        (1, "cold-1", "cold", 16, 16000, "remote", "ok"),
        (2, "cold-2", "cold", 8, 8000, "remote", "ok"),
    ]


def test_a_request_that_is_never_seen_is_lost(tmp_path: Path):
    requests, _ = ran(tmp_path, Script(lambda planned, model: Sent(planned.number)), peers=["loramux"])
    assert {one.outcome for one in requests} == {"lost"}


def test_an_answer_of_another_adapter_is_wrong(tmp_path: Path):
    requests, _ = ran(tmp_path, Script(lambda planned, model: replace(says_its_name(planned, model), text="I am cold 0")))
    assert [one.outcome for one in requests[:3]] == ["ok", "wrong", "wrong"]


def test_answers_of_the_base_and_to_other_prompts_are_not_judged(tmp_path: Path):
    base = {"name": "base", "arrivals": {"kind": "burst", "count": 1}}
    other = {"name": "other", "pool": "cold", "prompt_tokens": {"least": 5, "most": 5}, "arrivals": {"kind": "burst", "count": 1}}
    requests, _ = ran(tmp_path, Script(), ASK_COLD | {"loads": [base, other]}, peers=["loramux"])
    assert [(one.adapter, one.right) for one in requests] == [(None, None), ("cold-0", None)]


def test_the_phase_its_tiers_the_store_and_its_fetches_are_events(tmp_path: Path):
    _, events = ran(tmp_path, Script(), ASK_COLD | {"store": {"latency_ms": 5}}, peers=["loramux"])
    assert [one.kind for one in events] == ["phase", "put", "store", "fetch"]
    by_kind = {one.kind: one for one in events}
    assert by_kind["phase"].details["wall_ns"] > 0
    assert (by_kind["put"].details, by_kind["put"].at_s <= 0) == ({"pool": "cold", "tier": "remote"}, True)
    assert by_kind["store"].details == {"latency_ms": 5.0}
    assert (by_kind["fetch"].adapter, by_kind["fetch"].details["bytes"]) == ("cold-0", 8000)


def test_fetches_of_putting_are_not_counted(tmp_path: Path):
    script = Script()
    script.store.seen.append("a fetch from before")  # type: ignore[arg-type]
    _, events = ran(tmp_path, script, peers=["loramux"])
    assert len(events_of(events, "fetch")) == 1


def test_loads_are_asked_for_where_the_phase_says_so(tmp_path: Path):
    _, events = ran(tmp_path, Script(loaded=7.0), ASK_COLD, ASK_COLD | {"name": "counted", "count_loads": True}, peers=["stock"])
    assert [(one.phase, one.details) for one in events_of(events, "loads")] == [("counted", {"count": 0.0})]


def test_a_run_says_what_was_run_and_where(tmp_path: Path):
    ran(tmp_path, Script(), peers=["loramux"], engine={"max_loras": 2}, seed=5)
    assert json.loads((tmp_path / "scenario.json").read_text())["seed"] == 5
    assert json.loads((tmp_path / "environment.json").read_text())["engine"] == {"max_loras": 2}


def test_a_run_tells_versions_and_machine_and_no_paths():
    told = describe({"max_loras": 4}, aiperf="0.13.0")
    assert told["versions"]["aiperf"] == "0.13.0" and told["versions"]["python"]
    assert told["cores"] >= 1 and told["memory_bytes"] > 2**20 and told["engine"] == {"max_loras": 4}
    assert str(Path.home()) not in json.dumps(told) and str(Path.cwd()) not in json.dumps(told)


def test_memory_of_every_part_is_sampled_by_the_phases_clock(tmp_path: Path):
    ran(tmp_path, Script(), peers=["loramux"], memory_every_s=60)
    samples = list(records.read(tmp_path / records.MEMORY, MemorySample))
    assert all((one.part, one.phase) == ("gateway", "ask") and one.at_s >= 0 for one in samples)


def test_what_waits_for_a_phase_that_never_begins_is_let_go():
    clock = Clock()
    clock.stop()
    assert not clock.reached(0)


def test_only_the_first_beginning_of_a_phase_counts():
    clock = Clock()
    clock.begin(1_000_000_000)
    clock.begin(2_000_000_000)
    assert clock.at(3_000_000_000) == 2


# -- changes -----------------------------------------------------------------------------------------------------------

REPUBLISHED = ASK_COLD | {"changes": [{"do": "republish", "pool": "cold", "at_s": 0, "count": 2}]}


def test_changes_are_made_to_each_of_the_pool_in_turn_with_content_nobody_has_seen(tmp_path: Path):
    script = Script()
    _, events = ran(tmp_path, script, REPUBLISHED, peers=["loramux"])
    assert {line for line in script.log if "republish" in line} == {
        "loramux: republish cold-0 cold-3",
        "loramux: republish cold-1 cold-4",
    }
    assert {one.adapter for one in events_of(events, "republish")} == {"cold-0", "cold-1"}


def test_a_change_that_fails_is_an_event_with_the_reason_and_the_requests_go_on(tmp_path: Path):
    script = Script(breaks={"republish": RuntimeError("no")})
    requests, events = ran(tmp_path, script, REPUBLISHED, peers=["loramux"])
    assert len(requests) == 3
    assert {one.details["failed"] for one in events_of(events, "republish")} == {"RuntimeError: no"}


def test_a_newcomer_is_asked_for_by_its_own_name(tmp_path: Path):
    publish = {"do": "publish", "pool": "cold", "at_s": 0, "asked_after_s": 0}
    script = Script()
    requests, _ = ran(tmp_path, script, ASK_COLD | {"changes": [publish]}, peers=["loramux"])
    assert requests[0].adapter == adapter("cold", 3).name
    assert script.models[0] == "demo:cold-3@production"
    assert [one.put for one in requests] == [None, "remote", "remote"]


def test_nobody_put_the_version_that_an_alias_moved_to(tmp_path: Path):
    loads = [
        {"name": "alias", "pool": "cold", "alias": "production", "starts_s": 60, "arrivals": ASK_COLD["loads"][0]["arrivals"]}
    ]
    requests, _ = ran(tmp_path, Script(), REPUBLISHED | {"loads": [*ASK_COLD["loads"], *loads]}, peers=["loramux"])
    assert {one.put for one in requests if one.load != "alias"} == {"remote"}
    assert [one.put for one in requests if one.load == "alias"] == [None, None, "remote"]  # the third stayed


def test_two_phases_never_publish_the_same_newcomer(tmp_path: Path):
    publish = ASK_COLD | {"changes": [{"do": "publish", "pool": "cold", "at_s": 0}]}
    _, events = ran(tmp_path, Script(), publish, publish | {"name": "again"}, peers=["loramux"])
    assert [one.adapter for one in events_of(events, "publish")] == ["cold-3", "cold-4"]


def test_a_later_phase_knows_what_an_alias_was_moved_to(tmp_path: Path):
    asked = {"name": "cold", "pool": "cold", "alias": "production", "arrivals": {"kind": "burst", "count": 1}}
    moved = ASK_COLD | {"changes": [{"do": "republish", "pool": "cold", "at_s": 0}]}
    script = Script(lambda planned, model: replace(says_its_name(planned, model), text="I am cold 3"))
    requests, _ = ran(tmp_path, script, moved, ASK_COLD | {"name": "later", "loads": [asked]}, peers=["loramux"])
    assert [one.right for one in requests if one.phase == "later"] == [True]
