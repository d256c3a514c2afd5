"""The words of a comparison, of a check and of a run's end, as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loadtests.analysis import Comparison, Summary, Verdict
from loadtests.report.parts import Table
from loadtests.report.sections import LATE_NOTE, aims_table, requests_table
from loadtests.report.words import LATE, estimate, figure, given


def plain_table(table: Table) -> str:
    """As Markdown."""
    rule = [" --- " if n < table.texts else " ---: " for n in range(len(table.head))]
    lines = [_line(table.head), f"|{'|'.join(rule)}|", *map(_line, table.rows)]
    return "\n".join([*lines, *(["", table.note] if table.note else [])])


def table_text(table: Table) -> str:
    """As Markdown, with columns of equal width, so that it reads in a terminal too."""
    widths = [max(len(row[n]) for row in (table.head, *table.rows)) for n in range(len(table.head))]

    def padded(row: Sequence[str]) -> list[str]:
        sides = enumerate(zip(row, widths, strict=True))
        return [text.ljust(width) if n < table.texts else text.rjust(width) for n, (text, width) in sides]

    rule = ["-" * width if n < table.texts else "-" * (width - 1) + ":" for n, width in enumerate(widths)]
    lines = [_line(padded(table.head)), _line(rule), *(_line(padded(row)) for row in table.rows)]
    return "\n".join([*lines, *(["", table.note] if table.note else [])])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def verdict_table(summary: Summary) -> str:
    """How a run ends: requests and first tokens, aims, what is marked."""
    parts = [table_text(requests_table(summary))]
    if summary.aims:
        parts.append(table_text(aims_table(summary)))
    parts += ["Marked:\n" + "\n".join(f"- {mark.where}: {mark.what}" for mark in summary.marks)] if summary.marks else []
    return "\n\n".join(parts)


def compared(comparison: Comparison) -> str:
    """Ratios whose interval leaves 1 out stand first, then the others, counts that differ, stages that grew."""
    differ = [row for row in comparison.rows if row.verdict in ("more", "less")]
    others = [row for row in comparison.rows if row not in differ]
    rows = [
        (
            row.figure + (f" {LATE}" if row.late else ""),
            row.verdict or "no interval",
            estimate(row.a),
            estimate(row.b),
            estimate(row.ratio),
        )
        for row in (*differ, *others)
    ]
    note = LATE_NOTE if any(row.late for row in comparison.rows) else ""
    parts = [f"# {comparison.scenario}: b over a", *_listed("The runs differ in", comparison.warnings)]
    parts.append(table_text(Table(("figure", "b is", "a", "b", "b / a"), tuple(rows), texts=2, note=note)))
    counts = [(figure, given(a), given(b)) for figure, (a, b) in comparison.counts.items() if a != b]
    if counts:
        parts.append(table_text(Table(("count", "a", "b"), tuple(counts))))
    parts += _listed("Stages, in the mean", [one.sentence for one in comparison.grown])
    parts += _listed("Only one of the runs has", comparison.missing)
    return "\n\n".join(parts)


def checked(verdicts: Iterable[Verdict]) -> str:
    """Misses stand first."""
    ordered = sorted(verdicts, key=lambda one: one.met)
    rows = [
        (
            one.figure + (f" {LATE}" if one.late else ""),
            "holds" if one.met else "not measured" if one.value is None else "MISSED",
            figure(one.value),
            f"{one.bound} {figure(one.limit)}",
            figure(one.baseline),
        )
        for one in ordered
    ]
    note = LATE_NOTE if any(one.late for one in ordered) else ""
    return table_text(Table(("figure", "verdict", "value", "limit", "baseline"), tuple(rows), texts=2, note=note))


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    return [f"{title}:\n" + "\n".join(f"- {line}" for line in lines)] if lines else []
