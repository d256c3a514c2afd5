"""The table of metrics in the papers is the table in the code."""

from __future__ import annotations

import re

import pytest

from adapters.metrics import METRICS, Metric
from tests.repo.checkout import ROOT, tracked_files

PAPER = "gateway/README.md"
NAMED = re.compile(r"`(loramux_\w+_(?:total|seconds|bytes|generation|adapters|bucket|sum|count))\b")
ENDINGS = ("", "_bucket", "_sum", "_count")


def row(metric: Metric) -> str:
    """The row of a metric in the paper."""
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_metric_stands_in_the_paper(metric: Metric) -> None:
    assert row(metric) in (ROOT / PAPER).read_text().splitlines(), f"{PAPER} lacks this row:\n{row(metric)}"


def test_every_metric_that_a_paper_names_exists() -> None:
    known = {metric.name + ending for metric in METRICS for ending in ENDINGS}
    for paper in (path for path in tracked_files() if path.suffix == ".md"):
        named = set(NAMED.findall(paper.read_text()))
        assert named <= known, f"{paper.name} names {sorted(named - known)}"


def test_no_name_stands_twice() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
