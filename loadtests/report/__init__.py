"""What a reader gets of a run: report.md, report.html and plots, and the words of a comparison and of a check."""

from loadtests.report.tables import checked, compared, verdict_table
from loadtests.report.writing import write

__all__ = ["checked", "compared", "verdict_table", "write"]
