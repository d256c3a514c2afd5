"""`loramux inspect FOLDER`: what publishing would do, for people or as JSON. Writes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters.contract import Inspection, PublishOptions, inspect
from adapters.errors import AdapterRefused, InvalidRequest, StoreError
from adapters.registry.codec import decode_contract
from adapters.types import BaseContract

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def inspect_folder(
    folder: Path,
    base_contract: Path | None = None,
    as_json: bool = False,
    *,
    base: str | None = None,
    options: PublishOptions | None = None,
    console: Console | None = None,
) -> bool:
    """Prints what publishing `folder`, or the archive that it is, would do against the contract in the file `base_contract`.

    `base` is the base's id as served, by default the contract's; it is part of the digest. Returns whether the folder can be
    published. Raises InvalidRequest if a file is missing or is no base contract.
    """
    seen = inspect(folder, load_contract(base_contract) if base_contract else None, options, base=base)
    if as_json:
        print(json.dumps(as_data(seen), indent=2))
    else:
        from rich.console import Console

        out = console or Console()
        for part in render(seen, folder.name):
            out.print(part)
    return seen.is_publishable


def load_contract(path: Path) -> BaseContract:
    """A base's contract as a replica wrote it. Raises InvalidRequest if the file can't be read as one."""
    try:
        return decode_contract(path.read_bytes())
    except OSError:
        raise InvalidRequest("the base contract can't be read", param="base") from None
    except StoreError as error:
        raise InvalidRequest("the file is no base contract", param="base", value=error.message) from None


def as_data(seen: Inspection) -> dict[str, Any]:
    """The inspection as plain data, for `--json` and for answers."""
    findings = [{"code": finding.reason, "message": finding.message, **_numbers(finding)} for finding in seen.findings]
    fields = {name: getattr(seen, name) for name in Inspection.__dataclass_fields__ if name not in ("findings", "rules")}
    return {
        "publishable": seen.is_publishable,
        "findings": findings,
        "rules": [asdict(rule) for rule in seen.rules],
        **{name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()},
    }


def render(seen: Inspection, name: str) -> Iterator[RenderableType]:
    """The inspection for people: the verdict, each refusal with value, limit and way out, then what would be rewritten."""
    from rich.text import Text

    verdict = "can be published" if seen.is_publishable else f"would be refused ({len(seen.findings)})"
    style = "bold green" if seen.is_publishable else "bold red"
    yield Text.assemble((name, "bold"), " ", (verdict, style))
    if seen.num_modules:
        yield Text(_summary(seen))
    if seen.findings:
        yield _findings_table(seen)
    for rule in seen.rules:
        mark = ("lossy", "bold red") if rule.lossy else ("rewrite", "cyan")
        yield Text.assemble("  ", mark, f" {rule.name} ({rule.count})")
    for warning in seen.warnings:
        style = "bold red" if warning.startswith("LOSSY") else "yellow"
        yield Text.assemble("  ", ("warning", style), f" {warning}")
    if seen.digest:
        yield Text(f"  digest {seen.digest}")


def _findings_table(seen: Inspection) -> RenderableType:
    from rich.table import Column, Table
    from rich.text import Text

    code = Column("code", no_wrap=True)  # a code that is cut off can't be looked up
    table = Table(code, "what", "value", "limit", "what to do", show_lines=True)
    for finding in seen.findings:
        cells = (finding.reason, finding.message, finding.value, finding.limit, finding.hint)
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in cells))
    return table


def _summary(seen: Inspection) -> str:
    parts = [
        f"rank {seen.rank}, alpha {seen.alpha:g}, {seen.num_modules} modules ({', '.join(seen.modules)})",
        f"{seen.source_bytes:,} bytes" + (f" -> {seen.published_bytes:,}" if seen.published_bytes else ""),
    ]
    if seen.tool:
        parts.append(f"written by {seen.tool}, it seems")
    return "; ".join(parts)


def _numbers(finding: AdapterRefused) -> dict[str, Any]:
    return {"limit": finding.limit, "value": finding.value, "hint": finding.hint}
