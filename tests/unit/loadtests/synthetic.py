"""Made-up runs that look like real ones: four peers, all phases, every kind of event. Seeded; the tests say what is in them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loadtests.records import Event, MemorySample, Record
from loadtests.scenario import PEERS, Scenario

SIZES = {8: 131_072, 32: 524_288}
ADDED_MS = {"vllm": 0.0, "loramux": 9.0, "stock-tuned": 21.0, "stock": 58.0}
MIB = 2**20

ENVIRONMENT: dict[str, Any] = {
    "when": "2026-11-30T06:00:00+0000",
    "commit": "0123456789ab",
    "cpu": "a made-up processor",
    "cores": 2,
    "memory_bytes": 16_777_216_000,
    "gpu": None,
    "versions": {"loramux": "0.1.0", "ray": "2.60.0", "vllm": "0.29.0", "aiperf": "0.13.0"},
    "engine": {"max_loras": 4, "max_cpu_loras": 8},
}

POOLS = {"cold": {"count": 24, "ranks": [8, 32]}, "hot": {"count": 4}}
POOLS |= {f"x{times}": {"count": 8 * times} for times in (1, 2, 4)}


def scenario(only: tuple[str, ...] = (), **changed: Any) -> Scenario:
    """`only` keeps some of its phases; then it has no aims."""
    capacity = [
        {
            "name": f"capacity-{times}x",
            "loads": [
                {
                    "name": "zipf",
                    "pool": f"x{times}",
                    "popularity": {"kind": "power"},
                    "arrivals": {"kind": "gamma", "rate_per_s": 8, "cv": 2, "duration_s": 20},
                }
            ],
        }
        for times in (1, 2, 4)
    ]
    document = {
        "name": "made-up",
        "about": "Every kind of phase, short.",
        "rounds": 2,
        "pools": POOLS,
        "store": {"total_mib_per_s": 4},
        "memory_every_s": 10,
        "phases": [
            {"name": "hot", "put": {"hot": "engine"}, "loads": [_spaced("one", "hot", 40)]},
            {"name": "cold", "put": {"cold": "remote"}, "loads": [_spaced("one", "cold", 24)]},
            {"name": "disk", "put": {"cold": "disk"}, "loads": [_spaced("one", "cold", 24)]},
            {
                "name": "burst",
                "put": {"cold": "remote"},
                "loads": [{"name": "all", "pool": "cold", "arrivals": {"kind": "burst", "count": 64}}],
            },
            *capacity,
            {
                "name": "storm",
                "put": {"cold": "remote", "hot": "engine"},
                "loads": [_spaced("streams", "hot", 8), {**_spaced("cold", "cold", 24), "starts_s": 5}],
            },
            {
                "name": "move",
                "put": {"hot": "engine"},
                "loads": [{**_spaced("alias", "hot", 120), "alias": "production"}],
                "changes": [{"do": "promote", "pool": "hot", "at_s": 12}],
                "only": ["loramux"],
            },
            {"name": "soak", "put": {"hot": "engine"}, "loads": [_spaced("one", "hot", 60)], "only": ["loramux"]},
        ],
        "aims": [
            {
                "name": "hot adapter: TTFT over vLLM's own",
                "figure": "loramux/hot/one/ttft_ms/p50 - vllm/hot/one/ttft_ms/p50",
                "limit": 15,
            },
            {"name": "from the store: TTFT p95", "figure": "loramux/cold/one/ttft_ms/p95", "limit": 400},
            {
                "name": "64 at once: p95 over one alone",
                "figure": "loramux/burst/all/ttft_ms/p95 / loramux/cold/one/ttft_ms/p50",
                "limit": 1.3,
            },
            {"name": "requests that failed", "figure": "loramux/cold/one/failed", "limit": 0},
            {"name": "fetches of one adapter", "figure": "loramux/burst/*/fetches/max_per_adapter", "limit": 1},
        ],
    }
    if only:
        document |= {"phases": [phase for phase in document["phases"] if phase["name"] in only], "aims": []}
    return Scenario.model_validate({**document, **changed})


def _spaced(name: str, pool: str, count: int) -> dict[str, Any]:
    return {"name": name, "pool": pool, "arrivals": {"kind": "spaced", "count": count, "every_s": 0.25}}


@dataclass
class Run:
    scenario: Scenario
    records: list[Record]
    events: list[Event]
    samples: list[MemorySample]


def run(made: Scenario | None = None) -> Run:
    made = made or scenario()
    found = Run(made, [], [], [])
    for round_ in range(made.rounds):
        for peer in made.peers:
            for phase in made.phases:
                if peer in phase.only and peer in PEERS:
                    _phase(found, peer, round_, phase.name)
    return found


def _phase(found: Run, peer: str, round_: int, phase: str) -> None:
    chance = random.Random(f"{peer} {round_} {phase}")
    records = list(_records(chance, found.scenario, peer, round_, phase))
    found.records += records
    found.events.append(Event(peer, round_, phase, 0.0, "phase", details={"wall_ns": 10**18}))
    found.events += _events(chance, records, peer, round_, phase)
    if phase == "soak":
        found.samples += _samples(chance, peer, round_, phase)


def _records(chance: random.Random, made: Scenario, peer: str, round_: int, phase: str) -> Iterator[Record]:
    number, resident = 0, []
    for load in next(one for one in made.phases if one.name == phase).loads:
        count = getattr(load.arrivals, "count", 160)
        ranks = made.pools[load.pool].ranks
        for k in range(count):
            index = _index(chance, phase, made.pools[load.pool].count, k)
            at_s = load.starts_s + (0 if phase == "burst" else 0.25 * k)
            tier = _tier(made, phase, load.pool, index, resident)
            role = "none" if tier == "engine" else "leader" if phase != "burst" or k == 0 else "follower"
            rank = ranks[index % len(ranks)]
            yield _record(
                chance, peer, round_, phase, load.name, number, f"{load.pool}-{index}", load.pool, rank, at_s, tier, role
            )
            number += 1


def _index(chance: random.Random, phase: str, count: int, k: int) -> int:
    if phase == "burst":
        return 0
    return min(count - 1, int(count * chance.random() ** 2)) if phase.startswith("capacity") else k % count


def _tier(made: Scenario, phase: str, pool: str, index: int, resident: list[int]) -> str:
    if not phase.startswith("capacity"):
        put = next(one for one in made.phases if one.name == phase).put
        return put.get(pool, "engine")
    hit = index in resident
    if hit:
        resident.remove(index)
    resident.append(index)
    del resident[:-8]
    return "engine" if hit else "disk"


def _record(
    chance: random.Random,
    peer: str,
    round_: int,
    phase: str,
    load: str,
    number: int,
    adapter: str,
    pool: str,
    rank: int,
    at_s: float,
    tier: str,
    role: str,
) -> Record:
    stages = _stages(chance, tier, SIZES[rank])
    in_front = ADDED_MS[peer] * chance.uniform(0.3, 0.5)
    ttft = sum(stages.values()) + in_front + ADDED_MS[peer] * 0.5 + (chance.uniform(5, 25) if phase == "burst" else 0)
    tells = peer == "loramux"
    relay = ttft - in_front - stages["resolve"]
    put = {"hot": "engine", "disk": "disk", "cold": "remote", "burst": "remote"}.get(phase, "engine" if pool == "hot" else None)
    fails = peer.startswith("stock") and phase == "burst" and number > 0
    gaps = tuple(chance.gammavariate(20, 0.35) for _ in range(60 if load == "streams" else 15))
    return Record(
        peer=peer,
        round=round_,
        phase=phase,
        load=load,
        number=number,
        adapter=adapter,
        pool=pool,
        rank=rank,
        size_bytes=SIZES[rank],
        put=put if phase != "storm" or pool == "hot" else "remote",
        planned_s=at_s,
        sent_s=at_s + chance.expovariate(1 / 0.002),
        status=500 if fails else 200,
        error=f"LoRA adapter {adapter} has already been loaded" if fails else "",
        ttft_ms=None if fails else ttft,
        total_ms=None if fails else ttft + sum(gaps),
        gaps_ms=() if fails else gaps,
        tokens=0 if fails else len(gaps) + 1,
        text="" if fails else "a sentence",
        right=None if fails else True,
        answered_by=f"demo:{adapter}@1" if tells else "",
        tier=tier if tells else "",
        role=role if tells else "",
        stages_ms={"relay": relay} | stages if tells else {},
    )


def _stages(chance: random.Random, tier: str, size_bytes: int) -> dict[str, float]:
    noise = chance.uniform(0.9, 1.25)
    stages = {"resolve": 0.05 * noise, "engine": 16.0 * noise}
    if tier in ("remote", "disk"):
        stages |= {"stage": 6.0 * noise, "queue": 0.1 * noise, "load": 11.0 * noise}
        stages["fetch"] = 0.4 if tier == "disk" else size_bytes / (4 * MIB) * 1e3 * chance.uniform(1.0, 1.08)
    return stages


def _events(chance: random.Random, records: list[Record], peer: str, round_: int, phase: str) -> Iterator[Event]:
    fetched = [record for record in records if record.put == "remote" and (phase != "burst" or record.number == 0)]
    for record in fetched:
        took_s = record.size_bytes / (4 * MIB)
        yield Event(peer, round_, phase, record.sent_s, "fetch", record.adapter, took_s, {"bytes": record.size_bytes})
    if phase.startswith("capacity") and peer.startswith("stock"):
        yield Event(peer, round_, phase, 40.0, "loads", details={"count": 30 * int(phase[9:-1])})
    if phase == "move":
        yield Event(peer, round_, phase, 12.0, "promote", "hot-0", chance.uniform(0.8, 1.2))


def _samples(chance: random.Random, peer: str, round_: int, phase: str) -> Iterator[MemorySample]:
    for k in range(180):
        for part, mib in (("gateway", 210), ("replica", 640), ("engine core", 1130)):
            filled = min(k, 20) * 0.4 + chance.gauss(0, 0.5)
            yield MemorySample(peer, round_, phase, 10.0 * k, part, int((mib + filled) * MIB))
