"""Which slot goes and which file goes: production's rules beside others on the same traces. Prints Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from adapters.cache.policy import CacheEntry, choose_victims, used_again
from serve_app.simulation.contestants import CONTESTANTS, Lrfu, misses
from serve_app.simulation.traces import SHAPES, Trace, zipf
from serve_app.slots.places import HALF_LIFE_USES

SEED = 1
SIZES = ((4, 10), (4, 100), (16, 100), (16, 1000), (64, 100), (64, 1000))  # places, adapters
SHOWN = (4, 100), (64, 1000)
HALF_LIVES = (1, 2, 4, 8, 16, 32, 128, 512)


def slots_table(requests: int) -> Iterator[str]:
    """Misses of each rule, and how far each is from the optimum over all traces and sizes."""
    yield _row("trace", "places / adapters", *CONTESTANTS)
    yield _rule(2 + len(CONTESTANTS))
    over: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for shape, (places, adapters), trace in _runs(requests):
        shares = {name: misses(make(places, trace), trace) for name, make in CONTESTANTS.items()}
        for name, share in shares.items():
            over[name].append(share / shares["optimum"])
        if (places, adapters) in SHOWN:
            yield _row(shape, f"{places} / {adapters}", *(f"{100 * share:.1f} %" for share in shares.values()))
    yield _row("all", "mean, times the optimum", *(f"{_mean(values):.2f}" for values in over.values()))
    yield _row("all", "worst, times the optimum", *(f"{max(values):.2f}" for values in over.values()))


def half_lives_table(requests: int) -> Iterator[str]:
    """The same mean for other half-lives of our own rule."""
    yield _row("half-life, uses for each place", *(f"**{life}**" if life == HALF_LIFE_USES else life for life in HALF_LIVES))
    yield _rule(1 + len(HALF_LIVES))
    over: dict[int, list[float]] = {life: [] for life in HALF_LIVES}
    for _, (places, _), trace in _runs(requests):
        best = misses(CONTESTANTS["optimum"](places, trace), trace)
        for life in HALF_LIVES:
            over[life].append(misses(Lrfu(places, life), trace) / best)
    yield _row("misses, mean, times the optimum", *(f"{_mean(values):.2f}" for values in over.values()))
    yield _row("worst", *(f"{max(values):.2f}" for values in over.values()))


def disk_table(requests: int) -> Iterator[str]:
    """A disk for a tenth of all bytes; what is fetched again, by plain recency and by `choose_victims`."""
    yield _row("trace", "rule", "leases that fetch", "bytes fetched")
    yield _rule(4)
    sizes = _sizes()
    for exponent in (0.6, 0.9, 1.2):
        trace = zipf(len(sizes), requests, exponent, SEED)
        asked = sum(sizes[key] for key in trace)
        for name, choose in (("LRU", _oldest), ("ours", choose_victims)):
            fetches = list(_fetches(trace, sizes, choose))
            share = sum(sizes[key] for key in fetches) / asked
            yield _row(f"Zipf {exponent}", name, f"{100 * len(fetches) / requests:.1f} %", f"{100 * share:.1f} %")


def _fetches(trace: Trace, sizes: list[int], choose: Callable[[Iterable[CacheEntry], int], list[str]]) -> Iterator[int]:
    """The adapters that are fetched, one after the other. A lease begins every ten seconds."""
    budget_bytes = sum(sizes) // 10
    there: dict[int, CacheEntry] = {}
    for index, key in enumerate(trace):
        now = 10.0 * index
        entry = there.pop(key, None)
        if entry is None:
            yield key
            used_bytes = sum(one.size_bytes for one in there.values())
            for digest in choose(there.values(), used_bytes + sizes[key] - budget_bytes):
                del there[int(digest)]
            there[key] = CacheEntry(str(key), sizes[key], now)
        else:
            there[key] = CacheEntry(str(key), sizes[key], now, used_again(entry.uses, entry.last_used, now))


def _oldest(entries: Iterable[CacheEntry], need_bytes: int) -> list[str]:
    victims = []
    for entry in sorted(entries, key=lambda entry: entry.last_used):
        if need_bytes <= 0:
            break
        victims.append(entry.digest)
        need_bytes -= entry.size_bytes
    return victims


def _sizes() -> list[int]:
    """300 adapters, most of them 20 to 700 MB, a hundred in the middle."""
    return [int(size) for size in 100e6 * np.exp(0.9 * np.random.default_rng(SEED).standard_normal(300))]


def _runs(requests: int) -> Iterator[tuple[str, tuple[int, int], Trace]]:
    for shape, make in SHAPES.items():
        for places, adapters in SIZES:
            yield shape, (places, adapters), make(adapters, requests, SEED)


def _mean(values: list[float]) -> float:
    return statistics.geometric_mean(values)


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _rule(columns: int) -> str:
    return "|" + " --- |" * columns
