"""More adapters than slots, LoraMux beside stock Ray Serve LLM on this machine: `python -m loadtests.thrash --out DIR`.

Four slots; 4, 8 and 16 adapters (1x, 2x, 4x), asked for by popularity (Zipf, exponent 1.0) or uniformly. The same seeded traces
go to each server, one server after another, from a closed loop of clients. The in-cache case is 1x: each adapter has its slot.
Loads are counted by the answers' headers (ours) and by Ray's multiplexing counter (stock). Writes `summary.json`.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from loadtests.figures import Figure, new_results, write
from loadtests.material import FEW_SLOTS, SLOTS, WORK, make_material
from loadtests.traced import PEERS, Case, promised, run_traces, running, table_of
from loadtests.traces import traces

TIMES = (1, 2, 4)
SEED = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=new_results("thrash"))
    parser.add_argument("--work", type=Path, default=WORK, help="where base and adapters are kept")
    parser.add_argument("--requests", type=int, default=500, help="requests of each trace")
    parser.add_argument("--clients", type=int, default=2 * SLOTS, help="clients that ask at once")
    parser.add_argument("--only", nargs="*", choices=PEERS, default=list(PEERS))
    options = parser.parse_args()
    material = make_material(options.work, max(TIMES) * SLOTS)
    drawn = traces(list(material.folders), SLOTS, TIMES, options.requests, SEED)
    cases: list[Case] = []
    for server in options.only:
        print(f"-- {server}", flush=True)
        with running(server, material) as peer:
            cases += asyncio.run(run_traces(peer, drawn, options.clients))
    about = {"slots": SLOTS, "clients": options.clients, "requests": options.requests, "seed": SEED, "engine": FEW_SLOTS}
    print(table_of(cases), end="\n\n")
    write(options.out, about, figures_of(cases), cases=[case.document() for case in cases])


def figures_of(cases: list[Case]) -> list[Figure]:
    """What was promised, and each trace against its own server's in-cache case."""
    return promised(cases) + [figure for case in cases if case.times_slots > 1 for figure in over(case, in_cache_of(case, cases))]


def in_cache_of(case: Case, cases: list[Case]) -> Case:
    return next(other for other in cases if other.server == case.server and other.times_slots == 1)


def over(case: Case, in_cache: Case) -> list[Figure]:
    what = f"{case.server}, {case.times_slots}x {case.popularity}, over its in-cache case"
    return [
        Figure(f"{what}: answers a second", ratio(case.answers_per_s, in_cache.answers_per_s), "times"),
        Figure(f"{what}: TTFT p99", ratio(case.ttft_p99_ms, in_cache.ttft_p99_ms), "times"),
    ]


def ratio(value: float, other: float) -> float:
    return value / other if other else 0.0


if __name__ == "__main__":
    main()
