"""Pin, prewarm, evict and the residency over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from adapters.errors import EngineUnavailable
from adapters.types import Directive
from tests.unit.gateway.test_promoter import NEW, OLD, post, replicas, row


async def taken_back(http, verb: str, status: int = 200, **query: Any) -> dict[str, Any]:
    answer = await http.delete(f"/registry/v1/{verb}", params={"base": "demo", "name": "parrot"} | query)
    assert answer.status_code == status, answer.text
    return answer.json()


async def directives(registry) -> list[tuple[str, str, bool]]:
    return [(each.target, each.tier, each.pin) for each in (await registry.head("demo", "parrot")).directives]


async def test_a_pin_on_an_alias_follows_it_and_is_in_the_answer(http, registry, backend):
    backend.resident = replicas({})
    body = await post(http, "pin", 200, target="production", replicas=1, message="keep it", who="ann")
    (shown,) = body["directives"]
    assert shown | {"at": ""} == {
        "target": "production",
        "tier": "engine",
        "pin": True,
        "replicas": 1,
        "start": None,
        "until": None,
        "every_s": None,
        "at": "",
        "who": "ann",
        "message": "keep it",
    }
    assert await directives(registry) == [("production", "engine", True)]
    assert (await http.get("/registry/v1/adapter?base=demo&name=parrot")).json()["directives"] == [shown]


async def test_pins_and_prewarms_are_taken_back_one_by_the_other(http, registry):
    await post(http, "pin", 200, target="production")
    await post(http, "pin", 200, target="production", tier="disk")
    await post(http, "prewarm", 200, target="production")
    await taken_back(http, "pin", target="production")
    assert await directives(registry) == [("production", "engine", False)]
    await taken_back(http, "prewarm", target="production")
    assert await directives(registry) == []


async def test_a_method_that_a_path_does_not_have_is_a_405_with_those_that_it_has(http):
    answer = await http.put("/registry/v1/pin")
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, POST")


async def test_taking_back_what_is_not_there_changes_nothing(http, registry):
    before = (await registry.head("demo", "parrot")).revision
    assert (await taken_back(http, "pin", target="7"))["revision"] == before


async def test_a_prewarm_on_a_schedule_keeps_its_window(http):
    window = {"start": "2030-01-01T06:00:00Z", "until": "2030-01-01T07:00:00Z", "every_s": 86400}
    (shown,) = (await post(http, "prewarm", 200, target="2", tier="disk", **window))["directives"]
    assert (shown["tier"], shown["pin"], shown["every_s"]) == ("disk", False, 86400)
    assert shown["start"].startswith("2030-01-01T06:00:00")


async def test_more_pins_than_the_engines_have_room_for_are_refused_with_numbers(http, registry, backend):
    backend.resident = replicas({})
    backend.resident["demo"]["replicas"][0]["slots"] = 2
    await post(http, "pin", 200, target="1")
    error = (await post(http, "pin", 409, target="2"))["error"]
    assert (error["reason"], error["limit"], error["value"]) == ("too_many_pins", 1, 2)
    assert await directives(registry) == [("1", "engine", True)]


async def test_replicas_that_can_t_be_asked_refuse_no_pin(http, backend):
    backend.error = EngineUnavailable("starting")
    await post(http, "pin", 200, target="1")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"target": "V7"}, "alias"),
        ({"target": "1", "tier": "remote"}, "tier"),
        ({"target": "1", "replicas": 0}, "replicas"),
        ({"target": "1", "until": "soon"}, "until"),
        ({"target": "1", "until": "2020-01-01T00:00:00Z"}, "until"),
        ({"target": "1", "every_s": 60}, "until"),
        ({"target": "nobody"}, "target"),
        ({}, "target"),
    ],
)
async def test_a_directive_without_sense_is_refused(http, wrong, param):
    for verb in ("pin", "prewarm"):
        assert (await post(http, verb, 400, **wrong))["error"]["param"] == param


async def test_a_pin_of_a_version_that_is_not_there_or_retired_is_refused(http, registry):
    assert (await post(http, "pin", 404, target="9"))["error"]["code"] == "model_not_found"
    await post(http, "retire", 200, version=2)
    assert (await post(http, "pin", 410, target="2"))["error"]["code"] == "version_retired"


async def test_what_is_pinned_can_t_be_retired(http):
    await post(http, "pin", 200, target="2")
    assert (await post(http, "retire", 409, version=2))["error"]["reason"] == "pinned"


async def test_an_old_revision_pins_nothing(http, registry):
    assert (await post(http, "pin", 409, target="1", expected_revision=99))["error"]["code"] == "version_conflict"
    assert await directives(registry) == []


# Giving up


async def test_an_eviction_reaches_all_replicas_and_says_where_the_version_is_now(http, backend):
    backend.resident = replicas({OLD: row()}, {OLD: row()})
    body = await post(http, "evict", 200, version=1, tier="remote")
    assert backend.evictions == [(OLD, "remote")]
    assert body == {
        "ref": OLD,
        "tier": "remote",
        "replicas": [{"replica": name, "tier": "remote", "reason": None} for name in ("r0", "r1")],
    }


async def test_what_is_pinned_is_not_given_up(http, backend):
    backend.resident = replicas({})
    await post(http, "pin", 200, target="production", tier="disk")
    assert (await post(http, "evict", 409, version=1, tier="remote"))["error"]["reason"] == "pinned"
    await post(http, "evict", 200, version=1, tier="disk")
    await post(http, "evict", 200, version=2, tier="remote")
    assert backend.evictions == [(OLD, "disk"), (NEW, "remote")]


async def test_a_pin_that_a_command_made_a_moment_ago_holds_and_one_that_it_ended_keeps_nothing(http, backend, registry):
    """A command writes to the registry itself; the gateway hears of it with its next poll."""
    backend.resident = replicas({})
    await registry.direct("demo", "parrot", Directive("2", "engine", pin=True))
    assert (await post(http, "evict", 409, version=2, tier="remote"))["error"]["reason"] == "pinned"
    await post(http, "pin", 200, target="1")
    await registry.undirect("demo", "parrot", "1", pin=True)
    await post(http, "evict", 200, version=1, tier="remote")
    assert backend.evictions == [(OLD, "remote")]


async def test_an_eviction_of_what_is_not_there_reaches_no_replica(http, backend):
    for wrong, status in (
        ({"version": 9}, 404),
        ({"version": 1, "tier": "engine"}, 400),
        ({"version": 1, "name": "nobody"}, 404),
    ):
        await post(http, "evict", status, **wrong)
    assert backend.evictions == []


async def test_the_residency_is_what_the_replicas_say(http, backend):
    backend.resident = replicas({OLD: row()})
    assert (await http.get("/registry/v1/residency")).json() == backend.resident
