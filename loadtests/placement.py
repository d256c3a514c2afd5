"""Three replicas, LoraMux's placement beside Ray's multiplex router on this machine: `python -m loadtests.placement --out DIR`.

Three replicas of the demo base, four slots each (about 13 GB of memory); 12 and 24 adapters (1x and 2x of all slots), the same
seeded traces against each server, one server after another: hit rate, loads per request, failures, TTFT. Then 64 requests at once
for one adapter that nobody has seen: answers, loads, and fetches counted at the store. Writes `summary.json`.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtests.client import ask, client
from loadtests.figures import Figure, new_results, percentile, write
from loadtests.material import FEW_SLOTS, SLOTS, WORK, make_material
from loadtests.traced import (
    OURS,
    PEERS,
    Case,
    Peer,
    counted,
    errors_of,
    leaders,
    model_of,
    promised,
    run_traces,
    running,
    table_of,
    wrong_of,
)
from loadtests.traces import traces

REPLICAS = 3
TIMES = (1, 2)
COLD = 2
SEED = 11


@dataclass(frozen=True)
class Burst:
    """Many requests at once for one cold adapter; `alone_ms` is the TTFT of one request for another cold one."""

    server: str
    asked: int
    answered: int
    wrong_answers: int
    loads: float
    fetches: int
    alone_ms: float
    ttft_p95_ms: float
    errors: dict[str, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=new_results("placement"))
    parser.add_argument("--work", type=Path, default=WORK, help="where base and adapters are kept")
    parser.add_argument("--requests", type=int, default=400, help="requests of each trace")
    parser.add_argument("--clients", type=int, default=6, help="clients that ask at once")
    parser.add_argument("--burst", type=int, default=64, help="requests at once for one cold adapter")
    parser.add_argument("--only", nargs="*", choices=PEERS, default=list(PEERS))
    options = parser.parse_args()
    adapters = max(TIMES) * SLOTS * REPLICAS
    material = make_material(options.work, adapters + COLD)
    names = list(material.folders)
    drawn = traces(names[:adapters], SLOTS * REPLICAS, TIMES, options.requests, SEED)
    cases: list[Case] = []
    bursts: list[Burst] = []
    for server in options.only:
        print(f"-- {server}", flush=True)
        with running(server, material, replicas=REPLICAS) as peer:
            cases += asyncio.run(run_traces(peer, drawn, options.clients))
            bursts.append(asyncio.run(at_once(peer, names[adapters:], options.burst)))
    about = {"replicas": REPLICAS, "slots": SLOTS, "clients": options.clients, "requests": options.requests, "seed": SEED}
    print(table_of(cases), end="\n\n")
    parts = {"cases": [case.document() for case in cases], "bursts": [asdict(burst) for burst in bursts]}
    write(options.out, about | {"engine": FEW_SLOTS}, promised(cases) + [f for burst in bursts for f in of_burst(burst)], **parts)


async def at_once(peer: Peer, cold: list[str], number: int) -> Burst:
    """`cold` are two adapters that no request has asked for yet."""
    first, second = map(model_of, cold)
    for name in cold:
        await asyncio.to_thread(peer.forget, name)
    async with client(connections=number) as http:
        alone = await ask(http, peer.url, first)
        before, fetched = await counted(peer), peer.fetches.of()
        answers = await asyncio.gather(*(ask(http, peer.url, second) for _ in range(number)))
    return Burst(
        server=peer.name,
        asked=number,
        answered=sum(answer.good for answer in answers),
        wrong_answers=wrong_of(peer.material, [(second, answer) for answer in answers]),
        loads=await counted(peer) - before if peer.loads else leaders(answers),
        fetches=peer.fetches.of() - fetched,
        alone_ms=round(alone.ttft_ms, 1),
        ttft_p95_ms=round(percentile((answer.ttft_ms for answer in answers if answer.good), 0.95), 1),
        errors=errors_of(answers),
    )


def of_burst(burst: Burst) -> list[Figure]:
    what, ours = f"{burst.server}, {burst.asked} at once on one cold", burst.server == OURS
    return [
        Figure(f"{what}: answers", burst.answered, "", burst.asked if ours else None, ">="),
        Figure(f"{what}: wrong answers", burst.wrong_answers, "", 0 if ours else None),
        Figure(f"{what}: fetches at the store", burst.fetches, "", 1 if ours else None),
        Figure(f"{what}: loads", burst.loads, "", 1 if ours else None),
        Figure(f"{what}: TTFT p95", burst.ttft_p95_ms, "ms"),
        Figure(f"{burst.server}, one alone on another cold: TTFT", burst.alone_ms, "ms"),
    ]


if __name__ == "__main__":
    main()
