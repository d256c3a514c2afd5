"""A plan in aiperf's words, its exports read back, and what becomes of an aiperf that goes wrong."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadtests import sending
from loadtests.sending import environment, exports, process, trace
from loadtests.workload import Planned

ZERO_NS = 1_800_000_000_000_000_000
PERF_NS = 40_000_000_000_000
SAID = {"X-LoraMux-Tier": "remote", "x-loramux-load": "leader", "Server-Timing": "resolve;dur=0.1, fetch;dur=40.5"}


def planned(number: int, at_s: float = 0.0, **fields: Any) -> Planned:
    given = {"load": "cold", "pool": "p", "adapter_index": 0, "alias": None, "prompt": "Hello", "max_tokens": 16}
    return Planned(number=number, at_s=at_s, **(given | fields))


def told(*said: tuple[float, str], text: str = "data") -> list[dict[str, Any]]:
    """Messages of a stream as the raw export has them: ms after the request's start, and what each says."""
    return [{"perf_ns": PERF_NS + int(after_ms * 1e6), "packets": [{"name": text, "value": value}]} for after_ms, value in said]


def event(content: str | None = None, **fields: Any) -> str:
    choices = [] if content is None else [{"delta": {"content": content}}]
    return json.dumps({"model": "base:a@1", "choices": choices} | fields)


OPENING = json.dumps({"model": "base:a@1", "choices": [{"delta": {"role": "assistant", "content": ""}}]})
STREAM = told((102, OPENING), (102, event("green ")), (122, event("door")), (152, event(" handle")), (152, "[DONE]"))


def record(number: int = 0, *, status: int | None = 200, error: Any = None, headers: Any = SAID, sent: bool = True, **raw: Any):
    """One request in both exports: aiperf starts it 1 s after the schedule's zero, its bytes leave 2 ms later."""
    start_ns = ZERO_NS + 1_000_000_000
    meta = {"conversation_id": str(number), "session_num": 7, "request_start_ns": start_ns, "request_end_ns": start_ns}
    traced = {"response_headers": headers, "response_receive_end_ns": start_ns + 160_000_000}
    if sent:
        traced["request_send_end_ns"] = start_ns + 2_000_000
    shared = {"metadata": meta} | ({"error": error} if error else {})
    whole = shared | {"start_perf_ns": PERF_NS, "responses": []} | ({"status": status} if status else {}) | raw
    return json.dumps(whole), json.dumps(shared | {"trace_data": traced})


def read(*records: tuple[str, str], plan: tuple[Planned, ...] = (planned(0),)) -> list[sending.Sent]:
    return exports.read([raw for raw, _ in records], [traced for _, traced in records], plan, ZERO_NS)


def test_time_to_first_token_runs_from_the_bytes_leaving_to_the_first_data_event():
    (sent,) = read(record(responses=STREAM))
    assert sent.sent_s == pytest.approx(1.002)
    assert sent.ttft_ms == pytest.approx(100)
    assert sent.total_ms == pytest.approx(158)


def test_gaps_lie_between_events_that_bring_tokens():
    (sent,) = read(record(responses=STREAM))
    assert sent.gaps_ms == pytest.approx((20, 30))


def test_an_answer_has_its_text_and_what_the_server_said_of_itself():
    (sent,) = read(record(responses=STREAM))
    assert (sent.status, sent.error, sent.text, sent.answered_by) == (200, "", "green door handle", "base:a@1")
    assert (sent.tier, sent.role, sent.stages_ms) == ("remote", "leader", {"resolve": 0.1, "fetch": 40.5})


def test_tokens_are_counted_by_the_server_and_else_by_events():
    usage = told((152, event(usage={"completion_tokens": 9})))
    assert read(record(responses=STREAM[:-1] + usage + STREAM[-1:]))[0].tokens == 9
    assert read(record(responses=STREAM))[0].tokens == 3


def test_comments_of_a_stream_that_waited_long_say_its_headers_and_are_no_first_token():
    comments = told((11, "x-loramux-tier: disk"), (12, "server-timing: load;dur=9.0"), text="comment")
    (sent,) = read(record(responses=comments + STREAM, headers={"content-type": "text/event-stream"}))
    assert (sent.tier, sent.stages_ms) == ("disk", {"load": 9.0})
    assert sent.ttft_ms == pytest.approx(100)


def test_a_refusal_is_a_failure_with_what_was_said():
    body = '{"error": {"message": "no such model", "code": "model_not_found"}}'
    (sent,) = read(record(status=404, error={"code": 404, "type": "Not Found", "message": body}))
    assert (sent.status, sent.error, sent.ttft_ms) == (404, body, None)
    assert sent.tier == "remote"


def test_an_error_in_mid_stream_is_a_failure_without_text():
    (sent,) = read(record(responses=STREAM[:2] + told((130, '{"error": {"code": "engine_unavailable"}}'), (131, "[DONE]"))))
    assert sent.error == '{"error": {"code": "engine_unavailable"}}'
    assert sent.text == ""
    assert sent.ttft_ms == pytest.approx(100)


def test_a_broken_stream_is_a_failure():
    (sent,) = read(record(error={"type": "ClientPayloadError", "message": "not completed"}, responses=STREAM[:2]))
    assert sent.error == "ClientPayloadError: not completed"


@pytest.mark.parametrize("responses", [[], [{"perf_ns": PERF_NS, "text": "{}"}], told((90, "[DONE]"))])
def test_an_answer_without_events_is_a_failure(responses):
    (sent,) = read(record(responses=responses))
    assert (sent.error, sent.ttft_ms) == ("no data event in the answer", None)


def test_a_stream_without_its_end_is_a_failure():
    assert read(record(responses=STREAM[:-1]))[0].error == "the stream ended without [DONE]"


def test_an_event_that_is_no_json_is_a_failure():
    assert read(record(responses=told((102, "{half"))))[0].error == "{half"


def test_an_answer_that_is_whole_and_says_nothing_is_none():
    unread = {"type": "InvalidInferenceResultError", "message": "no text"}
    (sent,) = read(record(error=unread, responses=told((102, event("")), (120, "[DONE]"))))
    assert (sent.error, sent.text) == ("", "")


def test_a_request_without_an_answer_has_status_0_and_was_sent():
    (sent,) = read(record(status=None, error={"type": "TimeoutError", "message": "TimeoutError()"}, headers=None))
    assert (sent.status, sent.error) == (0, "TimeoutError: TimeoutError()")
    assert sent.sent_s == pytest.approx(1.002)


def test_one_whose_bytes_never_left_was_sent_when_it_was_tried():
    (sent,) = read(record(status=None, error={"type": "ClientConnectorError", "message": "refused"}, sent=False))
    assert sent.sent_s == pytest.approx(1.0)


def test_planned_requests_that_nobody_saw_are_lost_and_the_others_keep_their_numbers():
    sent = read(record(2, responses=STREAM), record(0, responses=STREAM), plan=(planned(0), planned(1), planned(2)))
    assert [(one.number, one.sent_s is None) for one in sent] == [(0, False), (1, True), (2, False)]


def test_the_schedules_zero_is_read_to_the_microsecond():
    assert exports.begun_ns('{"start_time": "2027-01-15T08:00:00.123456"}') == ZERO_NS + 123_456_000


def test_each_request_is_a_line_with_its_number_its_time_and_its_whole_body():
    lines = trace.lines((planned(0, 1.5), planned(1, 2.0, prompt="two words", max_tokens=3)), ["base:a", "base:b"])
    first, second = (json.loads(line) for line in lines.splitlines())
    assert (first["session_id"], first["timestamp"]) == ("0", 1500)
    assert first["payload"]["model"] == "base:a"
    assert first["payload"]["messages"] == [{"role": "user", "content": "Hello"}]
    assert "ignore_eos" not in first["payload"]
    assert second["payload"]["ignore_eos"]
    assert second["payload"]["max_tokens"] == 3


def test_images_stand_before_the_prompt():
    content = trace.body(planned(0, images=("data:image/png;base64,AA==",)), "base")["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "text"]
    assert content[0]["image_url"] == {"url": "data:image/png;base64,AA=="}


def test_an_aiperf_that_is_there_already_is_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("LORAMUX_AIPERF", "/opt/aiperf")
    assert sending.prepare(tmp_path) == Path("/opt/aiperf")
    assert not any(tmp_path.iterdir())


def test_an_environment_is_made_once_and_again_where_it_was_left_half(monkeypatch, tmp_path):
    monkeypatch.delenv("LORAMUX_AIPERF", raising=False)
    made = []

    def make(folder: Path) -> None:
        assert not folder.exists()
        made.append(folder)
        (folder / "bin").mkdir(parents=True)
        if len(made) == 1:
            raise sending.SenderFailed("the disk is full")

    monkeypatch.setattr(environment, "_make", make)
    with pytest.raises(sending.SenderFailed, match="disk"):
        sending.prepare(tmp_path)
    assert sending.prepare(tmp_path) == sending.prepare(tmp_path) == made[0] / "bin" / "aiperf"
    assert len(made) == 2


def test_a_pip_that_fails_says_how(monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="No matching distribution")
    monkeypatch.delenv("LORAMUX_AIPERF", raising=False)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(sending.SenderFailed, match="No matching distribution"):
        sending.prepare(tmp_path)


STARTED = "2027-01-15 08:00:00.123 - PhaseRunner - NOTICE - Phase profiling (profiling) started | phase_index=0"


@pytest.fixture
def scripted_aiperf(monkeypatch, tmp_path):
    """An aiperf of a few lines, in whose script `out` is its folder."""

    def write(script: str) -> Path:
        command = tmp_path / "aiperf"
        head = f"#!{sys.executable}\nimport pathlib, subprocess, sys, time\nout = pathlib.Path(sys.argv[-1])\n"
        command.write_text(f"{head}started = {STARTED!r} + chr(10)\n(out / 'logs').mkdir()\n{script}")
        command.chmod(0o755)
        monkeypatch.setenv("LORAMUX_AIPERF", str(command))
        return tmp_path / "run"

    return write


async def send(folder: Path, **options: Any) -> list[sending.Sent]:
    return await sending.send("http://127.0.0.1:9", (planned(0),), ["base"], folder, **options)


async def test_an_aiperf_that_dies_before_it_begins_says_its_last_words(scripted_aiperf):
    folder = scripted_aiperf("print('no such tokenizer')\nsys.exit(3)")
    with pytest.raises(sending.SenderFailed, match=r"3 before it began\nno such tokenizer"):
        await send(folder)


async def test_an_aiperf_that_dies_with_requests_under_way_is_a_failure_of_the_sender(scripted_aiperf):
    folder = scripted_aiperf("(out / 'logs' / 'aiperf.log').write_text(started)\nprint('killed')\nsys.exit(9)")
    with pytest.raises(sending.SenderFailed, match="killed"):
        await send(folder)


async def test_an_aiperf_that_is_not_there_is_a_failure_of_the_sender(monkeypatch, tmp_path):
    monkeypatch.setenv("LORAMUX_AIPERF", str(tmp_path / "nothing"))
    with pytest.raises(sending.SenderFailed, match="nothing"):
        await send(tmp_path / "run")


async def test_requests_that_a_whole_run_did_not_see_are_lost(scripted_aiperf):
    folder = scripted_aiperf("(out / 'logs' / 'aiperf.log').write_text(started)")
    assert await send(folder) == [sending.Sent(0)]


async def test_records_are_read_where_every_request_failed_and_aiperf_wrote_no_summary(scripted_aiperf):
    raw, traced = record(status=404, error={"code": 404, "type": "Not Found", "message": "unknown"})
    script = f"""
(out / 'logs' / 'aiperf.log').write_text(started)
(out / 'raw_records').mkdir()
(out / 'raw_records' / 'raw_records_1.jsonl').write_text({raw!r})
(out / 'profile_export.jsonl').write_text({traced!r})
sys.exit(1)
"""
    (sent,) = await send(scripted_aiperf(script))
    assert (sent.status, sent.error) == (404, "unknown")
    assert sent.sent_s == pytest.approx(1.002 - 0.123)


async def test_the_moment_at_which_the_schedule_runs_is_told_once(scripted_aiperf):
    heard: list[int] = []
    await send(scripted_aiperf("(out / 'logs' / 'aiperf.log').write_text(started)\ntime.sleep(0.2)"), on_start=heard.append)
    assert heard == [ZERO_NS + 123_000_000]


async def test_an_aiperf_that_does_not_end_is_ended_with_all_its_processes(scripted_aiperf, monkeypatch):
    folder = scripted_aiperf(LASTING)
    monkeypatch.setattr(process, "END_LIMIT_S", 0.3)
    with pytest.raises(sending.SenderFailed, match="does not come to an end"):
        await send(folder, timeout_s=0.1)
    assert await gone(int((folder / "child").read_text()))


async def test_cancelling_ends_aiperf_with_all_its_processes(scripted_aiperf):
    folder, begun = scripted_aiperf(LASTING), asyncio.Event()
    sender = asyncio.create_task(send(folder, on_start=lambda _: begun.set()))
    await begun.wait()
    sender.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sender
    assert await gone(int((folder / "child").read_text()))


async def test_nothing_planned_is_nothing_sent(tmp_path):
    heard: list[int] = []
    assert await sending.send("http://127.0.0.1:9", (), [], tmp_path / "run", heard.append) == []
    assert len(heard) == 1


LASTING = """
child = subprocess.Popen(['sleep', '600'])
(out / 'child').write_text(str(child.pid))
(out / 'logs' / 'aiperf.log').write_text(started)
time.sleep(600)
"""


async def gone(pid: int) -> bool:
    """Whether a process ends soon; an ended orphan may stay a zombie."""
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        await asyncio.sleep(0.05)
    return False
