"""adapters/README.md names every refusal and every rule of the publish contract, and no other."""

from __future__ import annotations

import re

from adapters.contract.refusals import CORRUPT_CODES, HINTS
from adapters.contract.rewrite import LOSSY_RULES, ORDINARY_RULES, RULES
from tests.repo.checkout import ROOT


def first_cells(heading: str) -> list[str]:
    """The code words in the first cells of the table below a heading of the contract's paper."""
    section = (ROOT / "adapters" / "README.md").read_text().partition(f"### {heading}\n")[2].partition("\n#")[0]
    return re.findall(r"^\| `([\w-]+)` \|", section, re.M)


def test_every_refusal_is_in_the_paper_and_no_other():
    assert first_cells("Refusals") == sorted(HINTS)


def test_every_rule_is_in_the_paper_in_its_order():
    assert first_cells("Rules") == list(RULES)


def test_every_code_in_the_code_is_known():
    sources = [path.read_text() for path in (ROOT / "adapters" / "contract").glob("*.py")]
    used = {code for text in sources for code in re.findall(r'\brefusal\(\s*"(\w+)"', text)}

    assert used <= HINTS.keys()
    assert HINTS.keys() >= CORRUPT_CODES


def test_the_kinds_of_rules_are_rules():
    assert set(RULES) >= ORDINARY_RULES | LOSSY_RULES
