"""The backend over handles: deaths before and after the first bytes, and calls that reach all replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError

from adapters.errors import AdapterLoading, EngineUnavailable
from adapters.names import AdapterRef
from gateway.backend import BaseInfo, ReplyHead, ResolvedRequest
from serve_app import handle_backend
from serve_app.handle_backend import HandleBackend

REQUEST = ResolvedRequest("/v1/completions", "demo", None, b"{}", True, "request")
HEAD = ReplyHead(200, "text/event-stream", "base", "none")
ROW = {"replica": "r0", "rank": 0, "requests": 1, "slots": 4, "int_ids": [], "adapters": {}}


class Stream:
    """A replica's answer, item by item; an exception among them is raised."""

    def __init__(self, *items: Any) -> None:
        self.cancelled = False
        self._items = self._run(items)

    async def _run(self, items: tuple[Any, ...]) -> AsyncIterator[Any]:
        for item in items:
            if isinstance(item, BaseException) and not isinstance(item, AdapterLoading):
                raise item
            yield item

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._items

    def __anext__(self) -> Any:
        return self._items.__anext__()

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """A deployment handle: `streams` answer one after another, `answers` are those of all replicas to one call."""

    def __init__(self, *streams: Stream, answers: list[Callable[[], Any]] | None = None) -> None:
        self.streams = list(streams)
        self.answers = answers
        self.asked: list[tuple[Any, ...]] = []

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, *_: Any) -> Stream:
        return self.streams.pop(0)

    def broadcast(self, method: str, *arguments: Any) -> Any:
        self.asked.append((method, *arguments))

        async def calls() -> list[Any]:
            if self.answers is None:
                raise DeploymentUnavailableError(SimpleNamespace(name="demo", app_name="loramux"))
            return [SimpleNamespace(get_async=answer) for answer in self.answers]

        return SimpleNamespace(_fetch_replica_results_async=calls)


def backend(handle: Handle) -> HandleBackend:
    return HandleBackend({"demo": handle}, bases={"demo": BaseInfo("demo", 0)}, max_queued={"demo": 8})


def says(value: Any) -> Callable[[], Any]:
    async def answer() -> Any:
        if isinstance(value, BaseException):
            raise value
        return value

    return answer


async def hangs() -> None:
    await asyncio.Event().wait()


async def test_a_replica_that_dies_before_the_first_bytes_costs_one_more_try():
    reply = await backend(Handle(Stream(RayActorError()), Stream((HEAD, b"one"), b"two"))).dispatch(REQUEST)
    assert [chunk async for chunk in reply.chunks] == [b"one", b"two"]


async def test_a_request_whose_replicas_die_twice_is_given_up_for_it_may_be_what_kills_them():
    handle = Handle(*(Stream(RayActorError()) for _ in range(3)))
    with pytest.raises(EngineUnavailable):
        await backend(handle).dispatch(REQUEST)
    assert len(handle.streams) == 1


async def test_a_death_in_mid_answer_is_told_and_nothing_is_said_twice():
    handle = Handle(Stream((HEAD, b"one"), RayActorError()), Stream((HEAD, b"one")))
    reply = await backend(handle).dispatch(REQUEST)
    with pytest.raises(EngineUnavailable):
        _ = [chunk async for chunk in reply.chunks]
    assert len(handle.streams) == 1


async def test_an_error_that_a_replica_answers_with_is_not_tried_again():
    handle = Handle(Stream(AdapterLoading("it is being loaded", retry_after_s=1)), Stream((HEAD, b"")))
    with pytest.raises(AdapterLoading):
        await backend(handle).dispatch(REQUEST)
    assert len(handle.streams) == 1


async def test_residency_is_that_of_all_replicas():
    handle = Handle(answers=[says(ROW), says(ROW | {"replica": "r1", "rank": 1})])
    view = (await backend(handle).residency())["demo"]
    assert view["requests"] == 2
    assert [row["replica"] for row in view["replicas"]] == ["r0", "r1"]


@pytest.mark.parametrize("late", [hangs, says(RayActorError())], ids=["hangs", "died"])
async def test_a_replica_that_does_not_answer_hides_no_other(late, monkeypatch):
    monkeypatch.setattr(handle_backend, "RESIDENCY_TIMEOUT_S", 0.01)
    view = (await backend(Handle(answers=[late, says(ROW)])).residency())["demo"]
    assert [row["replica"] for row in view["replicas"]] == ["r0", None]


async def test_a_replica_that_fails_to_answer_is_an_error():
    failed = RayTaskError("residency", "a trace", ValueError("broken"))
    with pytest.raises(EngineUnavailable):
        await backend(Handle(answers=[says(ROW), says(failed)])).residency()


async def test_without_replicas_residency_is_empty_at_once():
    assert (await backend(Handle()).residency())["demo"]["replicas"] == []


async def test_all_replicas_are_told_to_evict():
    row = {"replica": "r0", "tier": "disk", "reason": None}
    handle = Handle(answers=[says(row), says(RayActorError())])
    assert await backend(handle).evict("demo", AdapterRef("demo", "gold", 1), "disk") == [row]
    assert handle.asked == [("evict", "demo:gold@1", "disk")]
