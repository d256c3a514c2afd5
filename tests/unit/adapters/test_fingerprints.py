"""Which versions were checked against another state of their base."""

from __future__ import annotations

from dataclasses import replace

from adapters.names import AdapterRef
from adapters.registry.fingerprints import Changed, changed
from adapters.types import BaseContract, Manifest

NOW = BaseContract(base="demo", fingerprint="new", modules={}, max_rank=16)


def version(number: int, fingerprint: str | None, base: str = "demo") -> Manifest:
    ref = AdapterRef(base, "parrot", number)
    return Manifest(ref, "d", (), 8, 8.0, (), "2026-01-01T00:00:00Z", base_fingerprint=fingerprint)


def test_versions_of_the_base_as_it_was_are_named_in_order():
    found = changed(NOW, [version(1, "old"), version(2, "new"), version(3, "older")])
    assert found == [Changed(version(1, None).ref, "old", "new"), Changed(version(3, None).ref, "older", "new")]


def test_a_version_that_was_published_before_its_base_was_known_is_not_accused():
    assert changed(NOW, [version(1, None)]) == []


def test_versions_of_other_bases_are_none_of_it():
    assert changed(NOW, [version(1, "old", base="other")]) == []


def test_a_base_that_came_back_has_no_changed_versions():
    assert changed(replace(NOW, fingerprint="old"), [version(1, "old")]) == []
