"""A meter over Ray's metrics: each process hands its numbers to the agent of its node, which shows them to Prometheus."""

from __future__ import annotations

from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from adapters.metrics import METRICS, Metric


class RayMeter:
    """Fulfils `adapters.metrics.Meter`. Make it inside a process of Ray; numbers reach the agent within ten seconds."""

    def __init__(self, metrics: tuple[Metric, ...] = METRICS) -> None:
        self._made = {metric.name: _made(metric) for metric in metrics}

    def count(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        if amount > 0:  # Ray raises for nothing
            self._made[metric.name].inc(amount, tags=labels)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        self._made[metric.name].set(value, tags=labels)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        self._made[metric.name].observe(value, tags=labels)


def _made(metric: Metric) -> Any:
    if metric.kind == "histogram":
        return Histogram(metric.name, description=metric.help, boundaries=list(metric.buckets), tag_keys=metric.labels)
    kind = Counter if metric.kind == "counter" else Gauge
    return kind(metric.name, description=metric.help, tag_keys=metric.labels)
