"""What a run's records come to: a summary, figures by key, aims; two runs beside each other; a run beside a baseline."""

from loadtests.analysis.account import STAGES
from loadtests.analysis.comparing import Comparison, Incomparable, compare
from loadtests.analysis.figures import UnknownFigure, check_aims, evaluated, figures
from loadtests.analysis.gate import BadBaseline, Baseline, Verdict, baseline_of, check, load_baseline, write_baseline
from loadtests.analysis.requests import BadRun
from loadtests.analysis.summarizing import summarize
from loadtests.analysis.summary import Summary, load_summary, write_summary

__all__ = [
    "STAGES",
    "BadBaseline",
    "BadRun",
    "Baseline",
    "Comparison",
    "Incomparable",
    "Summary",
    "UnknownFigure",
    "Verdict",
    "baseline_of",
    "check",
    "check_aims",
    "compare",
    "evaluated",
    "figures",
    "load_baseline",
    "load_summary",
    "summarize",
    "write_baseline",
    "write_summary",
]
