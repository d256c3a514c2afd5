"""Writes a run's summary, plots and reports into its folder."""

from __future__ import annotations

import html as markup
import json
import re
import shutil
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from loadtests.analysis import Summary, summarize, write_summary
from loadtests.analysis.summary import FILE
from loadtests.records import EVENTS, MEMORY, REQUESTS, Event, MemorySample, Record, read
from loadtests.report.parts import Report
from loadtests.report.sections import report
from loadtests.report.tables import plain_table
from loadtests.scenario import Scenario

SCENARIO, ENVIRONMENT = "scenario.json", "environment.json"
TEMPLATES = Path(__file__).parent / "templates"


def write(folder: Path) -> Summary:
    """From the records in the folder: summary.json, plots/*.svg, report.md, report.html; what was there of these is replaced.

    Raises OSError, BadRun for records that can't be one run's, UnknownFigure for an aim that names no figure.
    """
    from loadtests.report import plots

    records = list(read(folder / REQUESTS, Record))
    events = list(read(folder / EVENTS, Event))
    samples = list(read(folder / MEMORY, MemorySample))
    scenario = Scenario.model_validate_json((folder / SCENARIO).read_text())
    environment = json.loads((folder / ENVIRONMENT).read_text())
    summary = summarize(scenario, environment, records, events, samples)
    write_summary(folder / FILE, summary)
    drawn = plots.draw(summary, records, events, samples)
    shutil.rmtree(folder / "plots", ignore_errors=True)
    (folder / "plots").mkdir()
    for plot in drawn.values():
        (folder / plot.file).write_text(plot.svg)
    found = report(summary, drawn)
    (folder / "report.md").write_text(markdown(found))
    (folder / "report.html").write_text(html(found))
    return summary


def markdown(found: Report) -> str:
    text = _environment(autoescape=False).get_template("report.md.j2").render(report=found)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def html(found: Report) -> str:
    return _environment(autoescape=True).get_template("report.html.j2").render(report=found).strip() + "\n"


def _environment(autoescape: bool) -> Environment:
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=autoescape, undefined=StrictUndefined, trim_blocks=True
    )
    templates.filters |= {"rows": plain_table, "coded": _coded}
    return templates


def _coded(text: str) -> str:
    """As HTML; what stands between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", markup.escape(text))
