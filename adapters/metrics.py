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
