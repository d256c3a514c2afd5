"""What public exporters leave is published as what it is, or refused for the reason that it has."""

from __future__ import annotations

import pytest

from adapters.contract import Inspection, inspect, prepare
from adapters.errors import AdapterRefused
from tests.adapter_folders import plain
from tests.exporter_layouts import ARCHIVES, LAYOUTS, SAME, Layout


def seen_of(layout: Layout, path) -> Inspection:
    layout.write(path)
    source = next(path.iterdir()) if layout in ARCHIVES else path
    return inspect(source, layout.contract, layout.options)


@pytest.mark.parametrize("layout", [*LAYOUTS, *ARCHIVES], ids=lambda layout: layout.name)
def test_a_folder_of_an_exporter_comes_to_what_it_should(layout, tmp_path):
    seen = seen_of(layout, tmp_path / "odd")
    codes = [finding.reason for finding in seen.findings]

    if isinstance(layout.expected, int):
        assert (codes, seen.num_modules) == ([], layout.expected)
    elif layout.expected != SAME:
        assert codes[:1] == [layout.expected], [finding.message for finding in seen.findings]
    else:
        good = inspect((layout.plain or plain(layout.contract)).write(tmp_path / "plain"), layout.contract)
        assert (codes, seen.digest) == ([], good.digest), [finding.message for finding in seen.findings]
    assert set(layout.rules) <= {rule.name for rule in seen.rules}
    assert layout.warns is None or layout.warns in " ".join(seen.warnings)
    assert not layout.source or seen.tool == layout.source


@pytest.mark.parametrize(
    "layout",
    [layout for layout in LAYOUTS if not isinstance(layout.expected, int) and layout.expected != SAME],
    ids=lambda layout: layout.name,
)
def test_what_is_refused_leaves_nothing_behind(layout, tmp_path):
    layout.write(tmp_path / "odd")
    with pytest.raises(AdapterRefused):
        prepare(tmp_path / "odd", layout.contract, layout.options, workdir=tmp_path / "out")

    assert list((tmp_path / "out").glob("*")) == []


def test_there_are_many_layouts_and_each_has_its_name():
    names = [layout.name for layout in [*LAYOUTS, *ARCHIVES]]

    assert len(names) == len(set(names)) >= 120
