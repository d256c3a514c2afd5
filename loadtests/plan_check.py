"""The plan's simulation beside measured runs: `python -m loadtests.plan_check`.

Replays the seeded traces of `results/thrash` and `results/placement` with their slots, replicas and closed loop of clients. How
long an answer takes is taken from each run's in-cache case, in which nothing is loaded; nothing else of the run is used. Which
replica owns an adapter is chance (a hash of its name), so each trace is replayed with several numberings of its adapters.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtests.traces import Trace, traces

RESULTS = Path(__file__).with_name("results")
OURS = "loramux"
RUNS = {"thrash": (1, 2, 4), "placement": (1, 2)}  # times the slots
ADAPTER_BYTES = 1_000_000
LOAD_S = 0.03  # of the demo adapters from disk, as in results/beside: cold less hot
NUMBERINGS = 5

Ask = Callable[[dict[str, Any]], float]
"""The hit rate that the simulation expects of a question."""


@dataclass(frozen=True)
class Compared:
    """Hit rates: the share of requests that began no load. `low` and `high`: of the numberings."""

    run: str
    trace: str
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def off(self) -> float:
        return self.predicted - self.measured


def compared(run: str, ask: Ask) -> Iterator[Compared]:
    """Each case of ours in a committed run beside its prediction."""
    measured = json.loads((RESULTS / run / "summary.json").read_text())
    about = measured["about"]
    replicas = about.get("replicas", 1)
    places = about["slots"] * replicas
    names = [str(number) for number in range(max(RUNS[run]) * places)]
    drawn = traces(names, places, RUNS[run], about["requests"], about["seed"])
    cases = [case for case in measured["cases"] if case["server"] == OURS]
    answer_s = about["clients"] / cases[0]["answers_per_s"]
    for trace, case in zip(drawn, cases, strict=True):
        rates = [ask(question(trace, about, replicas, answer_s, seed)) for seed in range(NUMBERINGS)]
        hit_rate = 1 - case["loads"] / case["requests"]
        yield Compared(run, str(trace), hit_rate, statistics.fmean(rates), min(rates), max(rates))


def question(trace: Trace, about: dict[str, Any], replicas: int, answer_s: float, numbering: int) -> dict[str, Any]:
    """For `python -m serve_app.simulation plan --json`."""
    adapters = len(trace.adapters)
    numbers = random.Random(numbering).sample(range(adapters), adapters) if numbering else list(range(adapters))
    return {
        "sizes_bytes": [ADAPTER_BYTES] * adapters,
        "slots": [about["slots"]],
        "replicas": [replicas],
        "replicas_per_node": replicas,
        "room": about["engine"]["max_num_seqs"],
        "trace": [numbers[int(name)] for name in trace.names],
        "clients": about["clients"],
        "answer_s": answer_s,
        "load_s": LOAD_S,
    }


def table(rows: Sequence[Compared]) -> Iterator[str]:
    yield "| run | trace | measured hit rate | predicted (five numberings) | off |"
    yield "|" + " --- |" * 5
    for row in rows:
        spread = f"{row.predicted:.0%} ({row.low:.0%} to {row.high:.0%})"
        yield f"| {row.run} | {row.trace} | {row.measured:.0%} | {spread} | {100 * row.off:+.0f} points |"


def main() -> None:
    from loadtests.plan_command import answers

    def ask(asked: dict[str, Any]) -> float:
        return answers(asked)[0]["hit_rate"]

    for line in table([row for run in RUNS for row in compared(run, ask)]):
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
