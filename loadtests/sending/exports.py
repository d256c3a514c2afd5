"""aiperf's exports read back into what a client saw. Pure; knows the shape of aiperf 0.13's raw and trace exports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from loadtests.client import LOAD, STAGE, TIER, TIMING
from loadtests.sending.sent import Sent
from loadtests.workload import Planned

SAID_CHARS = 300
# What aiperf says of an answer in which it found no text; whether that is a failure is decided here, by what came.
NO_CONTENT = "InvalidInferenceResultError"


def begun_ns(summary: str) -> int:
    """The wall clock at the schedule's zero, out of aiperf's summary (it was run with the clock of UTC)."""
    began = datetime.fromisoformat(json.loads(summary)["start_time"]).replace(tzinfo=UTC)
    since = began - datetime(1970, 1, 1, tzinfo=UTC)
    return ((since.days * 86400 + since.seconds) * 1_000_000 + since.microseconds) * 1000


def read(raw: Iterable[str], traced: Iterable[str], planned: Sequence[Planned], zero_ns: int) -> list[Sent]:
    """One Sent for each planned request, in the plan's order, from lines of the raw export and of the records with their
    traces. `zero_ns` is the wall clock at the schedule's zero."""
    traces = {number: record.get("trace_data") or {} for number, record in _numbered(traced)}
    seen = {number: _sent(number, record, traces.get(number, {}), zero_ns) for number, record in _numbered(raw)}
    return [seen.get(request.number, Sent(request.number)) for request in planned]


def _numbered(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for line in lines:
        record = json.loads(line)
        yield int(record["metadata"]["conversation_id"]), record


@dataclass(slots=True)
class _Heard:
    """What came of one answer: the events' times on aiperf's own clock, and what they said."""

    said: dict[str, str]
    first_ns: int | None = None
    tokens_ns: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    model: str = ""
    counted: int | None = None
    error: str = ""
    done: bool = False

    def packet(self, name: str, value: str, at_ns: int) -> None:
        if name == "comment":
            header, colon, words = value.partition(": ")  # a stream that waited long says its headers as comments
            if colon:
                self.said[header.strip().lower()] = words
        elif name == "data" and value == "[DONE]":
            self.done = True
        elif name == "data":
            self._event(value, at_ns)

    def _event(self, value: str, at_ns: int) -> None:
        try:
            event = json.loads(value)
        except ValueError:
            event = {"error": "no JSON"}
        if "error" in event:
            self.error = self.error or value[:SAID_CHARS]
            return
        self.first_ns = self.first_ns or at_ns
        self.model = event.get("model", self.model)
        self.counted = (event.get("usage") or {}).get("completion_tokens", self.counted)
        deltas = [choice.get("delta") or {} for choice in event.get("choices", [])]
        self.text += [delta.get("content") or "" for delta in deltas]
        # The event that opens a message and the one that counts tokens bring none.
        if any(delta.get("content") or "role" not in delta for delta in deltas):
            self.tokens_ns.append(at_ns)


def _sent(number: int, raw: dict[str, Any], trace: dict[str, Any], zero_ns: int) -> Sent:
    meta = raw["metadata"]
    heard = _Heard({name.lower(): value for name, value in (trace.get("response_headers") or {}).items()})
    for response in raw["responses"]:
        for packet in response.get("packets", ()):
            heard.packet(packet["name"], packet.get("value") or "", response["perf_ns"])
    # aiperf's own start lies before connecting; this is the moment before the socket gets the bytes.
    left_ns = trace.get("request_send_end_ns") or meta["request_start_ns"]
    to_wall_ns = meta["request_start_ns"] - raw["start_perf_ns"]
    ended_ns = trace.get("response_receive_end_ns") or trace.get("error_timestamp_ns") or meta["request_end_ns"]
    status = raw.get("status") or trace.get("response_status_code") or 0
    error = _trouble(raw, heard, status)
    return Sent(
        number=number,
        sent_s=(left_ns - zero_ns) / 1e9,
        status=status,
        error=error,
        ttft_ms=None if heard.first_ns is None else (heard.first_ns + to_wall_ns - left_ns) / 1e6,
        total_ms=max(0, ended_ns - left_ns) / 1e6,
        gaps_ms=tuple((later - earlier) / 1e6 for earlier, later in pairwise(heard.tokens_ns)),
        tokens=len(heard.tokens_ns) if heard.counted is None else heard.counted,
        text="" if error else "".join(heard.text).strip(),
        answered_by=heard.model,
        tier=heard.said.get(TIER, ""),
        role=heard.said.get(LOAD, ""),
        stages_ms={stage: float(ms) for stage, ms in STAGE.findall(heard.said.get(TIMING, ""))},
    )


def _trouble(raw: dict[str, Any], heard: _Heard, status: int) -> str:
    """What a failure said, "" for a whole answer."""
    if heard.error:
        return heard.error
    told = raw.get("error")
    if told and told.get("type") != NO_CONTENT:
        message = str(told.get("message") or "")
        if status and not 200 <= status < 300:
            return (message or str(told.get("type")))[:SAID_CHARS]
        return f"{told.get('type')}: {message}"[:SAID_CHARS]
    if heard.first_ns is None:
        return "no data event in the answer"
    return "" if heard.done else "the stream ended without [DONE]"
