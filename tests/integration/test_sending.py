"""The real aiperf against a scripted server: what a client saw is what the server did, by its own clock."""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtests import sending
from loadtests.sending import Sent
from loadtests.workload import Planned
from tests.scripted_openai import GAP_S, HEADERS, Scripted, scripted


@pytest.fixture(scope="module", autouse=True)
def aiperf() -> Path:
    return sending.prepare()


def planned(at_s: Sequence[float], **fields: object) -> tuple[Planned, ...]:
    shape = {"load": "l", "pool": "p", "adapter_index": 0, "alias": None, "prompt": "Hello", "max_tokens": 8}
    return tuple(Planned(number=number, at_s=when_s, **(shape | fields)) for number, when_s in enumerate(at_s))


async def test_what_a_client_saw_is_told_of_every_kind_of_answer(tmp_path):
    kinds = ("ok", "late-headers", "missing", "busy", "broken", "unfinished", "event-error", "plain", "swallow")
    async with scripted() as server:
        models = [f"{kind}:a" for kind in kinds]
        requests = planned([0.3 + 0.1 * k for k in range(len(kinds))])
        answers = await sending.send(server.url, requests, models, tmp_path / "run", timeout_s=3)
    seen: dict[str, Sent] = dict(zip(kinds, answers, strict=True))

    for kind in ("ok", "late-headers"):
        assert (seen[kind].status, seen[kind].error) == (200, "")
        assert (seen[kind].text, seen[kind].tokens) == ("one two three", 7)
        assert (seen[kind].tier, seen[kind].role) == (HEADERS["x-loramux-tier"], HEADERS["x-loramux-load"])
        assert seen[kind].answered_by == f"{kind}:a@1"
        assert seen[kind].stages_ms == {"resolve": 0.1, "relay": 2.5, "fetch": 40.0, "load": 3.0}
        assert len(seen[kind].gaps_ms) == 2
        assert min(seen[kind].gaps_ms) > GAP_S * 1e3 / 2
    assert (seen["missing"].status, "told by missing" in seen["missing"].error) == (404, True)
    assert (seen["busy"].status, "told by busy" in seen["busy"].error) == (503, True)
    assert "payload is not completed" in seen["broken"].error
    assert "[DONE]" in seen["unfinished"].error
    assert "the engine went away" in seen["event-error"].error
    assert seen["plain"].error == "no data event in the answer"
    assert (seen["swallow"].status, seen["swallow"].ttft_ms) == (0, None)
    assert "Timeout" in seen["swallow"].error
    assert all(one.sent_s is not None for one in answers)
    assert [path.split()[1] for path in server.paths] == ["/v1/chat/completions"] * len(kinds), "only what was planned is sent"


async def test_time_to_first_token_is_what_the_servers_own_clock_says(tmp_path):
    async with scripted() as server:
        requests = planned([0.5 + 0.1 * k for k in range(30)])
        answers = await sending.send(server.url, requests, ["ok:a"] * 30, tmp_path / "run")
    took_ms = statistics.median((left_ns - read_ns) / 1e6 for read_ns, left_ns in server.clocks_ns)
    assert statistics.median(one.ttft_ms for one in answers) == pytest.approx(took_ms, abs=3)
    arrived_s = [(read_ns - server.clocks_ns[0][0]) / 1e9 for read_ns, _ in server.clocks_ns]
    sent_s = [one.sent_s - answers[0].sent_s for one in answers]
    assert statistics.median(abs(a - b) for a, b in zip(arrived_s, sent_s, strict=True)) < 0.003


async def test_sixty_four_at_once_are_all_under_way_together_and_keep_their_numbers(tmp_path):
    async with scripted() as server:
        models = [f"slow:a{number}" for number in range(64)]
        answers = await sending.send(server.url, planned([0.5] * 64), models, tmp_path / "run")
    assert [one.answered_by for one in answers] == [f"{model}@1" for model in models]
    assert server.most_together == 64


async def test_requests_leave_on_their_schedule_whether_or_not_earlier_ones_are_answered(tmp_path):
    async with scripted() as server:
        requests = planned([0.5 + 0.05 * k for k in range(40)])
        answers = await sending.send(server.url, requests, ["slow:a"] * 40, tmp_path / "run")
    lag_s = [one.sent_s - request.at_s for one, request in zip(answers, requests, strict=True)]
    assert statistics.median(lag_s) < 0.02
    assert min(lag_s) >= 0


async def test_the_schedules_zero_is_told_while_it_runs(tmp_path):
    told: list[tuple[int, int]] = []
    async with scripted() as server:
        requests = planned([1.0])
        (sent,) = await sending.send(
            server.url, requests, ["ok:a"], tmp_path / "run", lambda zero_ns: told.append((zero_ns, time.time_ns()))
        )
    ((zero_ns, heard_ns),) = told
    arrived_s = (server.clocks_ns[0][0] - zero_ns) / 1e9
    assert arrived_s == pytest.approx(sent.sent_s, abs=0.01)
    assert heard_ns - zero_ns < 500_000_000


async def test_a_server_that_is_slow_in_accepting_shows_as_lag_of_the_schedule(tmp_path):
    """Six connections at once, room for two: the others' are not there before the kernel tries again, a second later."""
    server = Scripted()
    with narrow_door() as door:
        server.port = door.getsockname()[1]

        async def open_late() -> asyncio.Server:
            await zero.wait()
            await asyncio.sleep(1.0)
            return await asyncio.start_server(server.connected, sock=door)

        zero = asyncio.Event()
        opening = asyncio.create_task(open_late())
        requests = planned([0.2] * 6)
        answers = await sending.send(server.url, requests, ["ok:a"] * 6, tmp_path / "run", lambda _: zero.set())
        (await opening).close()
    lag_s = sorted(one.sent_s - 0.2 for one in answers)
    assert lag_s[0] < 0.2
    assert lag_s[-1] > 0.7
    assert all(one.status == 200 for one in answers)


@contextmanager
def narrow_door() -> Iterator[socket.socket]:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen(1)
        yield door


async def test_images_reach_the_server_as_they_were_planned(tmp_path):
    url = "data:image/png;base64," + "A" * 200_000
    async with scripted() as server:
        (sent,) = await sending.send(server.url, planned([0.0], images=(url,)), ["ok:a"], tmp_path / "run")
    assert sent.error == ""
    assert server.bodies[0]["messages"][0]["content"][0]["image_url"]["url"] == url


async def test_cancelling_leaves_no_request_behind(tmp_path):
    async with scripted() as server:
        sender = asyncio.create_task(sending.send(server.url, planned([0.0, 60.0]), ["swallow:a"] * 2, tmp_path / "run"))
        await server.asked.wait()
        sender.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sender
        for _ in range(100):
            if server.connections == 0:
                break
            await asyncio.sleep(0.05)
    assert server.connections == 0
