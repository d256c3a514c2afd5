"""Events as JSON lines: appended by whoever, read whatever a crash left, and what of them holds."""

from __future__ import annotations

from dataclasses import dataclass

from training.runs.events import AdapterSaved, EventLog, RunStarted, StepEvent, Trouble, history, read_events


def step(number: int, solve_rate: float = 0.5) -> StepEvent:
    return StepEvent(number, 1, solve_rate, 0.5, 1.0, 3.0, 4.0, 0.0, 4, 48, {"play": 1.0}, {"loss": 0.1})


def started(at: int, resumed: bool) -> RunStarted:
    return RunStarted(at, 6, 1, "d1", "cpu", 1, resumed)


def test_what_is_told_is_read_again(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", now_s=lambda: 12.5)
    saved = AdapterSaved(2, "there", {"eval/easy-64/greedy/solve_rate": 0.5}, "d1")
    log.tell(step(1))
    log.tell(saved)
    lines = read_events(tmp_path / "events.jsonl")
    assert [line.event for line in lines] == [step(1), saved] and lines[0].at_s == 12.5


def test_listeners_hear_what_is_told(tmp_path):
    heard = []
    EventLog(tmp_path / "events.jsonl", [heard.append]).tell(step(1))
    assert heard == [step(1)]


def test_a_line_that_a_crash_cut_off_costs_no_other(tmp_path):
    file = tmp_path / "events.jsonl"
    EventLog(file).tell(step(1))
    with file.open("ab") as out:
        out.write(b'{"event": "StepEv')
    EventLog(file).tell(step(2))
    assert [line.event.step for line in read_events(file)] == [1, 2]


def test_a_disk_that_takes_no_lines_ends_nothing_and_listeners_hear_still(tmp_path):
    heard = []
    EventLog(tmp_path / "nowhere" / "events.jsonl", [heard.append]).tell(step(1))
    assert heard == [step(1)]


def test_events_of_other_rooms_are_written_and_left_out_when_read(tmp_path):
    @dataclass(frozen=True)
    class Published:
        version: int

    log = EventLog(tmp_path / "events.jsonl")
    log.tell(Published(3))
    log.tell(Trouble(1, "export", "no room"))
    assert '"version": 3' in (tmp_path / "events.jsonl").read_text()
    assert [type(line.event) for line in read_events(tmp_path / "events.jsonl")] == [Trouble]


def test_steps_that_were_done_again_after_a_restart_count_once(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    for event in (started(0, False), step(1, 0.1), step(2, 0.2), step(3, 0.3), started(1, True), step(2, 0.9)):
        log.tell(event)
    held = [line.event for line in history(read_events(log.file))]
    assert [(one.step, one.solve_rate) for one in held] == [(1, 0.1), (2, 0.9)]


def test_a_run_that_starts_over_forgets_what_was(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    for event in (started(0, False), step(1, 0.1), step(2, 0.2), started(0, False), step(1, 0.9)):
        log.tell(event)
    assert [line.event.solve_rate for line in history(read_events(log.file))] == [0.9]
