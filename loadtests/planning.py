"""How many slots, replicas and how much disk: pure decisions over what the simulation expects of each choice.

Replicas are dearest (each is an accelerator), then slots (memory of the engine's host), then disk: the plan has the fewest
replicas that carry the traffic, with these the fewest slots that keep cold answers under the aim, and with both the smallest disk
that keeps answers from the store under theirs. More replicas are taken only where no number of slots will do.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

GIB, MIB = 2**30, 2**20
CHUNK = 3  # slots asked for at once, while none has done
MOST_REPLICAS_TRIED = 6
DISKS_TRIED = (0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75)  # of the adapters' bytes
SIZES_APART = 4  # times; beyond that measured times are no longer in proportion to bytes
MOST_BLOCKED = 0.05  # of loads; beyond that the simulation's waits are too long
DEFAULT_ROOM = 64  # of `bases[].room`


class BadWish(Exception):
    """What was asked for makes no sense; the text names the limit and the value."""


@dataclass(frozen=True)
class Times:
    """A fetch takes `fetch_s` and its bytes over the rate, a load likewise; hot TTFT where it is known. `measured_bytes`: the
    size of the adapters that they were measured with."""

    fetch_s: float = 0.0
    fetch_bytes_per_s: float = 500e6
    load_s: float = 0.0
    load_bytes_per_s: float = 700e6
    hot_p50_ms: float | None = None
    hot_p95_ms: float | None = None
    measured_bytes: float | None = None


@dataclass(frozen=True)
class Wish:
    """What is there and what is wanted. Sizes in bytes, one for each adapter; `weights` go over `alpha`. `cold_aim` and
    `store_aim` are shares of answers: those that don't find their adapter in the engine, and those that wait for the store."""

    sizes_bytes: tuple[int, ...]
    rate_per_s: float
    requests_per_replica_s: float
    alpha: float = 1.0
    weights: tuple[float, ...] | None = None
    answer_s: float = 2.0
    cold_aim: float = 0.05
    store_aim: float = 0.005
    max_slots: int = 256
    max_replicas: int | None = None
    memory_bytes: int | None = None
    replicas_per_node: int = 1
    room: int = DEFAULT_ROOM
    times: Times = Times()
    requests: int = 20_000
    seed: int = 1


@dataclass(frozen=True)
class Case:
    """What the simulation expects of one choice; `disk_bytes` None: every adapter fits on each node's disk."""

    slots: int
    replicas: int
    disk_bytes: int | None
    tiers: dict[str, float]
    cold_share: float
    loads_per_s: float
    fetches_per_s: float
    fetched_bytes_per_s: float
    blocked_share: float
    busiest_share: float
    wait_s: dict[str, float]
    cold_wait_s: dict[str, float] | None
    ttft_ms: dict[str, float] | None

    @classmethod
    def of(cls, answer: dict[str, Any]) -> Case:
        return cls(**{name: answer[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Step:
    """The plan with one thing changed. `cold_by` and `store_by`: shares of answers that come on top, or go."""

    what: str
    case: Case
    cold_by: float
    store_by: float
    memory_by_bytes: int
    disk_by_bytes: int


@dataclass(frozen=True)
class Plan:
    """`disk_bytes` is of each node, `memory_bytes` of each replica: `max_cpu_loras` adapters, the largest ones; what is staged
    comes beside it for moments, `staged_bytes` at most. `met`: both aims are."""

    slots: int
    replicas: int
    nodes: int
    disk_bytes: int
    memory_bytes: int
    staged_bytes: int
    met: bool
    expected: Case
    steps: tuple[Step, ...]
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        return {"schema_version": 1} | asdict(self)


Ask = Callable[[dict[str, Any]], list[Case]]
"""Puts a question to the simulation: `python -m serve_app.simulation plan --json` has its shape."""


def plan(wish: Wish, ask: Ask) -> Plan:
    """Raises BadWish."""
    check(wish)
    places = find_places(wish, ask)
    disks = ask(question(wish, [places.slots], [places.replicas], disks_to_try(wish, places.slots)))
    chosen = smallest_disk(wish, disks)
    return told(wish, chosen, neighbours(wish, chosen, disks, ask))


def check(wish: Wish) -> None:
    if not wish.sizes_bytes:
        raise BadWish("no adapters: there is nothing to plan for")
    for name, share in (("cold", wish.cold_aim), ("store", wish.store_aim)):
        if not 0 < share < 1:
            raise BadWish(f"the aim for {name} answers is {100 * share:g} %; it lies between 0 and 100 %")
    least = fewest_replicas(wish)
    if wish.max_replicas is not None and least > wish.max_replicas:
        raise BadWish(
            f"{wish.rate_per_s:g} requests a second at {wish.requests_per_replica_s:g} for each replica take {least} replicas;"
            f" the limit is {wish.max_replicas}"
        )
    if wish.memory_bytes is not None and memory_of(wish, 1) > wish.memory_bytes:
        raise BadWish(
            f"one slot takes {memory_of(wish, 1) / GIB:.2f} GiB for adapters, staged ones with it; the limit is"
            f" {wish.memory_bytes / GIB:.2f} GiB"
        )


# -- what to try -------------------------------------------------------------------------------------------------------


def fewest_replicas(wish: Wish) -> int:
    return math.ceil(wish.rate_per_s / wish.requests_per_replica_s)


def replicas_to_try(wish: Wish) -> list[int]:
    """From those that carry the traffic, in growing steps, to the limit: by default twice as many and two."""
    least = fewest_replicas(wish)
    most = 2 * least + 2 if wish.max_replicas is None else wish.max_replicas
    step = max(1, math.ceil((most - least) / (MOST_REPLICAS_TRIED - 1)))
    return sorted({*range(least, most + 1, step), most})


def most_slots(wish: Wish) -> int:
    """As many as the limit and memory allow; never more than there are adapters."""
    most = min(wish.max_slots, len(wish.sizes_bytes))
    if wish.memory_bytes is None:
        return most
    return max(slots for slots in range(1, most + 1) if memory_of(wish, slots) <= wish.memory_bytes)


def rungs(wish: Wish) -> list[int]:
    """Slots worth trying: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    most = most_slots(wish)
    doubling = [2**power for power in range(most.bit_length() + 1)]
    return sorted({slots for one in doubling for slots in (one, one + one // 2) if slots < most} | {most})


def promising(wish: Wish, replicas: int) -> list[int]:
    """Rungs that could do: were all places of all replicas given to the busiest adapters, they would."""
    held = list(itertools.accumulate(sorted(shares_of(wish), reverse=True)))
    return [slots for slots in rungs(wish) if 1 - held[min(slots * replicas, len(held)) - 1] <= wish.cold_aim]


def disks_to_try(wish: Wish, slots: int) -> list[int]:
    """Bytes for each node: parts of what all adapters take. Less than engines keep leased is no choice."""
    least, total = leased_bytes(wish, slots), sum(wish.sizes_bytes)
    return sorted({least, *(round(part * total) for part in DISKS_TRIED if part * total > least), total})


def question(wish: Wish, slots: Sequence[int], replicas: Sequence[int], disks: Sequence[int | None] = (None,)) -> dict[str, Any]:
    """For `python -m serve_app.simulation plan --json`."""
    times = asdict(wish.times)
    p50, p95, _ = (times.pop(name) for name in ("hot_p50_ms", "hot_p95_ms", "measured_bytes"))
    return times | {
        "sizes_bytes": wish.sizes_bytes,
        "slots": slots,
        "replicas": replicas,
        "disk_bytes": disks,
        "replicas_per_node": wish.replicas_per_node,
        "room": wish.room,
        "rate_per_s": wish.rate_per_s,
        "alpha": wish.alpha,
        "weights": wish.weights,
        "answer_s": wish.answer_s,
        "requests": wish.requests,
        "hot_ttft_ms": None if p50 is None else {"p50": p50, "p95": p95 or p50},
        "seed": wish.seed,
    }


# -- choosing ----------------------------------------------------------------------------------------------------------


def find_places(wish: Wish, ask: Ask) -> Case:
    """The fewest replicas, then slots, that meet the aim with disks for everything; else those with the fewest cold answers."""
    seen: list[Case] = []
    for replicas in replicas_to_try(wish):
        for chunk in _chunks(promising(wish, replicas)):
            seen += ask(question(wish, chunk, [replicas]))
            if (done := fewest_places(wish, seen)) is not None:
                return done
    if not seen:
        seen += ask(question(wish, [most_slots(wish)], [replicas_to_try(wish)[-1]]))
    return min(seen, key=lambda case: case.cold_share)


def fewest_places(wish: Wish, cases: Iterable[Case]) -> Case | None:
    fitting = (case for case in cases if case.cold_share <= wish.cold_aim)
    return min(fitting, key=lambda case: (case.replicas, case.slots), default=None)


def smallest_disk(wish: Wish, cases: Sequence[Case]) -> Case:
    """The smallest that meets both aims; else the one with the fewest answers that wait for the store."""
    enough = [case for case in cases if case.tiers["remote"] <= wish.store_aim]
    if not enough:
        return min(cases, key=lambda case: case.tiers["remote"])
    met = [case for case in enough if case.cold_share <= wish.cold_aim]
    return min(met or enough, key=lambda case: case.disk_bytes or 0)


def neighbours(wish: Wish, chosen: Case, disks: Sequence[Case], ask: Ask) -> list[tuple[str, Case]]:
    """The plan with one step less or more of each thing, where there is one."""
    steps = rungs(wish)
    at, found = steps.index(chosen.slots), []
    for what, slots, replicas in (
        ("fewer slots", steps[at - 1] if at else 0, chosen.replicas),
        ("more slots", steps[at + 1] if at + 1 < len(steps) else 0, chosen.replicas),
        ("a replica less", chosen.slots, chosen.replicas - 1),
        ("a replica more", chosen.slots, chosen.replicas + 1),
    ):
        if slots and replicas:
            disk_bytes = max(chosen.disk_bytes or 0, leased_bytes(wish, slots))
            found.append((what, ask(question(wish, [slots], [replicas], [disk_bytes]))[0]))
    by_size = sorted(disks, key=lambda case: case.disk_bytes or 0)
    at = by_size.index(chosen)
    found += [("less disk", case) for case in by_size[max(0, at - 1) : at]]
    return found + [("more disk", case) for case in by_size[at + 1 : at + 2]]


# -- telling -----------------------------------------------------------------------------------------------------------


def told(wish: Wish, chosen: Case, changed: Iterable[tuple[str, Case]]) -> Plan:
    disk_bytes = chosen.disk_bytes or sum(wish.sizes_bytes)
    memory = largest(wish, chosen.slots)
    steps = tuple(
        Step(
            what,
            case,
            cold_by=case.cold_share - chosen.cold_share,
            store_by=case.tiers["remote"] - chosen.tiers["remote"],
            memory_by_bytes=case.replicas * largest(wish, case.slots) - chosen.replicas * memory,
            disk_by_bytes=nodes_of(wish, case.replicas) * (case.disk_bytes or disk_bytes)
            - nodes_of(wish, chosen.replicas) * disk_bytes,
        )
        for what, case in changed
    )
    return Plan(
        slots=chosen.slots,
        replicas=chosen.replicas,
        nodes=nodes_of(wish, chosen.replicas),
        disk_bytes=disk_bytes,
        memory_bytes=memory,
        staged_bytes=memory_of(wish, chosen.slots) - memory,
        met=chosen.cold_share <= wish.cold_aim and chosen.tiers["remote"] <= wish.store_aim,
        expected=chosen,
        steps=steps,
        notes=tuple(notes(wish, chosen)),
        assumptions=tuple(assumptions(wish)),
    )


def notes(wish: Wish, chosen: Case) -> Iterable[str]:
    """What the plan's reader has to know beside its figures."""
    if chosen.cold_share > wish.cold_aim:
        yield (
            f"{100 * chosen.cold_share:.1f} % cold is the least within {most_slots(wish)} slots and {replicas_to_try(wish)[-1]}"
            f" replicas; the aim is {100 * wish.cold_aim:g} %"
        )
    if chosen.tiers["remote"] > wish.store_aim:
        yield f"{100 * chosen.tiers['remote']:.2f} % wait for the store at best; the aim is {100 * wish.store_aim:g} %"
    if chosen.blocked_share > MOST_BLOCKED:
        yield (
            f"{100 * chosen.blocked_share:.0f} % of loads find every place in use by running answers;"
            " waits are shorter than that in truth, since places close to new answers"
        )
    yield from _sizes_apart(wish)
    busiest_per_s = chosen.busiest_share * wish.rate_per_s
    room = max(1, math.floor(wish.requests_per_replica_s * wish.answer_s))
    if busiest_per_s > wish.requests_per_replica_s and room < wish.room:
        yield (
            f"the busiest replica gets {busiest_per_s:.1f} requests a second, over {wish.requests_per_replica_s:g}: adapters get"
            f" another replica only from `room` ({wish.room}) requests at once on; `bases[].room: {room}` spreads them earlier"
            f" (plan again with --room {room})"
        )


def _sizes_apart(wish: Wish) -> Iterable[str]:
    """A small adapter's time is hardly its bytes, so nothing follows from it for a large one."""
    measured, planned = wish.times.measured_bytes, statistics.median(wish.sizes_bytes)
    if measured and not 1 / SIZES_APART <= planned / measured <= SIZES_APART:
        yield (
            f"times were measured with adapters of {measured / MIB:.1f} MiB and stretched to {planned / MIB:.1f} MiB"
            " (the median): waits and TTFT say little; measure with adapters of that size"
        )


def assumptions(wish: Wish) -> Iterable[str]:
    if wish.weights is None:
        yield f"the k-th busiest adapter gets 1 / k^{wish.alpha:g} of the traffic, and which it is does not depend on its size"
    else:
        yield "each adapter keeps the share of traffic that it was given"
    yield f"requests come at random, {wish.rate_per_s:g} a second, for a long time already"
    yield "nothing is published and no replica restarts meanwhile"
    yield f"a replica carries {wish.requests_per_replica_s:g} requests a second, whichever adapters they ask for"
    yield f"answers take {wish.answer_s:g} s on average, on a busy replica too"
    times = wish.times
    yield f"a fetch takes {_time(times.fetch_s, times.fetch_bytes_per_s)}, however many run at once"
    yield f"a load takes {_time(times.load_s, times.load_bytes_per_s)}, however many run at once"
    yield "a slot is one of `max_cpu_loras`; which of them have a place on the accelerator (`max_loras`) is the engine's affair"
    yield "an adapter takes as much host memory as its file"
    if times.hot_p50_ms is not None:
        yield "TTFT is the wait for the adapter and a hot TTFT, lognormal through its p50 and p95"


def _time(seconds: float, bytes_per_s: float) -> str:
    parts = [f"{1e3 * seconds:.0f} ms"] if seconds else []
    return " and ".join([*parts, f"its bytes at {bytes_per_s / 1e6:.0f} MB/s"])


# -- sums --------------------------------------------------------------------------------------------------------------


def shares_of(wish: Wish) -> list[float]:
    weights = wish.weights or [rank**-wish.alpha for rank in range(1, len(wish.sizes_bytes) + 1)]
    total = sum(weights)
    return [weight / total for weight in weights]


def largest(wish: Wish, count: int) -> int:
    """Bytes of the `count` largest adapters."""
    return sum(sorted(wish.sizes_bytes, reverse=True)[:count])


def memory_of(wish: Wish, slots: int) -> int:
    """The largest adapters in all slots, and staged beside them as many as the product stages at once: half, but two."""
    return largest(wish, slots) + largest(wish, max(2, slots // 2))


def leased_bytes(wish: Wish, slots: int) -> int:
    """What engines of a node keep on its disk at most, with one adapter that comes for each."""
    return largest(wish, (slots + 1) * wish.replicas_per_node)


def nodes_of(wish: Wish, replicas: int) -> int:
    return math.ceil(replicas / wish.replicas_per_node)


def _chunks(slots: Sequence[int]) -> Iterable[Sequence[int]]:
    return (slots[at : at + CHUNK] for at in range(0, len(slots), CHUNK))
