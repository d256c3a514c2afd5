"""Figures beside their aims."""

from __future__ import annotations

import json
from pathlib import Path

from loadtests.figures import Figure, median, percentile, write


def test_a_figure_is_met_on_its_side_of_the_limit():
    assert Figure("p99", 3, "ms", 3).verdict == "met"
    assert Figure("p99", 4, "ms", 3).verdict == "missed"
    assert Figure("answers", 64, "", 64, ">=").verdict == "met"
    assert Figure("answers", 63, "", 64, ">=").verdict == "missed"
    assert Figure("p50", 4, "ms").verdict == "-"


def test_percentiles_of_nothing_are_zero():
    assert (median([]), percentile([], 0.99)) == (0.0, 0.0)


def test_the_99th_percentile_of_300_leaves_out_at_most_three():
    assert percentile(range(300), 0.99) == 297


def test_a_summary_holds_the_figures_their_aims_and_what_else_was_measured(tmp_path: Path, capsys):
    write(tmp_path / "run", {"slots": 4}, [Figure("loads", 2, "", 1)], cases=[{"server": "loramux"}])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["about"]["slots"] == 4
    assert summary["figures"] == [{"name": "loads", "value": 2, "unit": "", "aim": 1, "bound": "<=", "verdict": "missed"}]
    assert summary["cases"] == [{"server": "loramux"}]
    assert "| loads | 2 | <= 1 | missed |" in capsys.readouterr().out
