"""Made-up traces: which adapter each request asks for, as numbers from 0. The same seed makes the same trace."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Trace = list[int]


def zipf(adapters: int, requests: int, exponent: float, seed: int) -> Trace:
    """The k-th busiest adapter gets a share of 1 / k ** exponent; exponent 0 is uniform."""
    rng = np.random.default_rng(seed)
    return drawn(rng, shares(adapters, exponent), requests, rng.permutation(adapters))


def scan_over_zipf(adapters: int, requests: int, seed: int) -> Trace:
    """Zipf 1.0, and five times someone asks for every adapter once, in order, with one request of others in between."""
    base = zipf(adapters, requests, 1.0, seed)
    starts = {(round_ + 1) * requests // 6: None for round_ in range(5)}
    trace: Trace = []
    scanning = adapters
    for index, key in enumerate(base):
        scanning = 0 if index in starts else scanning
        trace.append(key)
        if scanning < adapters:
            trace.append(scanning)
            scanning += 1
    return trace[:requests]


def shifting(adapters: int, requests: int, seed: int) -> Trace:
    """Zipf 1.0 whose order of popularity is another one ten times in the trace."""
    return [key for part in range(10) for key in zipf(adapters, requests // 10, 1.0, seed * 100 + part)]


def bursty(adapters: int, requests: int, seed: int) -> Trace:
    """Half of the requests are Zipf 0.8, the others bursts of 20 on one adapter each, drawn evenly, ten bursts at once."""
    rng = np.random.default_rng(seed)
    calm = iter(zipf(adapters, requests, 0.8, seed))
    bursts = [[int(rng.integers(adapters)), 20] for _ in range(10)]
    trace: Trace = []
    for is_calm, which in zip(rng.random(requests) < 0.5, rng.integers(10, size=requests), strict=True):
        if is_calm:
            trace.append(next(calm))
            continue
        burst = bursts[which]
        trace.append(burst[0])
        burst[1] -= 1
        if not burst[1]:
            bursts[which] = [int(rng.integers(adapters)), 20]
    return trace


def loop(adapters: int, requests: int, seed: int) -> Trace:
    """All in turn, again and again: what LRU is worst at."""
    return [index % adapters for index in range(requests)]


SHAPES: dict[str, Callable[[int, int, int], Trace]] = {
    "uniform": lambda adapters, requests, seed: zipf(adapters, requests, 0.0, seed),
    "Zipf 0.6": lambda adapters, requests, seed: zipf(adapters, requests, 0.6, seed),
    "Zipf 0.9": lambda adapters, requests, seed: zipf(adapters, requests, 0.9, seed),
    "Zipf 1.2": lambda adapters, requests, seed: zipf(adapters, requests, 1.2, seed),
    "scans over Zipf": scan_over_zipf,
    "shifting": shifting,
    "bursty": bursty,
    "loop": loop,
}


def shares(adapters: int, exponent: float) -> np.ndarray:
    """Of the requests, the busiest adapter's first; 1.0 in all."""
    weights = 1.0 / np.arange(1, adapters + 1) ** exponent
    return weights / weights.sum()


def drawn(rng: np.random.Generator, shares: np.ndarray, requests: int, names: np.ndarray) -> Trace:
    """Each request's adapter: one of `names`, by its share."""
    return names[rng.choice(len(shares), size=requests, p=shares)].tolist()
