"""What a report is made of, whatever it is written in: sections of sentences, tables and plots."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """`texts` are the columns that read as text; the others are figures. `note` stands below."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: int = 1
    note: str = ""

    @property
    def is_grouped(self) -> bool:
        """Whether first cells are left empty where they repeat."""
        return any(not row[0] for row in self.rows)

    def filled(self) -> Table:
        """Without the columns in which nothing stands."""
        kept = [n for n in range(len(self.head)) if n < self.texts or any(row[n] != "–" for row in self.rows)]
        return Table(
            tuple(self.head[n] for n in kept), tuple(tuple(row[n] for n in kept) for row in self.rows), self.texts, self.note
        )


@dataclass(frozen=True)
class Plot:
    """A file of the folder `plots`, and its SVG."""

    name: str
    caption: str
    svg: str

    @property
    def file(self) -> str:
        return f"plots/{self.name}.svg"


@dataclass(frozen=True)
class Section:
    title: str
    said: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.said or self.tables or self.plots)


@dataclass(frozen=True)
class Report:
    title: str
    about: str
    verdict: str
    sections: tuple[Section, ...]
