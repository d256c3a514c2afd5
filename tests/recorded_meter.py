"""A meter for tests: keeps every number, and refuses what the table of metrics does not know."""

from __future__ import annotations

from collections import Counter, defaultdict

from adapters.metrics import METRICS, Kind, Metric

Series = tuple[str, frozenset[tuple[str, str]]]


class RecordedMeter:
    """Fulfils `adapters.metrics.Meter`; raises AssertionError for an unknown metric, a wrong kind or wrong labels."""

    def __init__(self) -> None:
        self._counts: Counter[Series] = Counter()
        self._gauges: dict[Series, float] = {}
        self._values: defaultdict[Series, list[float]] = defaultdict(list)

    def count(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        self._counts[_series(metric, "counter", labels)] += amount

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        self._gauges[_series(metric, "gauge", labels)] = value

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        self._values[_series(metric, "histogram", labels)].append(value)

    def counted(self, metric: Metric, **labels: str) -> float:
        """The sum of all series of a counter that carry these labels."""
        return sum(amount for series, amount in self._counts.items() if _fits(series, metric, labels))

    def gauge(self, metric: Metric, **labels: str) -> float | None:
        """The gauge's last value, or None if it was never set."""
        return self._gauges.get((metric.name, frozenset(labels.items())))

    def observed(self, metric: Metric, **labels: str) -> list[float]:
        return [value for series, values in self._values.items() if _fits(series, metric, labels) for value in values]


def _series(metric: Metric, kind: Kind, labels: dict[str, str]) -> Series:
    assert metric in METRICS and metric.kind == kind, metric.name
    assert set(labels) == set(metric.labels), f"{metric.name} has the labels {metric.labels}"
    return metric.name, frozenset(labels.items())


def _fits(series: Series, metric: Metric, labels: dict[str, str]) -> bool:
    return series[0] == metric.name and set(labels.items()) <= series[1]
