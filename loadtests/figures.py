"""Figures beside their aims: the table that a load test prints and the `summary.json` that it leaves."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Figure:
    """A value beside what was promised; `limit` is None where nothing was. `bound` says on which side of the limit it must be."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    bound: Literal["<=", ">="] = "<="

    @property
    def shown(self) -> str:
        return f"{self.value:.2f}".removesuffix(".00") + f" {self.unit}".rstrip()

    @property
    def aim(self) -> str:
        return "-" if self.limit is None else f"{self.bound} {self.limit:g} {self.unit}".rstrip()

    @property
    def verdict(self) -> str:
        if self.limit is None:
            return "-"
        met = self.value <= self.limit if self.bound == "<=" else self.value >= self.limit
        return "met" if met else "missed"


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of the values don't exceed; 0.0 where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def median(values: Iterable[float]) -> float:
    """0.0 where there are none."""
    ordered = list(values)
    return statistics.median(ordered) if ordered else 0.0


def new_results(name: str) -> Path:
    """The folder of a run that was not told where to write."""
    return RESULTS / time.strftime(f"{name}-%Y-%m-%d-%H%M")


def write(out: Path, about: dict[str, Any], figures: Sequence[Figure], **more: Any) -> None:
    """Prints the table and leaves `summary.json`; `more` goes into it as it is."""
    rows = [
        {"name": f.name, "value": round(f.value, 3), "unit": f.unit, "aim": f.limit, "bound": f.bound, "verdict": f.verdict}
        for f in figures
    ]
    save(out, about, figures=rows, **more)
    print("| what | value | aim | |\n| --- | --- | --- | --- |")
    for figure in figures:
        print(f"| {figure.name} | {figure.shown} | {figure.aim} | {figure.verdict} |")
    print(f"\nwritten: {out / 'summary.json'}")


def save(out: Path, about: dict[str, Any], **parts: Any) -> None:
    """Leaves `summary.json`: what was run, where and when, and its parts."""
    out.mkdir(parents=True, exist_ok=True)
    context = {"cores": os.cpu_count(), **about, "when": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    (out / "summary.json").write_text(json.dumps({"schema_version": 1, "about": context, **parts}, indent=1) + "\n")
