"""What a reader gets: a report in two forms, plots, the words of comparisons and checks."""

from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from loadtests import report
from loadtests.analysis import baseline_of, check, compare
from loadtests.analysis.summary import load_summary
from loadtests.records import append
from loadtests.report.words import estimate, figure, given, number, share, size
from loadtests.scenario import Scenario
from tests.unit.loadtests import synthetic

VOID = {"meta", "link", "br", "hr", "img", "input"}


def folder_of(made: Scenario, folder: Path, change=lambda record: record) -> Path:
    """A run's folder as the runner leaves it, before anything was made of it."""
    run = synthetic.run(made)
    append(folder / "requests.jsonl", map(change, run.records))
    append(folder / "events.jsonl", run.events)
    append(folder / "memory.jsonl", run.samples)
    (folder / "scenario.json").write_text(made.model_dump_json())
    (folder / "environment.json").write_text(json.dumps(synthetic.ENVIRONMENT))
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = folder_of(synthetic.scenario(rounds=1), tmp_path_factory.mktemp("run"))
    report.write(folder)
    return folder


class Nesting(HTMLParser):
    """Whether what was opened is closed, in order; and every id."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        self.scripts += tag == "script"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"


def nesting(page: str) -> Nesting:
    found = Nesting()
    found.feed(page)
    found.close()
    return found


def test_both_forms_begin_with_the_aims_and_what_is_marked(written: Path):
    summary = load_summary(written)
    for form in ("report.md", "report.html"):
        text = (written / form).read_text()
        for aim in summary.aims:
            assert aim.aim.name in unescape(text), form
        assert text.index("What came out") < text.index("What is marked") < text.index("Requests")
        assert "LoRA adapter cold-0 has already been loaded" in text


def test_every_plot_that_the_report_names_is_there_and_is_xml(written: Path):
    named = re.findall(r"\]\((plots/[\w-]+\.svg)\)", (written / "report.md").read_text())
    assert {Path(name).stem.split("-")[0] for name in named} == {"peers", "tiers", "stages", "timeline", "hits", "memory"}
    for name in named:
        ElementTree.parse(written / name)
    assert {str(path.relative_to(written)) for path in (written / "plots").iterdir()} == set(named)


def test_the_page_is_well_formed_and_stands_alone(written: Path):
    page = (written / "report.html").read_text()
    found = nesting(page)
    assert not found.open and not found.scripts
    assert len(found.ids) == len(set(found.ids)), "inline plots share ids"
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"', page), "nothing is fetched"


def test_no_report_holds_a_path_of_this_machine(written: Path):
    for form in ("report.md", "report.html", "summary.json"):
        assert str(written) not in (written / form).read_text()
        assert not re.search(r"(?<![\w.~<-])/(?:root|home|tmp|work|Users)/", (written / form).read_text()), form


def test_tables_of_the_markdown_have_as_many_cells_in_each_row(written: Path):
    for table in re.findall(r"(?:^\|.*\|\n)+", (written / "report.md").read_text(), re.M):
        lines = table.strip().split("\n")
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1, lines[0]
        assert re.fullmatch(r"\|( ---:? \|)+", lines[1])


def test_a_report_written_again_is_the_same(written: Path, tmp_path: Path):
    again = folder_of(synthetic.scenario(rounds=1), tmp_path)
    (again / "plots").mkdir()
    (again / "plots" / "old.svg").touch()
    report.write(again)
    for one in ("summary.json", "report.md", "report.html", "plots/stages.svg"):
        assert (again / one).read_text() == (written / one).read_text(), one
    assert not (again / "plots" / "old.svg").exists()


def test_a_run_with_one_peer_and_one_phase_has_only_the_plots_that_have_data(tmp_path: Path):
    folder = folder_of(synthetic.scenario(only=("hot",), rounds=1, peers=["vllm"]), tmp_path)
    report.write(folder)
    assert [path.stem for path in (folder / "plots").iterdir()] == ["tiers"]
    text = (folder / "report.md").read_text()
    assert "Peers side by side" not in text and "Where the time goes" not in text
    assert "Nothing: every request left on time" in text


def test_a_run_that_ended_before_any_request_has_a_report(tmp_path: Path):
    folder_of(synthetic.scenario(rounds=1), tmp_path)
    (tmp_path / "requests.jsonl").unlink()
    report.write(tmp_path)
    assert "5 not measured" in (tmp_path / "report.md").read_text()


def test_a_run_in_which_nothing_answered_has_a_report(tmp_path: Path):
    def failing(record):
        return type(record)(
            **{**as_fields(record), "status": 503, "ttft_ms": None, "total_ms": None, "gaps_ms": (), "stages_ms": {}}
        )

    def as_fields(record):
        return {name: getattr(record, name) for name in record.__slots__}

    report.write(folder_of(synthetic.scenario(only=("cold", "storm"), rounds=1), tmp_path, failing))
    assert "24 of 24 requests failed" in (tmp_path / "report.md").read_text()


def test_a_load_that_did_not_keep_its_schedule_is_marked_wherever_its_figures_stand(tmp_path: Path):
    def late(record):
        changed = {"sent_s": record.sent_s + 0.3} if record.phase == "cold" and record.peer == "loramux" else {}
        return type(record)(**{name: getattr(record, name) for name in record.__slots__} | changed)

    aims = [{"name": "from the store", "figure": "loramux/cold/one/ttft_ms/p95", "limit": 1}]
    report.write(folder_of(synthetic.scenario(only=("hot", "cold"), rounds=1, aims=aims), tmp_path, late))
    text = (tmp_path / "report.md").read_text()
    assert "loramux/cold/one | did not keep its schedule" in text
    assert "from the store †" in text
    marked = [line for line in text.split("\n") if "loramux †" in line]
    assert len(marked) >= 4, "requests, more of them, stages, schedule"


def test_comparisons_tell_what_differs_and_which_stage_grew(written: Path):
    summary = load_summary(written)
    text = report.compared(compare(summary, summary))
    assert text.startswith("# made-up: b over a")
    assert "no stage differs by more than its noise" in text


def test_checks_tell_misses_first_with_value_and_limit(written: Path):
    summary = load_summary(written)
    baseline = baseline_of(summary)
    figure_ = "loramux/hot/one/ttft_ms/p50 / vllm/hot/one/ttft_ms/p50"
    strict = baseline.figures[figure_].model_copy(update={"value": 0.5})
    verdicts = check(baseline.model_copy(update={"figures": {**baseline.figures, figure_: strict}}), summary)
    first = report.checked(verdicts).split("\n")[2]
    assert figure_ in first and "MISSED" in first and "<= 0.75" in first


def test_a_run_ends_with_its_requests_aims_and_marks(written: Path):
    text = report.verdict_table(load_summary(written))
    assert "stock-tuned" in text and "hot adapter: TTFT over vLLM's own" in text and "Marked:" in text


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (number(0.0), "0"),
        (number(0.0512), "0.051"),
        (number(9.876), "9.88"),
        (number(98.76), "98.8"),
        (number(12345.6), "12 346"),
        (number(None), "–"),
        (given(0.25), "0.25"),
        (figure(1.0), "1"),
        (share(0.0004), "0.04 %"),
        (share(1), "100 %"),
        (size(131_072), "131 kB"),
        (estimate(None), "–"),
    ],
)
def test_figures_have_the_digits_that_count(shown: str, text: str):
    assert shown == text
