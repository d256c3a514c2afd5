"""What LoraMux measures: one table of names, and the meter that the parts are handed.

The parts know only `Meter`. `NullMeter` is for those who don't measure; `serve_app.ray_meter` hands the numbers to Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["counter", "gauge", "histogram"]

CALL_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: its name, what it counts, and the names of its labels. `buckets` are a histogram's upper bounds."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


STORE_CALLS = Metric(
    "loramux_store_calls_total",
    "counter",
    "Store calls that ended, by result (`ok`, the error's reason, or `given_up` by the caller); a call's retries are part of it.",
    ("method", "result"),
)
STORE_CALL_SECONDS = Metric(
    "loramux_store_call_seconds", "histogram", "How long store calls took, their retries included.", ("method",), CALL_SECONDS
)
STORE_RETRIES = Metric(
    "loramux_store_retries_total", "counter", "Store calls that were tried again, by the trouble before.", ("method", "reason")
)
STORE_RETRIES_REFUSED = Metric(
    "loramux_store_retries_refused_total",
    "counter",
    "Store calls that were not tried again because this process had retried too much already.",
    ("method", "reason"),
)
REGISTRY_AGE = Metric(
    "loramux_registry_age_seconds", "gauge", "Seconds since this process' picture of the registry was known to be current."
)
REGISTRY_GENERATION = Metric(
    "loramux_registry_generation", "gauge", "How often this process' picture of the registry has changed; 0 until it is there."
)
REGISTRY_ADAPTERS = Metric("loramux_registry_adapters", "gauge", "Adapters in this process' picture of the registry.")
CACHE_BAD_READS = Metric(
    "loramux_cache_bad_reads_total",
    "counter",
    "Reads of adapter files that came too short (`short_file`) or with another digest than the manifest's (`digest_mismatch`).",
    ("reason",),
)
REGISTRY_REFRESH_ERRORS = Metric(
    "loramux_registry_refresh_errors_total", "counter", "Looks at the registry that failed, by the reason.", ("reason",)
)

LOADS = Metric(
    "loramux_loads_total",
    "counter",
    "Loads of adapters into the engine that ended, by where the adapter was and by result (`ok` or the error's code).",
    ("tier", "result"),
)
LOAD_SECONDS = Metric(
    "loramux_load_seconds",
    "histogram",
    "How long each stage of a load took: `fetch`, `stage`, `queue` (waiting for a place), `load`.",
    ("stage",),
    CALL_SECONDS,
)
SLOT_EVICTIONS = Metric(
    "loramux_slot_evictions_total", "counter", "Adapters that left the engine, to make room or because someone asked."
)
RELOADS = Metric(
    "loramux_slot_reloads_total",
    "counter",
    "Loads that brought back what had left the engine less than a minute before: thrash, the places are too few.",
)

RESIDENT = Metric(
    "loramux_resident_adapters",
    "gauge",
    "Adapters in the engine of this replica (`engine`), and on the disk of its node, which other replicas share (`disk`).",
    ("tier",),
)
SLOTS = Metric("loramux_slots", "gauge", "Adapters that the engine of this replica takes.")
SLOTS_HELD = Metric("loramux_slots_held", "gauge", "Slots that directives and promotions keep from eviction.")
WISHES_FAILING = Metric(
    "loramux_wishes_failing", "gauge", "Directives and promotions that this replica can't fulfil; `loramux ps` says why."
)
CACHE_BYTES = Metric(
    "loramux_cache_bytes", "gauge", "Bytes in the node cache that count against its budget; all replicas of a node say the same."
)
CACHE_EVICTIONS = Metric("loramux_cache_evictions_total", "counter", "Adapters that this process took off the disk to make room.")

WEBHOOK_DELIVERIES = Metric(
    "loramux_webhook_deliveries_total", "counter", "Moves that the webhook was told of or not, by what came of it.", ("result",)
)

METRICS: tuple[Metric, ...] = (
    STORE_CALLS,
    STORE_CALL_SECONDS,
    STORE_RETRIES,
    STORE_RETRIES_REFUSED,
    REGISTRY_AGE,
    REGISTRY_GENERATION,
    REGISTRY_ADAPTERS,
    REGISTRY_REFRESH_ERRORS,
    CACHE_BAD_READS,
    LOADS,
    LOAD_SECONDS,
    SLOT_EVICTIONS,
    RELOADS,
    RESIDENT,
    SLOTS,
    SLOTS_HELD,
    WISHES_FAILING,
    CACHE_BYTES,
    CACHE_EVICTIONS,
    WEBHOOK_DELIVERIES,
)


class Meter(Protocol):
    """Takes numbers, from any thread; labels are given by name, all of a metric's. Never raises, never waits."""

    def count(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Adds to a counter."""
        ...

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Sets a gauge."""
        ...

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Adds one value to a histogram."""
        ...


class NullMeter:
    """Measures nothing."""

    def count(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        pass

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        pass

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        pass


NULL_METER = NullMeter()
