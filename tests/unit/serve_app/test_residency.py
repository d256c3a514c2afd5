"""The residency view of a base, summed up from its replicas."""

from __future__ import annotations

from serve_app.residency.summary import UNKNOWN, summed


def row(rank: int, **adapters: tuple[str, int]) -> dict:
    return {
        "replica": f"r{rank}",
        "rank": rank,
        "requests": 2,
        "slots": 4,
        "int_ids": [1000 + rank],
        "adapters": {ref: {"tier": tier, "users": users} for ref, (tier, users) in adapters.items()},
    }


def test_users_of_a_ref_are_those_of_all_replicas_that_hold_it_in_their_engines():
    view = summed([row(0, gold=("engine", 2), silver=("disk", 0)), row(1, gold=("engine", 1))])
    assert view["resident"] == {"gold": 3}
    assert (view["requests"], view["slots"], view["int_ids"]) == (4, 4, [1000, 1001])


def test_replicas_stand_in_the_order_of_their_ranks_and_a_late_one_last():
    view = summed([UNKNOWN, row(1), row(0)])
    assert [one["replica"] for one in view["replicas"]] == ["r0", "r1", None]
    assert view["slots"] == 4


def test_without_replicas_all_is_empty():
    assert summed([]) == {"requests": 0, "resident": {}, "int_ids": [], "slots": 0, "replicas": []}


def test_engine_ids_are_there_when_they_were_asked_for():
    assert "engine_ids" not in summed([row(0)])
    assert summed([row(0) | {"engine_ids": [7]}, row(1) | {"engine_ids": [3]}])["engine_ids"] == [3, 7]
